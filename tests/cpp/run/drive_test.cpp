#include <chrono>
#include <exception>
#include <future>
#include <memory>
#include <mutex>
#include <optional>
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

// Tells in which thread the next wait for a message begins.
class WatchedTransport final : public Transport {
 public:
  explicit WatchedTransport(std::shared_ptr<Transport> inner) : inner_(std::move(inner)) {}

  std::unique_ptr<Request> send(int peer, int32_t tag, const void* data, int64_t nbytes) override {
    return inner_->send(peer, tag, data, nbytes);
  }
  std::unique_ptr<Request> recv(int peer, int32_t tag, void* data, int64_t nbytes) override {
    return std::make_unique<Watched>(inner_->recv(peer, tag, data, nbytes), this);
  }

  std::future<std::thread::id> next_waiter() {
    const std::lock_guard lock(mutex_);
    waiter_.emplace();
    return waiter_->get_future();
  }

 private:
  class Watched final : public Request {
   public:
    Watched(std::unique_ptr<Request> inner, WatchedTransport* transport)
        : inner_(std::move(inner)), transport_(transport) {}
    void wait(TimePoint deadline) override {
      transport_->begins();
      inner_->wait(deadline);
    }
    void abort() noexcept override { inner_->abort(); }

   private:
    std::unique_ptr<Request> inner_;
    WatchedTransport* transport_;
  };

  void begins() {
    const std::lock_guard lock(mutex_);
    if (waiter_) waiter_->set_value(std::this_thread::get_id());
    waiter_.reset();
  }

  const std::shared_ptr<Transport> inner_;
  std::mutex mutex_;
  std::optional<std::promise<std::thread::id>> waiter_;
};

// Two ranks, of which rank 1 receives through a watched transport. Who takes a message, its driver or the
// thread of the channel, is open where that thread has just done something else: the tests hold for both,
// except the first, which tries until the driver has done it.
struct Pair {
  std::shared_ptr<WatchedTransport> watched;
  Cluster cluster{2, nullptr, {}, [this](int rank, std::shared_ptr<Transport> network) {
                    if (rank == 0) return network;
                    watched = std::make_shared<WatchedTransport>(std::move(network));
                    return std::shared_ptr<Transport>(watched);
                  }};
  Plan plan = chain_plan(2, 16);  // one message
};

bool ends_well(const RankRun& part) {
  return part.run->wait_until(Clock::now() + kLimit) && !part.run->error() &&
         part.destination.data == part.expected;
}

}  // namespace

TEST_CASE("random plans of driven runs fill every destination", "[exec][drive]") {
  const uint32_t seed = 23;
  INFO("seed " << seed);
  std::mt19937 rng(seed);
  for (int round = 0; round < 40; ++round) {
    const int world = 2 + static_cast<int>(rng() % 6);
    Cluster cluster(world);
    const Plan plan = random_plan(rng, world);
    INFO("round " << round << ": " << describe(plan.problems[0].src) << " -> "
                  << describe(plan.problems[0].dst));
    std::vector<std::future<std::vector<bool>>> ranks;
    for (int rank = 0; rank < world; ++rank) {
      const bool always = rng() % 2 != 0;
      ranks.push_back(std::async(std::launch::async, [&, rank, always] {
        std::vector<bool> well;
        for (int i = 0; i < 5; ++i) {
          const RankRun part = start_rank(cluster, plan, rank, label(i), kLimit, always || i % 2 == 0);
          part.run->drive();
          well.push_back(ends_well(part));
        }
        return well;
      }));
    }
    for (auto& rank : ranks) CHECK(rank.get() == std::vector<bool>(5, true));
  }
}

TEST_CASE("who drives a run waits for the message itself", "[exec][drive]") {
  Pair pair;
  bool driven = false;
  const TimePoint limit = Clock::now() + kLimit;
  for (int i = 0; !driven && Clock::now() < limit; ++i) {
    const RankRun sent = start_rank(pair.cluster, pair.plan, 0, label(i), kLimit);
    auto waiter = pair.watched->next_waiter();
    const RankRun got = start_rank(pair.cluster, pair.plan, 1, label(i), kLimit, true);
    got.run->drive();
    const bool ended = got.run->ended();
    REQUIRE(ends_well(got));
    REQUIRE(ends_well(sent));
    driven = ended && waiter.get() == std::this_thread::get_id();
  }
  CHECK(driven);
}

TEST_CASE("a driven run that nobody drives is seen to later", "[exec][drive]") {
  Pair pair;
  const RankRun got = start_rank(pair.cluster, pair.plan, 1, label(0), kLimit, true);
  const RankRun sent = start_rank(pair.cluster, pair.plan, 0, label(0), kLimit, true);
  pair.cluster.engine(0).wake_undriven(Clock::now());
  pair.cluster.engine(1).wake_undriven(Clock::now());
  CHECK(ends_well(got));
  CHECK(ends_well(sent));
}

TEST_CASE("what is queued behind a driven run goes on after it", "[exec][drive]") {
  Pair pair;
  auto waiter = pair.watched->next_waiter();
  const RankRun first = start_rank(pair.cluster, pair.plan, 1, label(0), kLimit, true);
  std::thread driver([&] { first.run->drive(); });
  waiter.wait();
  const RankRun second = start_rank(pair.cluster, pair.plan, 1, label(1), kLimit);
  std::vector<RankRun> sent;
  for (int i = 0; i < 2; ++i) sent.push_back(start_rank(pair.cluster, pair.plan, 0, label(i), kLimit));
  CHECK(ends_well(first));
  CHECK(ends_well(second));
  for (const RankRun& part : sent) CHECK(ends_well(part));
  driver.join();
}

TEST_CASE("a driven run behind another leaves the channel to its thread", "[exec][drive]") {
  Pair pair;
  auto waiter = pair.watched->next_waiter();
  const RankRun first = start_rank(pair.cluster, pair.plan, 1, label(0), kLimit);
  CHECK(waiter.get() != std::this_thread::get_id());
  const RankRun second = start_rank(pair.cluster, pair.plan, 1, label(1), kLimit, true);
  second.run->drive();  // returns, since the first one comes before it
  CHECK_FALSE(second.run->ended());
  std::vector<RankRun> sent;
  for (int i = 0; i < 2; ++i) sent.push_back(start_rank(pair.cluster, pair.plan, 0, label(i), kLimit, true));
  for (const RankRun& part : sent) part.run->drive();
  CHECK(ends_well(first));
  CHECK(ends_well(second));
  for (const RankRun& part : sent) CHECK(ends_well(part));
}

TEST_CASE("a driver comes back when its peer dies or the engine ends", "[exec][drive]") {
  for (const bool dies : {true, false}) {
    INFO("dies " << dies);
    Pair pair;
    // Parks the thread of the channel.
    const RankRun before = start_rank(pair.cluster, pair.plan, 1, label(0), kLimit);
    REQUIRE(ends_well(start_rank(pair.cluster, pair.plan, 0, label(0), kLimit)));
    REQUIRE(ends_well(before));
    auto waiter = pair.watched->next_waiter();
    const RankRun got = start_rank(pair.cluster, pair.plan, 1, label(1), kLimit, true);
    std::thread driver([&] { got.run->drive(); });
    waiter.wait();
    if (dies) {
      pair.cluster.kill(0);
    } else {
      pair.cluster.engine(1).shutdown(
          std::make_exception_ptr(TransportError(TransportError::Cause::Aborted, "over")));
    }
    driver.join();
    REQUIRE(got.run->wait_until(Clock::now() + kLimit));
    CHECK(got.run->error());
    got.run->drive();  // harmless, whatever has become of the engine
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
