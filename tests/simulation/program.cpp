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
constexpr seconds kAll{400};  // of virtual time, for a whole program
constexpr std::array<const char*, 6> kKinds{"MeshcastError",         "LayoutError",   "PlanMismatchError",
                                            "DeadlineExceededError", "PeerLostError", "AbortedError"};

const char* name_of(Act::Kind kind) {
  constexpr std::array<const char*, 5> names{"calls", "other arguments", "refuses", "refuses to start",
                                             "never comes"};
  return names[static_cast<size_t>(kind)];
}

const char* name_of(Fault::Kind kind) {
  constexpr std::array<const char*, 10> names{"kill",         "freeze",     "cut",   "cut unseen", "store slow",
                                              "store frozen", "store dead", "abort", "close",      "hang"};
  return names[static_cast<size_t>(kind)];
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
    for (int i = 0; i < plans; ++i) {
      do {
        auto plan = std::make_shared<const Plan>(testing::random_plan(rng, program.ranks));
        if (program.joined && !joins_all_ranks(*plan)) continue;
        plans_.push_back(std::move(plan));
      } while (plans_.size() <= static_cast<size_t>(i));
    }
    endings_.resize(static_cast<size_t>(program.ranks), std::vector<Ending>(program.calls.size()));
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
    for (const auto& rank : endings_)
      for (const Ending& each : rank) ++out.ends[text_of_ending(each)];
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

  static std::string text_of_ending(const Ending& each) {
    if (!each.done) return "not made";
    return each.error ? kKinds[static_cast<size_t>(*each.error)] : "success";
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
    return has({Fault::Kind::StoreSlow, Fault::Kind::StoreFrozen, Fault::Kind::StoreDead});
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
    const GroupIdentity identity{ranks, rank, "simulated"};
    const auto group = std::make_shared<Group>(
        identity, std::make_shared<SimulatedConnector>(scheduler_, storage_, network_, identity),
        std::make_shared<KnownOffers>(), program_.kept);
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
    calls(rank, group);
    note_left(rank);
    for (Thread& each : others) each.join();
    group->close(Clock::now() + seconds(2));
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

  void calls(int rank, const std::shared_ptr<Group>& group) {
    Transfers transfers;
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
      if (act.waits)
        finish(rank, made);
      else
        started.push_back(made);
    }
    for (const Started& each : started) finish(rank, each);
  }

  Started make(int rank, size_t i, const std::shared_ptr<Group>& group, Transfers& transfers) {
    const Call& call = program_.calls[i];
    const Act& act = call.acts[static_cast<size_t>(rank)];
    const TimePoint begun = Clock::now();
    if (act.kind == Act::Kind::Refuses) {
      group->refuse(0, std::nullopt, "its arguments are wrong", call.limit)->wait();
      end(rank, i, seconds_since(begun), 0, std::make_exception_ptr(LayoutError("its arguments are wrong")));
      return {};
    }
    // Of a kind that is new to this rank, whatever it is to the others.
    const bool other = act.kind == Act::Kind::OtherArguments;
    std::string descriptor = fmt::format("plan {}", call.plan);
    if (other) descriptor += fmt::format(" of rank {}", rank);
    auto& transfer = transfers[other ? -1 - call.plan : call.plan];
    if (!transfer) {
      const bool is_shared = call.plan % 2 == 0;
      transfer = std::make_shared<SimulatedTransfer>(
          group, 0, is_shared,
          CompiledPlans{{"reshard", descriptor}, plans_[static_cast<size_t>(call.plan)], nullptr});
    }
    const bool refuses = act.kind == Act::Kind::RefusesToStart;
    const auto start = std::make_shared<SimulatedStart>(transfer, call.limit, refuses);
    group->submit(start);
    return {i, start, begun};
  }

  static double seconds_since(TimePoint begun) {
    return duration_cast<std::chrono::duration<double>>(Clock::now() - begun).count();
  }

  void finish(int rank, const Started& part) {
    const TimePoint limit = part.begun + duration_cast<Clock::duration>(
                                             std::chrono::duration<double>(program_.calls[part.call].limit));
    const TimePoint from = std::max(limit, Clock::now());
    std::exception_ptr error;
    try {
      part.start->wait();
    } catch (const Error&) {
      error = std::current_exception();
    }
    const double beyond = seconds_since(from);
    if (!error && !part.start->is_right())
      throw Violation(fmt::format("rank {}: call {} succeeded with wrong bytes", rank, part.call));
    end(rank, part.call, part.start->took(part.begun), part.start->ran(), error, beyond);
  }

  // took, ran: seconds, the latter since it was started; 0: it never was. beyond: seconds that somebody has
  // waited for it past its limit.
  void end(int rank, size_t call, double took, double ran, const std::exception_ptr& error, double beyond = 0) {
    const Unwatched unwatched;
    if (gone_.count(rank)) return;
    Ending& ending = endings_[static_cast<size_t>(rank)][call];
    if (std::exchange(ending.done, true))
      throw Violation(fmt::format("rank {}: call {} ended twice", rank, call));
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
    const double limit = program_.calls[call].limit;
    if (std::max(beyond, ran - limit) > kBeyond + extra)
      throw Violation(fmt::format("rank {}: call {} with a limit of {:.2f} s ended {:.2f} s after that: {}",
                                  rank, call, limit, std::max(beyond, ran - limit), ending.text));
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
    const double calls =
        static_cast<double>(program_.calls.size() + 1) * (has_refusals() ? 60.0 + 30.0 * ranks : 60.0);
    const double most = ranks * (calls + 110.0 * duration_cast<std::chrono::duration<double>>(ended_).count());
    if (static_cast<double>(storage_.requests()) > most)
      throw Violation(
          fmt::format("{} requests to the store, where {:.0f} would do", storage_.requests(), most));
    // What ranks brought to their meeting, and agreements that nobody has come after to clear away.
    if (program_.faults.empty() && !differs_up_to(program_.calls.size() - 1) &&
        !late_up_to(program_.calls.size() - 1) &&
        storage_.content().size() > 3 * static_cast<size_t>(program_.ranks) + 4)
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
  }

  // The ranks come together for the first call, or none of them does.
  void judge_meeting() const {
    if (has_refusals()) return;
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
        if (each.peer >= 0 && !rank_differs_up_to(last, each.peer) && !rank_differs_up_to(last, rank))
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
  bool waited_too(size_t call, const Ending& each) const {
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
    if (has_act({Act::Kind::OtherArguments, Act::Kind::NeverComes})) return false;
    return program_.joined;
  }
  // The same of the last call alone where ranks do not wait: those before it may be in flight when another is
  // refused.
  bool last_goes_on() const {
    return program_.joined && program_.faults.empty() && !late_up_to(program_.calls.size() - 1);
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
    // Without a store, and over a network that tells nothing, the end of a rank's group looks like its death.
    if (store_is_hurt() && !program_.tells) return true;
    return std::any_of(program_.faults.begin(), program_.faults.end(), [&](const Fault& fault) {
      switch (fault.kind) {
        case Fault::Kind::Kill:
        case Fault::Kind::Close:
        case Fault::Kind::Abort:
        case Fault::Kind::Freeze: return fault.rank == peer;
        case Fault::Kind::Cut:
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
  std::vector<std::vector<Ending>> endings_;
  std::set<int> gone_;  // ranks whose part is over
  std::set<int> dead_;
  std::map<int, Clock::duration> left_at_;
  int64_t lives_ = 0;  // that the group had
  int left_ = 0;
  Clock::duration ended_{};  // when the last of them was
};

}  // namespace

Program draw_program(uint64_t seed) {
  std::mt19937_64 rng(seed * 0x9E3779B97F4A7C15U + 1);
  const auto draw = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(rng() % static_cast<uint64_t>(high - low + 1));
  };
  Program out;
  out.seed = seed;
  out.ranks = draw(1, 200) == 1 ? static_cast<int>(draw(9, 32)) : static_cast<int>(draw(2, 6));
  out.tells = draw(1, 3) != 1;
  if (draw(1, 3) == 1) out.kept = 1;
  const auto calls = static_cast<size_t>(draw(1, 6));
  const int64_t plans = draw(1, 3);
  const bool plain = draw(1, 4) == 1;      // nothing goes wrong
  out.joined = !plain && draw(1, 4) == 1;  // but refusals
  if (out.joined) out.ranks = static_cast<int>(draw(2, 3));
  const bool unlike = !plain && (out.joined || draw(1, 2) == 1);
  const bool all_wait = draw(1, out.joined ? 2 : 3) == 1;
  const bool only_refusals = out.joined || draw(1, 3) == 1;
  for (size_t i = 0; i < calls; ++i) {
    Call call;
    call.plan = static_cast<int>(draw(0, plans - 1));
    call.limit = plain ? 30.0 : 0.5 * static_cast<double>(draw(2, 20));
    for (int rank = 0; rank < out.ranks; ++rank) {
      Act act;
      if (draw(1, 2) == 1) act.late = draw(0, 1) == 1 ? draw(0, 500) : draw(0, 60000);
      if (!plain && !out.joined && draw(1, 40) == 1) act.late = draw(0, 8000000);
      // About when the others give it up.
      if (!plain && !out.joined && draw(1, 60) == 1)
        act.late = std::max<int64_t>(0, static_cast<int64_t>(1e6 * call.limit) + draw(-30000, 30000));
      act.waits = all_wait || draw(1, 3) != 1;
      if (unlike && draw(1, 8) == 1) act.kind = static_cast<Act::Kind>(only_refusals ? draw(2, 3) : draw(1, 4));
      if (act.kind == Act::Kind::NeverComes && draw(1, 4) != 1) act.kind = Act::Kind::Calls;
      call.acts.push_back(act);
    }
    out.calls.push_back(std::move(call));
  }
  if (plain || out.joined || draw(1, 3) == 1) return out;
  for (int64_t i = draw(1, 2); i > 0; --i) {
    Fault fault;
    fault.kind = static_cast<Fault::Kind>(draw(0, 9));
    fault.at = draw(0, 1) == 1 ? draw(0, 3000) : draw(0, 3000000);
    fault.rank = static_cast<int>(draw(0, out.ranks - 1));
    fault.other = static_cast<int>((fault.rank + draw(1, out.ranks - 1)) % out.ranks);
    fault.lasts = draw(0, 1) == 1 ? draw(0, 20000) : draw(0, 12000000);
    out.faults.push_back(fault);
  }
  return out;
}

std::string describe(const Program& program) {
  std::string out = fmt::format("program {}: {} ranks{}\n", program.seed, program.ranks,
                                program.tells ? "" : ", a network that tells nothing");
  if (program.joined) out.insert(out.size() - 1, ", all of which need each other");
  if (program.kept == 1) out.insert(out.size() - 1, ", one agreement kept");
  for (size_t i = 0; i < program.calls.size(); ++i) {
    const Call& call = program.calls[i];
    out += fmt::format("  call {}: plan {}, limit {} s", i, call.plan, call.limit);
    for (size_t rank = 0; rank < call.acts.size(); ++rank) {
      const Act& act = call.acts[rank];
      if (act == Act{}) continue;
      out += fmt::format("; rank {} {}", rank, name_of(act.kind));
      if (act.late > 0) out += fmt::format(" {} us late", act.late);
      if (!act.waits) out += " and goes on";
    }
    out += "\n";
  }
  for (const Fault& fault : program.faults)
    out += fmt::format("  at {} us: {} (rank {}, other {}, {} us)\n", fault.at, name_of(fault.kind), fault.rank,
                       fault.other, fault.lasts);
  return out;
}

std::vector<std::string> kinds_of(const Program& program) {
  std::set<std::string> found;
  for (const Fault& fault : program.faults) found.insert(name_of(fault.kind));
  for (const Call& call : program.calls)
    for (const Act& act : call.acts)
      if (act.kind != Act::Kind::Calls) found.insert(name_of(act.kind));
  if (found.empty()) return {"nothing"};
  return {found.begin(), found.end()};
}

Outcome run_program(const Program& program) { return Run(program).go(); }

}  // namespace meshcast::simulation
