#include "simulation/long_run.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <memory>
#include <numeric>
#include <optional>
#include <vector>

#include <fmt/format.h>
#include <malloc.h>

#include "simulation/machine.h"
#include "simulation/scheduler.h"
#include "simulation/world.h"

namespace meshcast::simulation {
namespace {

using std::chrono::seconds;

constexpr double kMostOfMany = 2;  // requests of a rank in a slow transfer, a second
constexpr double kMostOfFew = 6;
constexpr int kMany = 512;
constexpr double kMostMore = 20;  // for a rank that does not come, more than that
constexpr seconds kLong{5};
constexpr double kLimit = 10;
constexpr int32_t kAbsent = 0;

std::shared_ptr<const Plan> plan_of(int ranks, const Layout& src, const Layout& dst) {
  Problem problem;
  problem.shape = {ranks};
  problem.element_bytes = 8;
  problem.src = src;
  problem.dst = dst;
  PlanOptions options;
  options.strategy = Strategy::SendRecv;
  const auto topology = uniform_topology(ranks, 1, 1000000000, 1, 8000000000, 1000);
  return std::make_shared<const Plan>(make_plan({problem}, topology, options));
}

std::vector<int32_t> all_of(int ranks) {
  std::vector<int32_t> out(static_cast<size_t>(ranks));
  std::iota(out.begin(), out.end(), 0);
  return out;
}

Layout rows(std::vector<int32_t> ranks) {
  return {{{static_cast<int64_t>(ranks.size())}, std::move(ranks)}, {{PlacementKind::Shard, 0}}};
}

// From each rank to the one half way round.
std::shared_ptr<const Plan> pairs(int ranks) {
  auto other = all_of(ranks);
  std::rotate(other.begin(), other.begin() + ranks / 2, other.end());
  return plan_of(ranks, rows(all_of(ranks)), rows(other));
}

// From the first rank to all others.
std::shared_ptr<const Plan> fan(int ranks) {
  auto others = all_of(ranks);
  others.erase(others.begin());
  return plan_of(ranks, {{{1}, {0}}, {{}}}, {{{ranks - 1}, others}, {{}}});
}

class Crowd {
 public:
  explicit Crowd(int ranks)
      : ranks_(ranks), scheduler_(1), storage_(scheduler_), network_(scheduler_, ranks, true) {}

  Measured go() {
    Simulation::install(&scheduler_);
    Measured out;
    try {
      for (int rank = 0; rank < ranks_; ++rank)
        scheduler_.start_in(process_of(rank), [this, rank] { live(rank); });
      for (size_t i = 0; i < kCalls; ++i)
        scheduler_.at(begin_of(i), [this, i] {
          before_.push_back(storage_.requests());
          if (i == 1) network_.slow_down(kLong);
        });
      scheduler_.at(begin_of(1) + kLong + seconds(5), [this] {
        after_ = storage_.requests();
        network_.slow_down({});
      });
      scheduler_.run(seconds(400));
      for (int rank = 0; rank < ranks_; ++rank) scheduler_.end_process(process_of(rank));
      const double each = 1.0 / ranks_;
      const double met = each * static_cast<double>(before_[1] - before_[0]);
      const double slow = each * static_cast<double>(after_ - before_[1]) / static_cast<double>(kLong.count());
      const double failed = each * static_cast<double>(storage_.requests() - before_[3]);
      out.text = fmt::format(
          "{} ranks, requests of each to the store: {:.1f} for a first call, {:.2f} a second in one that takes "
          "{} s, {:.1f} for one of {} s that a rank does not come to, which ends {:.2f} s late",
          ranks_, met, slow, kLong.count(), failed, kLimit, latest_ - kLimit);
      const double most = ranks_ < kMany ? kMostOfFew : kMostOfMany;
      if (slow > most) out.violation = "a slow transfer floods the store";
      if (failed > most * kLimit + kMostMore) out.violation = "a call at its limit floods the store";
      if (latest_ > kLimit + 1.5) out.violation = "a call outlives its limit";
    } catch (const std::exception& error) {
      out.violation = error.what();
    }
    Simulation::install(nullptr);
    return out;
  }

 private:
  static constexpr size_t kCalls = 4;

  TimePoint begin_of(size_t call) const { return begun_ + call * seconds(60); }  // about, on each rank

  void live(int rank) {
    const GroupIdentity identity{all_of(ranks_), rank, "crowd"};
    const auto group = std::make_shared<Group>(
        identity, std::make_shared<SimulatedConnector>(scheduler_, storage_, network_, identity),
        std::make_shared<KnownOffers>(), 256);
    const auto transfer = [&](const char* name, const std::shared_ptr<const Plan>& plan) {
      return std::make_shared<SimulatedTransfer>(group, 0, true,
                                                 CompiledPlans{{"reshard", name}, plan, nullptr});
    };
    const std::array transfers{transfer("pairs", pairs_), transfer("fan", fan_)};
    for (size_t i = 0; i < kCalls; ++i) {
      sleep_until(begin_of(i));
      const bool fails = i == 3;
      if (fails && rank == kAbsent) {
        sleep_until(begin_of(kCalls));  // alive, and elsewhere
        break;
      }
      const auto start = std::make_shared<SimulatedStart>(transfers[i / 2], fails ? kLimit : 50, false);
      const TimePoint begun = Clock::now();
      std::optional<Error> error;
      group->submit(start);
      try {
        start->wait();
      } catch (const Error& raised) {
        error = raised;
      }
      const Unwatched unwatched;
      if (fails) {
        latest_ = std::max(latest_, std::chrono::duration<double>(Clock::now() - begun).count());
        const std::string named = fmt::format("ranks [{}] do not wait in it", kAbsent);
        if (!error || error->kind() != ErrorKind::DeadlineExceeded || error->context().peer != kAbsent ||
            std::string(error->what()).find(named) == std::string::npos)
          throw Violation(fmt::format("rank {} does not name rank {} alone: {}", rank, kAbsent,
                                      error ? error->what() : "no error"));
      } else if (error || !start->is_right()) {
        throw Violation(fmt::format("rank {}, call {}: {}", rank, i, error ? error->what() : "wrong bytes"));
      }
    }
    group->close(Clock::now() + seconds(2));
  }

  const int ranks_;
  Scheduler scheduler_;
  Storage storage_;
  Network network_;
  const std::shared_ptr<const Plan> pairs_ = pairs(ranks_);
  const std::shared_ptr<const Plan> fan_ = fan(ranks_);
  const TimePoint begun_ = scheduler_.now();
  std::vector<uint64_t> before_;  // requests, by call
  uint64_t after_ = 0;            // the slow one
  double latest_ = 0;             // end of the last call, in seconds
};

// Every other call is refused by one rank as it starts it, with the others in it.
class Job {
 public:
  explicit Job(int64_t generations)
      : generations_(generations),
        scheduler_(1),
        storage_(scheduler_),
        network_(scheduler_, kRanks, true),
        plan_(pairs(kRanks)) {}

  Measured go() {
    Simulation::install(&scheduler_);
    Measured out;
    try {
      for (int rank = 0; rank < kRanks; ++rank)
        scheduler_.start_in(process_of(rank), [this, rank] { live(rank); });
      scheduler_.run(seconds(generations_ + 100));
      for (int rank = 0; rank < kRanks; ++rank) scheduler_.end_process(process_of(rank));
      out.text = fmt::format(
          "{} generations of {} ranks: after {} of them {} keys and {} KiB, at the end {} and {}", generations_,
          kRanks, early_.generation, early_.keys, early_.bytes / 1024, late_.keys, late_.bytes / 1024);
      if (late_.keys > early_.keys + kRanks) out.violation = "keys are left in the store";
      if (late_.bytes > early_.bytes + kMostBytes) out.violation = "memory grows";
    } catch (const std::exception& error) {
      out.violation = error.what();
    }
    Simulation::install(nullptr);
    return out;
  }

 private:
  static constexpr int kRanks = 3;
  static constexpr size_t kMostBytes = 256 * 1024;
  struct Figures {
    int64_t generation = 0;
    size_t keys = 0;
    size_t bytes = 0;
  };

  void live(int rank) {
    const GroupIdentity identity{all_of(kRanks), rank, "job"};
    const auto group = std::make_shared<Group>(
        identity, std::make_shared<SimulatedConnector>(scheduler_, storage_, network_, identity),
        std::make_shared<KnownOffers>(), 256);
    const auto transfer = std::make_shared<SimulatedTransfer>(
        group, 0, true, CompiledPlans{{"reshard", "a plan"}, plan_, nullptr});
    for (int64_t generation = 0; generation < generations_; ++generation) {
      call(transfer, false, std::nullopt);
      const bool refuses = generation % kRanks == rank;
      call(transfer, refuses, refuses ? ErrorKind::Layout : ErrorKind::PlanMismatch);
      if (rank != 0) continue;
      if (generation == std::min<int64_t>(generations_ / 2, 100)) early_ = figures(generation);
      if (generation == generations_ - 1) late_ = figures(generation);
    }
    group->close(Clock::now() + seconds(2));
    if (group->generation() < generations_)
      throw Violation(fmt::format("only {} generations", group->generation()));
  }

  static void call(const std::shared_ptr<SimulatedTransfer>& transfer, bool refuses,
                   std::optional<ErrorKind> expected) {
    const auto start = std::make_shared<SimulatedStart>(transfer, kLimit, refuses);
    transfer->group->submit(start);
    std::optional<Error> error;
    try {
      start->wait();
    } catch (const Error& raised) {
      error = raised;
    }
    if (!error && start->is_right()) return;  // also one that needs nothing of the rank that refused it
    if (!error || error->kind() != expected)
      throw Violation(fmt::format("a call ended with {}", error ? error->what() : "wrong bytes"));
  }

  Figures figures(int64_t generation) const {
    const Unwatched unwatched;
    return {generation, storage_.content().size(), mallinfo2().uordblks};
  }

  const int64_t generations_;
  Scheduler scheduler_;
  Storage storage_;
  Network network_;
  const std::shared_ptr<const Plan> plan_;
  Figures early_;
  Figures late_;
};

}  // namespace

Measured run_crowd(int ranks) { return Crowd(ranks).go(); }
Measured run_generations(int64_t generations) { return Job(generations).go(); }

}  // namespace meshcast::simulation
