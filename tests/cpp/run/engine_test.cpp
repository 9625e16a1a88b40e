#include "run/engine.h"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <memory>
#include <mutex>
#include <new>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.h"
#include "run/harness.h"
#include "run/random_plans.h"
#include "support/loopback.h"

using namespace meshcast;
using namespace meshcast::testing;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kLimit(20000);  // of a run; a test that hangs fails here

// As where the machine refuses memory for a message, in the thread that posts or issues it.
class NoMemory final : public PassingTransport {
 public:
  NoMemory(std::shared_ptr<Transport> inner, std::shared_ptr<std::atomic<int>> left)
      : PassingTransport(std::move(inner)), left_(std::move(left)) {}
  void send(const Envelope& to, int64_t nbytes, std::unique_ptr<Outgoing> message) override {
    take();
    PassingTransport::send(to, nbytes, std::move(message));
  }
  void recv(const Envelope& from, int64_t nbytes, std::unique_ptr<Incoming> message) override {
    take();
    PassingTransport::recv(from, nbytes, std::move(message));
  }

 private:
  void take() {
    if ((*left_)-- <= 0) throw std::bad_alloc();
  }
  const std::shared_ptr<std::atomic<int>> left_;  // messages until there is none
};

}  // namespace

TEST_CASE("a rank without memory for a message fails, whichever thread notices", "[exec][engine]") {
  constexpr int kWorld = 3;
  const Plan plan = chain_plan(kWorld, 100000, 4096);  // more messages than any window
  for (const int messages : {0, 1, 2, 4, 5, 9, 40, 100}) {
    for (int short_one = 0; short_one < kWorld; ++short_one) {
      INFO("rank " << short_one << " has memory for " << messages << " messages");
      const auto left = std::make_shared<std::atomic<int>>(messages);
      std::mutex mutex;
      std::vector<TransportError::Cause> causes;
      Cluster* engines = nullptr;
      Cluster cluster(
          kWorld,
          [&](int, const TransportError& error, const std::shared_ptr<Run>&) {
            {
              const std::lock_guard lock(mutex);
              causes.push_back(error.cause());
            }
            for (int rank = 0; rank < kWorld; ++rank)
              engines->engine(rank).fail(std::make_exception_ptr(Error(ErrorKind::Generic, error.what())));
          },
          {},
          [&](int rank, std::shared_ptr<Transport> inner) -> std::shared_ptr<Transport> {
            return rank == short_one ? std::make_shared<NoMemory>(std::move(inner), left) : std::move(inner);
          });
      engines = &cluster;
      std::vector<RankRun> runs;
      bool refused = false;
      for (int rank = 0; rank < kWorld; ++rank) {
        try {
          runs.push_back(start_rank(cluster, plan, rank, label(0), kLimit));
        } catch (const Error&) {  // and not std::bad_alloc, which would be MemoryError from then on
          refused = true;
          CHECK(cluster.engine(rank).error());  // what it had begun has ended, too
          for (int other = 0; other < kWorld; ++other)
            engines->engine(other).fail(std::make_exception_ptr(Error(ErrorKind::Generic, "refused")));
        }
      }
      for (const RankRun& part : runs) {
        // What is under way when memory runs out keeps its pin, as a request that hangs does.
        if (!part.run->wait_until(Clock::now() + milliseconds(100))) part.run->force_end();
        REQUIRE(part.run->wait_until(Clock::now() + kLimit));
      }
      const std::lock_guard lock(mutex);
      const bool told = std::find(causes.begin(), causes.end(), TransportError::Cause::Memory) != causes.end();
      CHECK((*left > 0 || refused || told));
      const auto error = cluster.engine(short_one).error();
      if (*left < 0) REQUIRE(error);
      if (error) CHECK_THROWS_AS(std::rethrow_exception(error), Error);
    }
  }
}

TEST_CASE("random plans fill every destination", "[exec][engine]") {
  const uint32_t seed = 7;
  INFO("seed " << seed);
  std::mt19937 rng(seed);
  for (int round = 0; round < 60; ++round) {
    const int world = 2 + static_cast<int>(rng() % 6);
    Cluster cluster(world);
    const Plan plan = random_plan(rng, world);
    INFO("round " << round << ": " << describe(plan.problems[0].src) << " -> "
                  << describe(plan.problems[0].dst));
    std::vector<RankRun> runs;
    for (int rank = 0; rank < world; ++rank) runs.push_back(start_rank(cluster, plan, rank, label(0), kLimit));
    for (int rank = 0; rank < world; ++rank) {
      INFO("rank " << rank);
      REQUIRE(runs[static_cast<size_t>(rank)].run->wait_until(Clock::now() + kLimit));
      REQUIRE_FALSE(runs[static_cast<size_t>(rank)].run->error());
      REQUIRE(runs[static_cast<size_t>(rank)].destination.data == runs[static_cast<size_t>(rank)].expected);
    }
  }
}

TEST_CASE("runs in flight at once do not mix", "[exec][engine]") {
  std::mt19937 rng(11);
  const int world = 5;
  Cluster cluster(world);
  std::vector<Plan> plans;
  for (int i = 0; i < 12; ++i) plans.push_back(random_plan(rng, world));
  // Each rank starts all of its runs before the next rank starts any.
  std::vector<RankRun> runs;
  for (int rank = 0; rank < world; ++rank) {
    for (int i = 0; i < 12; ++i)
      runs.push_back(start_rank(cluster, plans[static_cast<size_t>(i)], rank, label(i), kLimit));
  }
  for (const RankRun& part : runs) {
    REQUIRE(part.run->wait_until(Clock::now() + kLimit));
    REQUIRE_FALSE(part.run->error());
    REQUIRE(part.destination.data == part.expected);
  }
}

TEST_CASE("a lane that waits does not hold up another", "[exec][engine]") {
  const int world = 3;
  Cluster cluster(world);
  const Plan plan = chain_plan(world, 1000);
  // Lane 0: receives posted, the sender never starts. Lane 1 must pass.
  std::vector<RankRun> waiting;
  for (int rank = 1; rank < world; ++rank)
    waiting.push_back(start_rank(cluster, plan, rank, label(0, 0), kLimit));
  std::vector<RankRun> passing;
  for (int rank = 0; rank < world; ++rank)
    passing.push_back(start_rank(cluster, plan, rank, label(1, 1), kLimit));
  for (const RankRun& part : passing) {
    REQUIRE(part.run->wait_until(Clock::now() + kLimit));
    REQUIRE(part.destination.data == part.expected);
  }
  for (const RankRun& part : waiting) CHECK_FALSE(part.run->ended());
}

TEST_CASE("a dead root fails the runs of the survivors that wait for it", "[exec][engine]") {
  const int world = 4;
  Cluster cluster(world);
  const Plan plan = chain_plan(world, 1000);
  std::vector<RankRun> runs;
  for (int rank = 1; rank < world; ++rank) runs.push_back(start_rank(cluster, plan, rank, label(0), kLimit));
  for (const RankRun& part : runs) REQUIRE_FALSE(part.run->wait_until(Clock::now() + milliseconds(20)));
  cluster.kill(0);
  // Only the head of the chain hears of it from the transport; the others learn it as a group does, here by
  // hand.
  REQUIRE(runs.front().run->wait_until(Clock::now() + kLimit));
  REQUIRE(runs.front().run->error());
  for (int rank = 2; rank < world; ++rank) {
    CHECK_FALSE(runs[static_cast<size_t>(rank - 1)].run->ended());
    cluster.engine(rank).fail(std::make_exception_ptr(TransportError(TransportError::Cause::Closed, "told")));
    REQUIRE(runs[static_cast<size_t>(rank - 1)].run->wait_until(Clock::now() + kLimit));
    REQUIRE(runs[static_cast<size_t>(rank - 1)].run->error());
  }
}

TEST_CASE("a failed engine refuses new runs with the first error", "[exec][engine]") {
  Cluster cluster(2);
  const Plan plan = chain_plan(2, 10);
  cluster.engine(1).fail(std::make_exception_ptr(TransportError(TransportError::Cause::Closed, "first")));
  cluster.engine(1).fail(std::make_exception_ptr(TransportError(TransportError::Cause::Closed, "second")));
  try {
    start_rank(cluster, plan, 1, label(0), kLimit);
    FAIL("start() on a failed engine must throw");
  } catch (const TransportError& error) {
    CHECK(std::string(error.what()) == "first");
  }
}

TEST_CASE("shutdown with runs in flight ends them and joins", "[exec][engine]") {
  std::vector<RankRun> runs;
  {
    Cluster cluster(3);
    const Plan plan = chain_plan(3, 1000);
    for (int rank = 1; rank < 3; ++rank) runs.push_back(start_rank(cluster, plan, rank, label(0), kLimit));
  }
  for (const RankRun& part : runs) {
    REQUIRE(part.run->ended());
    REQUIRE(part.run->error());
  }
}

TEST_CASE("tags of runs that may be in flight together differ", "[exec][tags]") {
  RunLabel a = label(3);
  RunLabel b = a;
  b.reverse = true;
  RunLabel c = a;
  c.slot = 1;
  RunLabel d = a;
  d.ordinal = 4;
  const auto tag = [](const RunLabel& of, int64_t position) { return short_key(message_key(of, position)); };
  CHECK(tag(a, 5) != tag(b, 5));
  CHECK(tag(a, 5) != tag(c, 5));
  CHECK(tag(a, 5) != tag(d, 5));
  CHECK(tag(a, 5) != tag(a, 6));
  RunLabel last = a;
  last.slot = kSlots - 1;
  last.ordinal = 0xFF;
  last.reverse = true;
  for (const RunLabel& l : {a, b, c, d, last}) {
    CHECK(tag(l, 4095) >= 0);
    std::set<int32_t> tags;
    std::set<uint64_t> keys;
    for (int64_t position = 1000; position < 1000 + 64; ++position) {
      tags.insert(tag(l, position));
      keys.insert(message_key(l, position << 26));
    }
    CHECK(tags.size() == 64);
    CHECK(keys.size() == 64);
  }
}

TEST_CASE("a run that is repeated under its name does not meet itself", "[exec][engine]") {
  Cluster cluster(3);
  const Plan plan = chain_plan(3, 100);
  RunLabel name = label(3);
  name.reverse = true;
  std::vector<RankRun> runs;
  for (const int rank : {2, 0, 1}) {
    for (int i = 0; i < 100; ++i) runs.push_back(start_rank(cluster, plan, rank, name, kLimit));
  }
  for (const RankRun& part : runs) {
    REQUIRE(part.run->wait_until(Clock::now() + kLimit));
    REQUIRE(part.destination.data == part.expected);
  }
}

TEST_CASE("an engine that is shut down while others start runs leaves none without an end", "[exec][engine]") {
  for (int round = 0; round < 20; ++round) {
    Cluster cluster(3, nullptr, {{0, 1}});
    const Plan plan = chain_plan(3, 100);
    std::vector<std::vector<RankRun>> runs(3);
    std::vector<std::thread> starters;
    std::atomic<int> begun{0};
    for (int rank = 0; rank < 3; ++rank) {
      starters.emplace_back([&, rank] {
        try {
          for (int i = 0; i < 500; ++i) {
            runs[static_cast<size_t>(rank)].push_back(start_rank(cluster, plan, rank, label(i), kLimit));
            ++begun;
          }
        } catch (const TransportError&) {
          return;  // refused from now on
        }
      });
    }
    while (begun < 20 + round) std::this_thread::yield();
    for (int rank = 0; rank < 3; ++rank) {
      cluster.engine(rank).shutdown(
          std::make_exception_ptr(TransportError(TransportError::Cause::Aborted, "test")));
    }
    for (std::thread& starter : starters) starter.join();
    for (const auto& of_rank : runs) {
      for (const RankRun& part : of_rank) REQUIRE(part.run->wait_until(Clock::now() + kLimit));
    }
  }
}
