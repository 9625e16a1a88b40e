#include <chrono>
#include <condition_variable>
#include <exception>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <utility>
#include <vector>

#include "catch.h"
#include "run/harness.h"
#include "run/random_plans.h"
#include "transport/progress.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

constexpr std::chrono::milliseconds kDriveLimit(20000);  // of a run; a test that hangs fails here

// Tells ends of messages to nobody but a thread that drives: a run over it ends only if it is driven.
class DrivenTransport final : public PassingTransport, public Source {
 public:
  // held: the thread of `progress` gets stuck here, as in a message that takes long.
  DrivenTransport(std::shared_ptr<Transport> inner, std::shared_ptr<Progress> progress, bool held)
      : PassingTransport(std::move(inner)), progress_(std::move(progress)), held_(held) {
    progress_->add(*this);
  }
  ~DrivenTransport() override {
    release();
    progress_->remove(*this);
  }

  void send(const Envelope& to, int64_t nbytes, std::unique_ptr<Outgoing> message) override {
    PassingTransport::send(to, nbytes, with_end(std::move(message), [this](auto tell) { hold(tell); }));
  }
  void recv(const Envelope& from, int64_t nbytes, std::unique_ptr<Incoming> message) override {
    PassingTransport::recv(from, nbytes, with_end(std::move(message), [this](auto tell) { hold(tell); }));
  }
  void shutdown() override {
    PassingTransport::shutdown();
    release();
    while (turn(Who::Driver)) {
    }
  }

  Source* source() noexcept override { return this; }
  Progress& progress() override { return *progress_; }
  bool turn(Who who) override {
    std::unique_lock lock(mutex_);
    if (who == Who::Thread) {
      in_there_ = held_;
      changed_.notify_all();
      changed_.wait(lock, [this] { return !held_; });
      return false;
    }
    auto ended = std::exchange(ended_, {});
    lock.unlock();
    for (const auto& end : ended) end();
    return !ended.empty();
  }
  bool arm(Who who) override {
    const std::lock_guard lock(mutex_);
    return who == Who::Thread || ended_.empty();
  }
  void kept_by(Keeper /*keeper*/) override {}

  void await_held() {
    std::unique_lock lock(mutex_);
    changed_.wait(lock, [this] { return in_there_; });
  }
  void release() {
    const std::lock_guard lock(mutex_);
    held_ = false;
    changed_.notify_all();
  }

 private:
  void hold(std::function<void()> end) {
    {
      const std::lock_guard lock(mutex_);
      ended_.push_back(std::move(end));
    }
    progress_->wake(Who::Driver);
  }

  const std::shared_ptr<Progress> progress_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void()>> ended_;
  bool held_ = false;
  bool in_there_ = false;  // the thread
};

Cluster::Wrap driven() {
  return [](int, std::shared_ptr<Transport> network) {
    return std::make_shared<DrivenTransport>(std::move(network), std::make_shared<Progress>(), false);
  };
}

// Ranks 0 and 1 have halves, and rank 2 gets both.
Plan two_halves() {
  Problem problem;
  problem.shape = {64};
  problem.element_bytes = 8;
  problem.src = {{{2}, {0, 1}}, {{PlacementKind::Shard, 0}}};
  problem.dst = {{{1}, {2}}, {{}}};
  return make_plan({problem}, uniform_topology(3, 1, 1000000000, 1, 8000000000, 1000), {});
}

bool ends_well(const RankRun& part) {
  return part.run->wait_until(Clock::now() + kDriveLimit) && !part.run->error() &&
         part.destination.data == part.expected;
}

}  // namespace

TEST_CASE("who drives a run makes all of it go on", "[exec][drive]") {
  const uint32_t seed = 23;
  INFO("seed " << seed);
  std::mt19937 rng(seed);
  for (int round = 0; round < 40; ++round) {
    const int world = 2 + static_cast<int>(rng() % 6);
    Cluster cluster(world, nullptr, {}, driven());
    const Plan plan = random_plan(rng, world);
    INFO("round " << round << ": " << describe(plan.problems[0].src) << " -> "
                  << describe(plan.problems[0].dst));
    std::vector<std::future<std::vector<bool>>> ranks;
    for (int rank = 0; rank < world; ++rank) {
      ranks.push_back(std::async(std::launch::async, [&, rank] {
        std::vector<bool> well;
        for (int i = 0; i < 5; ++i) {
          const RankRun part = start_rank(cluster, plan, rank, label(i), kDriveLimit);
          part.run->drive(TimePoint::max());
          well.push_back(part.run->ended() && ends_well(part));
        }
        return well;
      }));
    }
    for (auto& rank : ranks) CHECK(rank.get() == std::vector<bool>(5, true));
  }
}

TEST_CASE("a run that nobody drives stands still where the transport needs it", "[exec][drive]") {
  Cluster cluster(2, nullptr, {}, driven());
  const Plan plan = chain_plan(2, 16);
  const RankRun got = start_rank(cluster, plan, 1, label(0), kDriveLimit);
  const RankRun sent = start_rank(cluster, plan, 0, label(0), kDriveLimit);
  CHECK_FALSE(got.run->wait_until(Clock::now() + std::chrono::milliseconds(50)));
  got.run->drive(TimePoint::max());
  sent.run->drive(TimePoint::max());
  CHECK(ends_well(got));
  CHECK(ends_well(sent));
}

TEST_CASE("a driver comes back when its peer dies or the engine ends", "[exec][drive]") {
  for (const bool dies : {true, false}) {
    INFO("dies " << dies);
    Cluster cluster(2, nullptr, {}, driven());
    const RankRun got = start_rank(cluster, chain_plan(2, 16), 1, label(0), kDriveLimit);
    std::thread driver([&] { got.run->drive(TimePoint::max()); });
    if (dies) {
      cluster.kill(0);
    } else {
      cluster.engine(1).shutdown(
          std::make_exception_ptr(TransportError(TransportError::Cause::Aborted, "over")));
    }
    driver.join();
    REQUIRE(got.run->wait_until(Clock::now() + kDriveLimit));
    CHECK(got.run->error());
    got.run->drive(TimePoint::max());  // harmless, whatever has become of the engine
  }
}

// Its thread is held up, so that nobody else could take anything in.
TEST_CASE("who drives takes in what comes over the network and what comes over shared memory",
          "[exec][drive]") {
  for (int round = 0; round < 10; ++round) {
    const Progresses progresses = make_progresses(3);
    std::shared_ptr<DrivenTransport> held;
    const Cluster::Wrap wrap = [&](int rank, std::shared_ptr<Transport> network) -> std::shared_ptr<Transport> {
      if (rank != 2) return network;
      return held = std::make_shared<DrivenTransport>(std::move(network), progresses[2], true);
    };
    Cluster cluster(3, nullptr, {{1, 2}}, wrap, false, progresses);
    held->await_held();
    const Plan plan = two_halves();
    const RankRun got = start_rank(cluster, plan, 2, label(0), kDriveLimit);
    REQUIRE_FALSE(got.run->network.expired());
    REQUIRE_FALSE(got.run->local.expired());
    std::vector<std::future<bool>> senders;
    for (const int rank : {0, 1}) {
      senders.push_back(std::async(std::launch::async, [&, rank] {
        if (round % 3 == rank) std::this_thread::sleep_for(std::chrono::milliseconds(20));
        return ends_well(start_rank(cluster, plan, rank, label(0), kDriveLimit));
      }));
    }
    got.run->drive(TimePoint::max());
    CHECK(ends_well(got));
    for (auto& sender : senders) CHECK(sender.get());
    held->release();
  }
}

TEST_CASE("small local copies are made by who starts the run, large ones are not", "[exec][drive]") {
  for (const int64_t elements : {int64_t{1000}, int64_t{100000}}) {
    Cluster cluster(1);
    Problem problem;
    problem.shape = {elements};
    problem.element_bytes = 8;
    problem.src = {{{1}, {0}}, {{}}};
    problem.dst = problem.src;
    const Plan plan = make_plan({problem}, uniform_topology(1, 1, 1000000000, 1, 8000000000, 1000), {});
    const RankRun part = start_rank(cluster, plan, 0, label(0), kDriveLimit);
    if (elements == 1000) CHECK(part.run->ended());
    CHECK(ends_well(part));
  }
}
