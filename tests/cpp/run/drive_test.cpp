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

using namespace meshcast;
using namespace meshcast::testing;

namespace {

constexpr std::chrono::milliseconds kLimit(20000);  // of a run; a test that hangs fails here

// Tells ends of messages to nobody but a thread that drives: a run over it ends only if it is driven.
class DrivenTransport final : public PassingTransport {
 public:
  using PassingTransport::PassingTransport;

  void send(const Envelope& to, int64_t nbytes, std::unique_ptr<Outgoing> message) override {
    PassingTransport::send(to, nbytes, with_end(std::move(message), [this](auto tell) { hold(tell); }));
  }
  void recv(const Envelope& from, int64_t nbytes, std::unique_ptr<Incoming> message) override {
    PassingTransport::recv(from, nbytes, with_end(std::move(message), [this](auto tell) { hold(tell); }));
  }

  void drive(const std::function<bool()>& done, TimePoint limit) override {
    std::unique_lock lock(mutex_);
    while (!done() && !closed_) {
      if (!changed_.wait_until(lock, limit, [this] { return closed_ || !ended_.empty(); })) return;
      tell(lock);
    }
  }

  void wake() noexcept override {
    const std::lock_guard lock(mutex_);
    changed_.notify_all();
  }

  void shutdown() override {
    PassingTransport::shutdown();
    std::unique_lock lock(mutex_);
    closed_ = true;
    changed_.notify_all();
    tell(lock);
  }

 private:
  void hold(std::function<void()> end) {
    const std::lock_guard lock(mutex_);
    ended_.push_back(std::move(end));
    changed_.notify_all();
  }

  void tell(std::unique_lock<std::mutex>& lock) {
    auto ended = std::exchange(ended_, {});
    lock.unlock();
    for (const auto& end : ended) end();
    ended.clear();
    lock.lock();
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::vector<std::function<void()>> ended_;
  bool closed_ = false;
};

Cluster::Wrap driven() {
  return [](int, std::shared_ptr<Transport> network) {
    return std::make_shared<DrivenTransport>(std::move(network));
  };
}

bool ends_well(const RankRun& part) {
  return part.run->wait_until(Clock::now() + kLimit) && !part.run->error() &&
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
          const RankRun part = start_rank(cluster, plan, rank, label(i), kLimit);
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
  const RankRun got = start_rank(cluster, plan, 1, label(0), kLimit);
  const RankRun sent = start_rank(cluster, plan, 0, label(0), kLimit);
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
    const RankRun got = start_rank(cluster, chain_plan(2, 16), 1, label(0), kLimit);
    std::thread driver([&] { got.run->drive(TimePoint::max()); });
    if (dies) {
      cluster.kill(0);
    } else {
      cluster.engine(1).shutdown(
          std::make_exception_ptr(TransportError(TransportError::Cause::Aborted, "over")));
    }
    driver.join();
    REQUIRE(got.run->wait_until(Clock::now() + kLimit));
    CHECK(got.run->error());
    got.run->drive(TimePoint::max());  // harmless, whatever has become of the engine
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
    const RankRun part = start_rank(cluster, plan, 0, label(0), kLimit);
    if (elements == 1000) CHECK(part.run->ended());
    CHECK(ends_well(part));
  }
}
