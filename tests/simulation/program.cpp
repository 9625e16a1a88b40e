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

#include "common/signals.h"
#include "cpp/run/harness.h"
#include "cpp/run/random_plans.h"
#include "group/group.h"
#include "group/group_core.h"
#include "group/transfer.h"
#include "plan/hash.h"
#include "simulation/judge.h"
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
constexpr double kWingLimit = 8;
constexpr const char* kWrong = "its arguments are wrong";
constexpr seconds kAll{600};  // of virtual time, for a whole program

std::shared_ptr<const Plan> reversed(const Plan& plan) {
  Problem problem = plan.problems.front();
  std::swap(problem.src, problem.dst);
  PlanOptions options;
  options.chunk_bytes = 64;
  return std::make_shared<const Plan>(make_plan({problem}, plan.topology, options));
}

// What a handler of a signal raises.
struct Interrupted : std::runtime_error {
  Interrupted() : std::runtime_error("a signal came") {}
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
    found_.endings.resize(static_cast<size_t>(program.ranks), std::vector<Ending>(program.calls.size()));
    found_.beside.resize(found_.endings.size(),
                         std::vector<Ending>(program.sides.size() + program.calls.size() + 2));
    left_ = program.ranks;
  }

  Outcome go() {
    Simulation::install(&scheduler_);
    running = this;
    look_for_signals_by([] { running->look(); });
    notify_of_long_waits([](const LongWait& wait) { running->note(wait); }, kLongWait);
    Outcome out;
    try {
      for (int rank = 0; rank < program_.ranks; ++rank)
        scheduler_.start_in(process_of(rank), [this, rank] { live(rank); });
      for (const Fault& fault : program_.faults) arrange(fault);
      scheduler_.run(kAll);
      for (int rank = 0; rank < program_.ranks; ++rank) scheduler_.end_process(process_of(rank));
      scheduler_.run(kAll);
      if (network_.in_flight() > 0) throw Violation("messages are left");
      for (int rank = 0; rank < program_.ranks; ++rank)
        if (network_.has_joined(rank)) found_.joined.insert(rank);
      found_.requests = storage_.requests();
      found_.keys = storage_.content().size();
      for (const auto& [key, value] : storage_.content()) found_.meetings += key.starts_with("meeting/");
      judge(program_, found_);
    } catch (const std::exception& error) {
      out.violation = error.what();
    }
    Simulation::install(nullptr);
    look_for_signals_by(nullptr);
    notify_of_long_waits(nullptr, 0);
    for (int rank = 0; rank < program_.ranks; ++rank) {
      const auto& its = found_.endings[static_cast<size_t>(rank)];
      for (size_t call = 0; call < its.size(); ++call) {
        ++out.ends[text_of(its[call])];
        out.calls.push_back(line_of(rank, call, its[call]));
      }
      const auto& beside = found_.beside[static_cast<size_t>(rank)];
      for (size_t i = 0; i < beside.size(); ++i)
        if (beside[i].done) out.calls.push_back("beside: " + line_of(rank, i, beside[i]));
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
        case Fault::Kind::Interrupt: signals_.insert(fault.rank); break;
        case Fault::Kind::Abort:
        case Fault::Kind::Close: break;  // a thread of the rank does it
      }
    });
  }

  // Handlers of signals run in a main thread alone.
  void look() {
    const Unwatched unwatched;
    const auto found = mains_.find(scheduler_.thread());
    if (found == mains_.end() || signals_.erase(found->second) == 0) return;
    found_.interrupted[found->second] = scheduler_.elapsed();
    throw Interrupted();
  }
  void note(const LongWait& wait) {
    const Unwatched unwatched;
    found_.noticed.push_back({wait, scheduler_.elapsed()});
  }
  void note_main(int rank) {
    const Unwatched unwatched;
    mains_[scheduler_.thread()] = rank;
  }

  // A rank's part is over. With the last one all that still waits is let go: the dead, whose threads end then,
  // and who waits for them.
  void leave() {
    const Unwatched unwatched;
    if (--left_ > 0) return;
    found_.ended = scheduler_.elapsed();
    scheduler_.at(scheduler_.now(), [this] {
      storage_.become(Storage::Health::Dead);
      for (int rank = 0; rank < program_.ranks; ++rank) {
        scheduler_.thaw(process_of(rank));
        network_.kill(rank, microseconds(1));
      }
    });
  }

  void live(int rank) {
    note_main(rank);
    std::vector<int32_t> ranks(static_cast<size_t>(program_.ranks));
    std::iota(ranks.begin(), ranks.end(), 0);
    const auto site = std::make_shared<SimulatedSite>(storage_);
    const auto open = std::make_shared<OpenRefusals>(ranks, rank, site);
    const auto group_of = [&](const std::vector<int32_t>& members, const std::string& name,
                              const std::shared_ptr<OpenRefusals>& open) {
      const GroupIdentity identity{members, rank, name};
      auto made = std::make_shared<Group>(
          identity, std::make_shared<SimulatedConnector>(scheduler_, storage_, network_, identity),
          std::make_shared<KnownOffers>(), program_.kept, open);
      if (open) open->know(made);
      return made;
    };
    const auto group = group_of(ranks, "simulated", open);
    site->add(group);
    const auto wing = has_wing(rank) ? group_of({0, 1}, "wing", open) : nullptr;
    if (wing) site->add(wing);
    std::vector<Thread> others;
    for (const Fault& fault : program_.faults) {
      if (fault.rank != rank || (fault.kind != Fault::Kind::Abort && fault.kind != Fault::Kind::Close))
        continue;
      others.emplace_back([group, wing, open, fault] {
        sleep_for(microseconds(fault.at));
        if (fault.kind == Fault::Kind::Abort) return group->abort("the program said so");
        open->close();
        if (wing) wing->close(Clock::now());
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
    try {
      if (wing) prepare_wing(rank, wing, open);
      calls(rank, group, open);
    } catch (const Interrupted&) {
      // The program ends, in good order.
    }
    note_left(rank);
    for (Thread& each : others) each.join();
    open->close();
    if (wing) wing->close(Clock::now() + seconds(2));
    group->close(Clock::now() + seconds(2));
    if (program_.again) {
      const auto second = group_of(ranks, "simulated again", nullptr);
      const auto transfer = transfer_of(second, 0, 0);
      make_beside(rank, wing_place() + 1, kAgainLimit,
                  std::make_shared<SimulatedStart>(transfer, kAgainLimit, false));
      second->close(Clock::now() + seconds(2));
    }
    const Unwatched unwatched;
    if (gone_.insert(rank).second) leave();
  }

  void note_left(int rank) {
    const Unwatched unwatched;
    mains_.erase(scheduler_.thread());
    found_.left_at[rank] = scheduler_.elapsed();
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
    finish(rank, found_.beside[static_cast<size_t>(rank)][index], fmt::format("call {} beside", index), limit,
           begun, *start);
  }

  bool has_wing(int rank) const { return program_.wing.is_there && rank < Wing::kRanks; }
  size_t wing_place() const { return program_.sides.size() + program_.calls.size(); }

  // Where a rank refuses that, the other one hears of it, and both prepare it again.
  void prepare_wing(int rank, const std::shared_ptr<Group>& wing, const std::shared_ptr<OpenRefusals>& open) {
    const int refuser = program_.wing.refuser;
    if (refuser == rank)
      OpenRefusals::refuse(std::make_shared<OpenRefusal>(kWrong, std::vector<int32_t>{}, true, kWingLimit),
                           {open});
    if (refuser >= 0 && refuser != rank) {
      sleep_for(microseconds(program_.wing.late));
      try {
        wing->connect(kWingLimit);
        if (program_.faults.empty())
          throw Violation(fmt::format("rank {} prepared what rank {} refused", rank, refuser));
      } catch (const Error& error) {
        const Unwatched unwatched;  // another thread may let go of it, by a count that sanitizers do not see
        if (program_.faults.empty() && error.kind() != ErrorKind::PlanMismatch)
          throw Violation(fmt::format("rank {} does not hear of a refusal: {}", rank, error.what()));
      }
    }
    const TimePoint begun = Clock::now();
    std::exception_ptr error;
    try {
      wing->connect(kWingLimit);
    } catch (const Error&) {
      error = std::current_exception();
    } catch (const Interrupted& raised) {
      wing->abort(raised.what());
      throw;
    }
    end(rank, found_.beside[static_cast<size_t>(rank)][wing_place()], "the wing", kWingLimit,
        seconds_since(begun), 0, error);
  }

  void calls(int rank, const std::shared_ptr<Group>& group, const std::shared_ptr<OpenRefusals>& open) {
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
      const Started made = make(rank, i, group, open, transfers);
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

  Started make(int rank, size_t i, const std::shared_ptr<Group>& group,
               const std::shared_ptr<OpenRefusals>& open, Transfers& transfers) {
    const Call& call = program_.calls[i];
    const Act& act = call.acts[static_cast<size_t>(rank)];
    const TimePoint begun = Clock::now();
    if (act.kind == Act::Kind::Refuses || act.kind == Act::Kind::RefusesUnread) {
      if (act.kind == Act::Kind::Refuses)
        group->refuse(0, std::nullopt, kWrong, call.limit)->wait();
      else
        OpenRefusals::refuse(std::make_shared<OpenRefusal>(kWrong, known_of(i), false, call.limit), {open});
      end(rank, found_.endings[static_cast<size_t>(rank)][i], fmt::format("call {}", i), call.limit,
          seconds_since(begun), 0, std::make_exception_ptr(LayoutError(kWrong)));
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

  // Ranks that are read from the arguments of an unread call. In its first call the group of all is no more
  // likely to be meant than a wing that is up, unless a rank is known that only it has.
  std::vector<int32_t> known_of(size_t call) const {
    if (call > 0 || !program_.wing.is_there) return {};
    return {program_.ranks - 1};
  }

  static double seconds_since(TimePoint begun) {
    return duration_cast<std::chrono::duration<double>>(Clock::now() - begun).count();
  }

  bool finish(int rank, const Started& part) {
    return finish(rank, found_.endings[static_cast<size_t>(rank)][part.call], fmt::format("call {}", part.call),
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
    } catch (const Interrupted& raised) {
      start.group()->abort(fmt::format("rank {} was interrupted: {}", rank, raised.what()));
      end(rank, ending, what, limit, start.took(begun), start.ran(),
          std::make_exception_ptr(Error(ErrorKind::Aborted, raised.what())));
      throw;
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

  const Program& program_;
  Scheduler scheduler_;
  Storage storage_;
  Network network_;
  std::vector<std::shared_ptr<const Plan>> plans_;
  std::vector<std::shared_ptr<const Plan>> reverse_plans_;  // null without backwards
  std::set<int> gone_;                                      // ranks whose part is over
  std::set<int> dead_;
  std::map<uint64_t, int> mains_;  // threads, with their ranks
  std::set<int> signals_;          // ranks to which one has come
  Findings found_;
  int left_ = 0;
  static Run* running;
};

Run* Run::running = nullptr;

}  // namespace

Outcome run_program(const Program& program) { return Run(program).go(); }

}  // namespace meshcast::simulation
