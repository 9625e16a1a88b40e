#include "simulation/program.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "cpp/run/harness.h"
#include "cpp/run/random_plans.h"
#include "group/group.h"
#include "group/group_core.h"
#include "group/transfer.h"
#include "plan/hash.h"
#include "simulation/machine.h"
#include "simulation/scheduler.h"
#include "simulation/world.h"

namespace meshcast::simulation {
namespace {

using std::chrono::duration_cast;
using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;

// A call may end later than its limit by the time that a store may owe an answer, the time that an aborted
// request may keep its memory, and the ticks between.
constexpr double kBeyond = 4.0;
constexpr double kAgainLimit = 100;
constexpr seconds kAll{600};  // of virtual time, for a whole program
constexpr std::array<const char*, 6> kKinds{"MeshcastError",         "LayoutError",   "PlanMismatchError",
                                            "DeadlineExceededError", "PeerLostError", "AbortedError"};

std::shared_ptr<const Plan> reversed(const Plan& plan) {
  Problem problem = plan.problems.front();
  std::swap(problem.src, problem.dst);
  PlanOptions options;
  options.chunk_bytes = 64;
  return std::make_shared<const Plan>(make_plan({problem}, plan.topology, options));
}

// How one call of one rank ended.
struct Ending {
  bool done = false;
  std::optional<ErrorKind> error;
  int32_t peer = -1;
  std::string text;
  Clock::duration begun{};
  Clock::duration at{};
  double ran = 0;  // seconds since it was started; 0 if that never came
};

class Run {
 public:
  explicit Run(const Program& program)
      : program_(program),
        scheduler_(program.seed),
        storage_(scheduler_),
        network_(scheduler_, program.ranks, program.tells) {
    std::mt19937 rng(static_cast<uint32_t>(program.seed));
    int plans = 1;
    for (const Call& call : program.calls) plans = std::max(plans, call.plan + 1);
    for (const Side& side : program.sides) plans = std::max(plans, side.plan + 1);
    for (int i = 0; i < plans; ++i) {
      do {
        auto plan = std::make_shared<const Plan>(testing::random_plan(rng, program.ranks));
        if (program.joined && !joins_all_ranks(*plan)) continue;
        plans_.push_back(std::move(plan));
      } while (plans_.size() <= static_cast<size_t>(i));
    }
    for (const auto& plan : plans_) reverse_plans_.push_back(program.backwards ? reversed(*plan) : nullptr);
    endings_.resize(static_cast<size_t>(program.ranks), std::vector<Ending>(program.calls.size()));
    beside_.resize(endings_.size(), std::vector<Ending>(program.sides.size() + program.calls.size() + 1));
    left_ = program.ranks;
  }

  Outcome go() {
    Simulation::install(&scheduler_);
    Outcome out;
    try {
      for (int rank = 0; rank < program_.ranks; ++rank)
        scheduler_.start_in(process_of(rank), [this, rank] { live(rank); });
      for (const Fault& fault : program_.faults) arrange(fault);
      scheduler_.run(kAll);
      for (int rank = 0; rank < program_.ranks; ++rank) scheduler_.end_process(process_of(rank));
      scheduler_.run(kAll);
      if (network_.in_flight() > 0) throw Violation("messages are left");
      judge();
    } catch (const std::exception& error) {
      out.violation = error.what();
    }
    Simulation::install(nullptr);
    for (int rank = 0; rank < program_.ranks; ++rank) {
      const auto& its = endings_[static_cast<size_t>(rank)];
      for (size_t call = 0; call < its.size(); ++call) {
        ++out.ends[text_of_ending(its[call])];
        out.calls.push_back(line_of(rank, call, its[call]));
      }
    }
    out.hand_overs = scheduler_.hand_overs();
    out.requests = storage_.requests();
    out.seconds = duration_cast<std::chrono::duration<double>>(scheduler_.elapsed()).count();
    return out;
  }

 private:
  struct Started {
    size_t call = 0;
    std::shared_ptr<SimulatedStart> start;
    TimePoint begun;
  };
  using Transfers = std::map<int, std::shared_ptr<SimulatedTransfer>>;  // by plan
  // The calls of one rank in a lane beside.
  struct Lane {
    std::vector<size_t> sides;
    Transfers transfers;
    Mutex mutex;
    Condition changed;
    bool over = false;
  };

  static std::string text_of_ending(const Ending& each) {
    if (!each.done) return "not made";
    return each.error ? kKinds[static_cast<size_t>(*each.error)] : "success";
  }

  static std::string line_of(int rank, size_t call, const Ending& each) {
    if (!each.done) return fmt::format("rank {}, call {}: not made", rank, call);
    const auto seconds = [](Clock::duration time) { return std::chrono::duration<double>(time).count(); };
    return fmt::format("rank {}, call {}: {:.6f} to {:.6f} s: {}{}", rank, call, seconds(each.begun),
                       seconds(each.at), text_of_ending(each), each.error ? ": " + each.text : "");
  }

  bool is_hurt(int rank) const {  // its time stood still, or ended
    return std::any_of(program_.faults.begin(), program_.faults.end(), [&](const Fault& fault) {
      return fault.rank == rank && (fault.kind == Fault::Kind::Kill || fault.kind == Fault::Kind::Freeze);
    });
  }
  bool has(std::initializer_list<Fault::Kind> kinds) const {
    return std::any_of(program_.faults.begin(), program_.faults.end(), [&](const Fault& fault) {
      return std::find(kinds.begin(), kinds.end(), fault.kind) != kinds.end();
    });
  }
  bool store_is_hurt() const {
    return has(
        {Fault::Kind::StoreSlow, Fault::Kind::StoreFrozen, Fault::Kind::StoreDead, Fault::Kind::StoreEmptied});
  }

  void arrange(const Fault& fault) {
    const TimePoint when = scheduler_.now() + microseconds(fault.at);
    const microseconds lasts(fault.lasts);
    scheduler_.at(when, [this, fault, lasts, when] {
      if (left_ == 0) return;
      switch (fault.kind) {
        case Fault::Kind::Kill:
          if (gone_.count(fault.rank)) break;
          scheduler_.freeze(process_of(fault.rank));
          network_.kill(fault.rank, lasts);
          dead_.insert(fault.rank);
          gone_.insert(fault.rank);
          leave();
          break;
        case Fault::Kind::Freeze:
          if (gone_.count(fault.rank)) break;
          scheduler_.freeze(process_of(fault.rank));
          scheduler_.at(when + lasts, [this, fault] {
            if (!dead_.count(fault.rank)) scheduler_.thaw(process_of(fault.rank));
          });
          break;
        case Fault::Kind::Cut: network_.cut(fault.rank, fault.other, lasts); break;
        case Fault::Kind::CutUnseen: network_.cut(fault.rank, fault.other, std::nullopt); break;
        case Fault::Kind::StoreSlow:
        case Fault::Kind::StoreFrozen:
          storage_.become(fault.kind == Fault::Kind::StoreSlow ? Storage::Health::Slow
                                                               : Storage::Health::Frozen);
          scheduler_.at(when + lasts, [this] { storage_.become(Storage::Health::Well); });
          break;
        case Fault::Kind::StoreDead: storage_.become(Storage::Health::Dead); break;
        case Fault::Kind::StoreEmptied: storage_.lose_all(); break;
        case Fault::Kind::HalfOpen: network_.half_open(fault.rank, fault.other); break;
        case Fault::Kind::Hang: network_.hang(fault.rank, lasts); break;
        case Fault::Kind::Abort:
        case Fault::Kind::Close: break;  // a thread of the rank does it
      }
    });
  }

  // A rank's part is over. With the last one all that still waits is let go: the dead, whose threads end then,
  // and who waits for them.
  void leave() {
    const Unwatched unwatched;
    if (--left_ > 0) return;
    ended_ = scheduler_.elapsed();
    scheduler_.at(scheduler_.now(), [this] {
      storage_.become(Storage::Health::Dead);
      for (int rank = 0; rank < program_.ranks; ++rank) {
        scheduler_.thaw(process_of(rank));
        network_.kill(rank, microseconds(1));
      }
    });
  }

  void live(int rank) {
    std::vector<int32_t> ranks(static_cast<size_t>(program_.ranks));
    std::iota(ranks.begin(), ranks.end(), 0);
    const auto group_of = [&](const std::string& name) {
      const GroupIdentity identity{ranks, rank, name};
      return std::make_shared<Group>(
          identity, std::make_shared<SimulatedConnector>(scheduler_, storage_, network_, identity),
          std::make_shared<KnownOffers>(), program_.kept);
    };
    const auto group = group_of("simulated");
    std::vector<Thread> others;
    for (const Fault& fault : program_.faults) {
      if (fault.rank != rank || (fault.kind != Fault::Kind::Abort && fault.kind != Fault::Kind::Close))
        continue;
      others.emplace_back([group, fault] {
        sleep_for(microseconds(fault.at));
        if (fault.kind == Fault::Kind::Abort) return group->abort("the program said so");
        group->close(Clock::now());
      });
    }
    std::map<int32_t, std::shared_ptr<Lane>> lanes;
    for (size_t i = 0; i < program_.sides.size(); ++i) {
      auto& lane = lanes[program_.sides[i].lane];
      if (!lane) lane = std::make_shared<Lane>();
      lane->sides.push_back(i);
      // Ranks agree in one order in all lanes; calls then begin in that of each.
      auto& transfer = lane->transfers[program_.sides[i].plan];
      if (transfer) continue;
      transfer = transfer_of(group, program_.sides[i].lane, program_.sides[i].plan, " beside");
      group->submit(std::make_shared<Agreement>(transfer, deadline_after(program_.sides[i].limit)));
    }
    for (const auto& [number, lane] : lanes)
      others.emplace_back([this, rank, lane = lane] {
        call_beside(rank, lane, 0);
        std::unique_lock lock(lane->mutex);
        while (!lane->over) lane->changed.wait(lock);
      });
    calls(rank, group);
    note_left(rank);
    for (Thread& each : others) each.join();
    group->close(Clock::now() + seconds(2));
    if (program_.again) {
      const auto second = group_of("simulated again");
      const auto transfer = transfer_of(second, 0, 0);
      make_beside(rank, program_.sides.size() + program_.calls.size(), kAgainLimit,
                  std::make_shared<SimulatedStart>(transfer, kAgainLimit, false));
      second->close(Clock::now() + seconds(2));
    }
    const Unwatched unwatched;
    lives_ = std::max(lives_, group->life());
    if (gone_.insert(rank).second) leave();
  }

  void note_left(int rank) {
    const Unwatched unwatched;
    left_at_[rank] = scheduler_.elapsed();
  }
  bool is_gone(int rank) const {
    const Unwatched unwatched;
    return gone_.count(rank) != 0;
  }

  std::shared_ptr<SimulatedTransfer> transfer_of(const std::shared_ptr<Group>& group, int32_t lane, int plan,
                                                 const std::string& unlike = {}) const {
    const auto at = static_cast<size_t>(plan);
    return std::make_shared<SimulatedTransfer>(
        group, lane, lane == 0 && plan % 2 == 0,
        CompiledPlans{{"reshard", fmt::format("plan {}{}", plan, unlike)}, plans_[at], reverse_plans_[at]});
  }

  // From that place on: each once the one before it has ended, or in a callback of that.
  void call_beside(int rank, const std::shared_ptr<Lane>& lane, size_t at) {
    for (std::shared_ptr<SimulatedStart> before; at < lane->sides.size(); ++at) {
      const size_t index = lane->sides[at];
      const Side& side = program_.sides[index];
      if (before && side.called_back &&
          before->call_back([this, rank, lane, at] { call_beside(rank, lane, at); }))
        return;
      if (rank == 1) sleep_for(microseconds(side.late));
      before = std::make_shared<SimulatedStart>(lane->transfers.at(side.plan), side.limit, false);
      make_beside(rank, index, side.limit, before);
    }
    const std::lock_guard lock(lane->mutex);
    lane->over = true;
    lane->changed.notify_all();
  }

  // Makes a call and waits for it.
  void make_beside(int rank, size_t index, double limit, const std::shared_ptr<SimulatedStart>& start) {
    const TimePoint begun = Clock::now();
    start->group()->submit(start);
    finish(rank, beside_[static_cast<size_t>(rank)][index], fmt::format("call {} beside", index), limit, begun,
           *start);
  }

  void calls(int rank, const std::shared_ptr<Group>& group) {
    Transfers transfers;
    std::vector<Started> succeeded;
    std::vector<Started> started;
    for (size_t i = 0; i < program_.calls.size(); ++i) {
      const Act& act = program_.calls[i].acts[static_cast<size_t>(rank)];
      if (act.kind == Act::Kind::NeverComes) {
        sleep_for(seconds(60));  // elsewhere, and alive
        break;
      }
      sleep_for(microseconds(act.late));
      const auto core = group->core();
      if (core && core->error() && !core->refused()) break;
      const Started made = make(rank, i, group, transfers);
      if (!made.start) continue;
      if (!act.waits)
        started.push_back(made);
      else if (finish(rank, made))
        succeeded.push_back(made);
    }
    for (const Started& each : started)
      if (finish(rank, each)) succeeded.push_back(each);
    if (!program_.backwards) return;
    std::sort(succeeded.begin(), succeeded.end(),
              [](const auto& one, const auto& other) { return one.call > other.call; });
    for (const Started& each : succeeded) {
      const Call& call = program_.calls[each.call];
      make_beside(rank, program_.sides.size() + each.call, call.limit,
                  each.start->backward(transfers[call.plan], call.limit));
    }
  }

  Started make(int rank, size_t i, const std::shared_ptr<Group>& group, Transfers& transfers) {
    const Call& call = program_.calls[i];
    const Act& act = call.acts[static_cast<size_t>(rank)];
    const TimePoint begun = Clock::now();
    if (act.kind == Act::Kind::Refuses) {
      group->refuse(0, std::nullopt, "its arguments are wrong", call.limit)->wait();
      end(rank, endings_[static_cast<size_t>(rank)][i], fmt::format("call {}", i), call.limit,
          seconds_since(begun), 0, std::make_exception_ptr(LayoutError("its arguments are wrong")));
      return {};
    }
    // Of a kind that is new to this rank, whatever it is to the others.
    const bool other = act.kind == Act::Kind::OtherArguments;
    auto& transfer = transfers[other ? -1 - call.plan : call.plan];
    if (!transfer)
      transfer = transfer_of(group, 0, call.plan, other ? fmt::format(" of rank {}", rank) : std::string());
    const bool refuses = act.kind == Act::Kind::RefusesToStart;
    const auto start = std::make_shared<SimulatedStart>(transfer, call.limit, refuses);
    group->submit(start);
    return {i, start, begun};
  }

  static double seconds_since(TimePoint begun) {
    return duration_cast<std::chrono::duration<double>>(Clock::now() - begun).count();
  }

  bool finish(int rank, const Started& part) {
    return finish(rank, endings_[static_cast<size_t>(rank)][part.call], fmt::format("call {}", part.call),
                  program_.calls[part.call].limit, part.begun, *part.start);
  }
  // Waits for a call; whether it succeeds.
  bool finish(int rank, Ending& ending, const std::string& what, double limit, TimePoint begun,
              SimulatedStart& start) {
    const TimePoint until = begun + duration_cast<Clock::duration>(std::chrono::duration<double>(limit));
    const TimePoint from = std::max(until, Clock::now());
    std::exception_ptr error;
    try {
      start.wait();
    } catch (const Error&) {
      error = std::current_exception();
    }
    const double beyond = seconds_since(from);
    if (!error && !start.is_right())
      throw Violation(fmt::format("rank {}: {} succeeded with wrong bytes", rank, what));
    end(rank, ending, what, limit, start.took(begun), start.ran(), error, beyond);
    return !error;
  }

  // took, ran: seconds, the latter since it was started; 0: it never was. beyond: seconds that somebody has
  // waited for it past its limit.
  void end(int rank, Ending& ending, const std::string& what, double limit, double took, double ran,
           const std::exception_ptr& error, double beyond = 0) {
    const Unwatched unwatched;
    if (gone_.count(rank)) return;
    if (std::exchange(ending.done, true)) throw Violation(fmt::format("rank {}: {} ended twice", rank, what));
    ending.at = scheduler_.elapsed();
    ending.begun = ending.at - duration_cast<Clock::duration>(std::chrono::duration<double>(took));
    ending.ran = ran;
    if (error) {
      try {
        std::rethrow_exception(error);
      } catch (const Error& typed) {
        ending.error = typed.kind();
        ending.peer = typed.context().peer;
        ending.text = typed.what();
      }
    }
    double extra = 0;
    for (const Fault& fault : program_.faults)
      if (fault.kind == Fault::Kind::Freeze && fault.rank == rank)
        extra += 1e-6 * static_cast<double>(fault.lasts);
    if (std::max(beyond, ran - limit) > kBeyond + extra)
      throw Violation(fmt::format("rank {}: {} with a limit of {:.2f} s ended {:.2f} s after that: {}", rank,
                                  what, limit, std::max(beyond, ran - limit), ending.text));
  }

  // Which ranks of a call do not do what the others do.
  bool differs(size_t call) const {
    const auto& acts = program_.calls[call].acts;
    return std::any_of(acts.begin(), acts.end(), [](const Act& act) { return act.kind != Act::Kind::Calls; });
  }
  bool differs_up_to(size_t call) const {
    for (size_t i = 0; i <= call; ++i)
      if (differs(i)) return true;
    return false;
  }
  bool rank_differs_up_to(size_t call, int32_t rank) const {
    for (size_t i = 0; i <= call; ++i)
      if (program_.calls[i].acts[static_cast<size_t>(rank)].kind != Act::Kind::Calls) return true;
    return false;
  }
  bool late_up_to(size_t call) const {
    for (size_t i = 0; i <= call; ++i)
      for (const Act& act : program_.calls[i].acts)
        if (act.kind == Act::Kind::NeverComes || 1e-6 * static_cast<double>(act.late) > 0.2) return true;
    return false;
  }

  void judge() const {
    // Who waits asks ever less often, up to some 50 times a second, however many they are. Who refuses a call
    // asks each of the others for a moment.
    const auto ranks = static_cast<double>(program_.ranks);
    const double calls = static_cast<double>(program_.calls.size() + program_.sides.size() + 2) *
                         (has_refusals() ? 60.0 + 30.0 * ranks : 60.0);
    const double most = ranks * (calls + 110.0 * duration_cast<std::chrono::duration<double>>(ended_).count());
    if (static_cast<double>(storage_.requests()) > most)
      throw Violation(
          fmt::format("{} requests to the store, where {:.0f} would do", storage_.requests(), most));
    // What ranks brought to their meeting, and agreements that nobody has come after to clear away.
    if (program_.faults.empty() && !differs_up_to(program_.calls.size() - 1) &&
        !late_up_to(program_.calls.size() - 1) &&
        storage_.content().size() >
            (3 * static_cast<size_t>(program_.ranks) + 4) * (1 + program_.sides.size() + program_.again))
      throw Violation(fmt::format("{} keys are left in the store", storage_.content().size()));
    const size_t last = program_.calls.size() - 1;
    for (int rank = 0; rank < program_.ranks; ++rank) {
      for (size_t call = 0; call <= last; ++call) {
        const Ending& each = endings_[static_cast<size_t>(rank)][call];
        const auto wrong = [&](const std::string& why) {
          throw Violation(fmt::format("rank {}, call {}: {}: {}", rank, call, why, each.text));
        };
        const Act::Kind own = program_.calls[call].acts[static_cast<size_t>(rank)].kind;
        if (program_.faults.empty() && !differs_up_to(call) && !late_up_to(call) && !each.done)
          wrong("a call that nothing kept from being made was not made");
        const bool must_go_on = goes_on() || (call == last && last_goes_on());
        if (must_go_on && (!each.done || (each.error && !differs(call)))) wrong("the group did not go on");
        if (!each.done || is_hurt(rank)) continue;
        if (!each.error) {
          if (own != Act::Kind::Calls) wrong(fmt::format("a call that {} succeeded", name_of(own)));
          continue;
        }
        if (own == Act::Kind::Refuses || own == Act::Kind::RefusesToStart) {
          if (*each.error == ErrorKind::Layout) continue;
        }
        if (const std::string why = unexplained(rank, call, each); !why.empty()) wrong(why);
      }
    }
    judge_culprits();
    judge_meeting();
    for (int rank = 0; rank < program_.ranks; ++rank)
      for (size_t i = 0; i < beside_.front().size(); ++i) judge_beside(rank, i);
  }

  // A call in another lane, a backward, or that of the second group.
  void judge_beside(int rank, size_t index) const {
    const Ending& each = beside_[static_cast<size_t>(rank)][index];
    const size_t last = program_.calls.size() - 1;
    const bool differ = differs_up_to(last);
    const bool calm = program_.faults.empty() && !differ && !late_up_to(last);
    const auto wrong = [&](const std::string& why) {
      throw Violation(fmt::format("rank {}, call {} beside: {}: {}", rank, index, why, each.text));
    };
    const bool second = index == beside_.front().size() - 1;
    const bool is_drawn = index < program_.sides.size() || (second ? program_.again : program_.backwards);
    // What befell the first group is nothing to the second, unless it lasts.
    const bool must = calm || (second && !has_lasting_faults() && !is_hurt_any());
    if (is_drawn && must && (!each.done || each.error)) wrong("nothing kept it from its end");
    if (!each.done || !each.error || is_hurt(rank)) return;
    switch (*each.error) {
      case ErrorKind::PlanMismatch:
        if (!differ || second) wrong("no rank called with other arguments");
        break;
      case ErrorKind::PeerLost:
        if (!may_be_lost(each.peer, each.at)) wrong(fmt::format("rank {} was not lost", each.peer));
        break;
      case ErrorKind::Generic:
        if (!store_is_hurt()) wrong("the store was well");
        break;
      case ErrorKind::Layout: wrong("its arguments were right");
      case ErrorKind::Aborted:
      case ErrorKind::DeadlineExceeded: break;
    }
  }
  bool has_lasting_faults() const {
    return has({Fault::Kind::Kill, Fault::Kind::Cut, Fault::Kind::CutUnseen, Fault::Kind::HalfOpen,
                Fault::Kind::StoreDead, Fault::Kind::StoreFrozen, Fault::Kind::StoreEmptied});
  }
  bool is_hurt_any() const { return has({Fault::Kind::Freeze}); }

  // The ranks come together for the first call, or none of them does.
  void judge_meeting() const {
    if (has_refusals() || has({Fault::Kind::StoreEmptied})) return;
    const Ending* met = nullptr;
    const Ending* failed = nullptr;
    for (const auto& its : endings_) {
      const Ending& first = its.front();
      if (!first.done) continue;
      const bool connects = first.text.find("ranks did not connect") != std::string::npos;
      if (!first.error || connects) met = &first;
      if (first.error && is_meeting(first)) failed = &first;
    }
    if (met && failed) throw Violation("one rank has met the others, and one has not: " + failed->text);
  }

  // Why nothing that was drawn explains an error; "" where something does.
  std::string unexplained(int rank, size_t call, const Ending& each) const {
    const size_t last = program_.calls.size() - 1;
    const bool faults = !program_.faults.empty();
    const bool late = late_up_to(last);
    // A command that does not end by itself looks like this to who waits for it.
    if (!store_is_hurt() && !has({Fault::Kind::Freeze}) &&
        each.text.find("could not begin within its limit: the rendezvous store") != std::string::npos)
      return "the store was well";
    switch (*each.error) {
      case ErrorKind::PlanMismatch:
        // Where a later call ends the group, that is what is named.
        if (!differs_up_to(last)) return "no rank called with other arguments";
        if (each.text.find("refused its arguments") != std::string::npos &&
            !refused_up_to(is_own(each, call) ? call : last))
          return "no rank had refused this call or one before it";
        if (!faults && each.ran > 0 && names_later(each, call) && !has_other_arguments())
          return "it was under way, and only a later call was refused";
        // In another call it cannot know which of the two is the one that differs.
        if (each.peer >= 0 && is_own(each, call) && !rank_differs_up_to(last, each.peer) &&
            !rank_differs_up_to(last, rank))
          return fmt::format("neither rank {} nor this one called with other arguments", each.peer);
        return {};
      case ErrorKind::DeadlineExceeded:
        // After a refusal ranks meet again as they come to their next call. One that ended this call before it
        // heard of that may have none left. One that died before it came was never seen.
        if (is_meeting(each) && is_hurt(each.peer)) return {};
        if ((is_meeting(each) || is_queued(each)) && !program_.joined &&
            (anybody_succeeded(call) || has_refusals()))
          return {};
        if (!faults && !late) {
          if (!differs_up_to(call)) return "nothing kept a rank from its limit";
          // A rank to which its kind is known, and that has nothing to move, does not stand still in it. Once a
          // later call is refused, nobody compares any more.
          if (program_.calls[call].limit > 4 && is_own(each, call) && !anybody_succeeded_unlike(call) &&
              !has_refusals())
            return "all ranks are there, and would have said that they differ";
          const bool only_refusals = !has_act({Act::Kind::OtherArguments, Act::Kind::NeverComes});
          if (only_refusals && program_.calls[call].limit > 3)
            return "all ranks came to it, and one refused it";
        }
        if (seen_dead_during(each)) return "a rank had been lost long before";
        if (waited_too(call, each)) return fmt::format("rank {} waited in it, too", each.peer);
        return {};
      case ErrorKind::PeerLost:
        if (!may_be_lost(each.peer, each.at)) return fmt::format("rank {} was not lost", each.peer);
        if (!faults && !late && !has_other_arguments())
          return "a rank left because of a refusal, and had said so";
        return {};
      case ErrorKind::Aborted: return !faults && !late && !differs_up_to(last) ? "nobody aborted" : "";
      case ErrorKind::Generic: return store_is_hurt() ? "" : "the store was well";
      case ErrorKind::Layout: return "its arguments were right";
    }
    return "it has no kind";
  }

  static bool is_meeting(const Ending& each) {
    return each.text.find("did not call within") != std::string::npos;
  }
  // Whether it tells of the limit of that call, and not of another with which the group failed.
  static bool is_own(const Ending& each, size_t call) {
    return each.text.find(fmt::format("call {} of", call)) != std::string::npos;
  }
  bool names_later(const Ending& each, size_t call) const {
    for (size_t later = call + 1; later < program_.calls.size(); ++later)
      if (is_own(each, later)) return !is_own(each, call);
    return false;
  }
  static bool is_queued(const Ending& each) { return each.text.find("was still queued") != std::string::npos; }
  bool anybody_succeeded(size_t call) const {
    return std::any_of(endings_.begin(), endings_.end(),
                       [&](const auto& its) { return its[call].done && !its[call].error; });
  }

  // Whether one rank died, which is all that happened, and that was seen well before the call ended.
  bool seen_dead_during(const Ending& each) const {
    if (!program_.tells || program_.faults.size() != 1 || program_.faults[0].kind != Fault::Kind::Kill)
      return false;
    if (differs_up_to(program_.calls.size() - 1) || late_up_to(program_.calls.size() - 1)) return false;
    const Fault& fault = program_.faults[0];
    if (!network_.has_joined(fault.rank)) return false;  // it died before it came
    const auto seen = std::max<Clock::duration>(each.begun, microseconds(fault.at + fault.lasts));
    return each.at > seen + milliseconds(1500);
  }

  // Whether an error names a rank as not in the call that had been in it for long, and had told so.
  // Of other lanes nothing is kept, and the text does not say the lane.
  bool waited_too(size_t call, const Ending& each) const {
    if (!program_.sides.empty()) return false;
    if (each.text.find(fmt::format("reshard call {} of", call)) == std::string::npos) return false;
    if (each.text.find("do not wait in it") == std::string::npos || store_is_hurt()) return false;
    if (program_.faults.size() > 1 || is_hurt(each.peer)) return false;
    const Ending& its = endings_[static_cast<size_t>(each.peer)][call];
    return its.done && its.error && its.ran > 3 && its.at + milliseconds(500) > each.at;
  }

  bool refused_up_to(size_t call) const {
    for (size_t i = 0; i <= call; ++i)
      for (const Act& act : program_.calls[i].acts)
        if (act.kind == Act::Kind::Refuses || act.kind == Act::Kind::RefusesToStart) return true;
    return false;
  }

  // Whether all that happens is that ranks refuse calls, and wait for each before they make the next: then all
  // other calls succeed, over as many lives as that takes. Ranks that do not need the one that refused a call
  // may be through with the next before they hear of it.
  bool goes_on() const {
    if (!program_.faults.empty() || !all_wait() || late_up_to(program_.calls.size() - 1)) return false;
    if (!program_.sides.empty()) return false;  // calls of other lanes that are in flight end with a life
    if (has_act({Act::Kind::OtherArguments, Act::Kind::NeverComes})) return false;
    return program_.joined;
  }
  // The same of the last call alone where ranks do not wait: those before it may be in flight when another is
  // refused.
  bool last_goes_on() const {
    return program_.joined && program_.sides.empty() && program_.faults.empty() &&
           !late_up_to(program_.calls.size() - 1);
  }
  bool joins_all_ranks(const Plan& plan) const {
    std::vector<int32_t> ranks(static_cast<size_t>(program_.ranks));
    std::iota(ranks.begin(), ranks.end(), 0);
    return std::all_of(ranks.begin(), ranks.end(), [&](int32_t rank) {
      std::set<int32_t> peers{rank};
      const meshcast::Program moves = project(plan, rank, ranks, {});
      for (const SendOp& send : moves.sends)
        for (const Target& target : send.targets) peers.insert(target.peer);
      for (const RecvOp& recv : moves.recvs) peers.insert(recv.peer);
      return peers.size() == ranks.size();
    });
  }

  // With one fault, and a store that tells all ranks the first cause, they name one culprit.
  void judge_culprits() const {
    if (program_.faults.size() != 1 || store_is_hurt() || has({Fault::Kind::Freeze})) return;
    if (differs_up_to(program_.calls.size() - 1) || late_up_to(program_.calls.size() - 1)) return;
    std::set<int32_t> culprits;
    std::string texts;
    for (int rank = 0; rank < program_.ranks; ++rank) {
      if (is_hurt(rank)) continue;
      for (const Ending& each : endings_[static_cast<size_t>(rank)]) {
        if (!each.done || each.error != ErrorKind::PeerLost) continue;
        culprits.insert(each.peer);
        texts += "\n  " + each.text;
        break;  // what comes later is that the group has ended
      }
    }
    if (culprits.size() > 1) throw Violation("ranks name different culprits:" + texts);
  }

  // In a call in which ranks differ, up to this one.
  bool anybody_succeeded_unlike(size_t call) const {
    for (size_t i = 0; i <= call; ++i)
      for (const auto& its : endings_)
        if (differs(i) && its[i].done && !its[i].error) return true;
    return false;
  }
  bool has_act(std::initializer_list<Act::Kind> kinds) const {
    for (const Call& call : program_.calls)
      for (const Act& act : call.acts)
        if (std::find(kinds.begin(), kinds.end(), act.kind) != kinds.end()) return true;
    return false;
  }
  bool all_wait() const {
    return std::all_of(program_.calls.begin(), program_.calls.end(), [](const Call& call) {
      return std::all_of(call.acts.begin(), call.acts.end(), [](const Act& act) { return act.waits; });
    });
  }
  bool has_other_arguments() const { return has_act({Act::Kind::OtherArguments}); }
  bool has_refusals() const { return has_act({Act::Kind::Refuses, Act::Kind::RefusesToStart}); }

  bool may_be_lost(int32_t peer, Clock::duration when) const {
    if (peer < 0) return false;
    // A rank whose call failed may have left its group by then.
    const auto& its = endings_[static_cast<size_t>(peer)];
    const auto left = left_at_.find(peer);
    const bool has_left = left != left_at_.end() && left->second <= when;
    for (const Ending& each : its)
      if (each.error && has_left) return true;
    // Over a network that tells nothing, the end of a rank's group looks like its death to who sees it before
    // the board says why, and without a store to all.
    for (const Ending& each : its)
      if (each.error && !program_.tells && each.at <= when) return true;
    if (store_is_hurt() && !program_.tells) return true;
    return std::any_of(program_.faults.begin(), program_.faults.end(), [&](const Fault& fault) {
      switch (fault.kind) {
        case Fault::Kind::Kill:
        case Fault::Kind::Close:
        case Fault::Kind::Abort:
        case Fault::Kind::Freeze: return fault.rank == peer;
        case Fault::Kind::Cut:
        case Fault::Kind::HalfOpen:
        case Fault::Kind::CutUnseen: return fault.rank == peer || fault.other == peer;
        default: return false;
      }
    });
  }

  const Program& program_;
  Scheduler scheduler_;
  Storage storage_;
  Network network_;
  std::vector<std::shared_ptr<const Plan>> plans_;
  std::vector<std::shared_ptr<const Plan>> reverse_plans_;  // null without backwards
  std::vector<std::vector<Ending>> endings_;
  std::vector<std::vector<Ending>> beside_;  // of sides, then backwards by call, then of the second group
  std::set<int> gone_;                       // ranks whose part is over
  std::set<int> dead_;
  std::map<int, Clock::duration> left_at_;
  int64_t lives_ = 0;  // that the group had
  int left_ = 0;
  Clock::duration ended_{};  // when the last of them was
};

}  // namespace

Outcome run_program(const Program& program) { return Run(program).go(); }

}  // namespace meshcast::simulation
