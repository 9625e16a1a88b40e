// Runs behind an event, callers that join them later, and an observer that names failures.
#include <atomic>
#include <chrono>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "catch.h"
#include "rounds/world.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

// Notes what it is told. Unless it is silent it then fails the engine under another name.
struct Judge {
  World* world = nullptr;
  bool silent = false;
  std::atomic<int> begun = 0;
  std::vector<std::string> heard;

  RoundObserver observer(int32_t rank) {
    return {
        [this] { ++begun; },
        [this, rank](const Error& error, const std::shared_ptr<RoundRun>& run) {
          REQUIRE(run);
          heard.emplace_back(error.what());
          if (!silent)
            world->engine(rank).fail(std::make_exception_ptr(Error(ErrorKind::PeerLost, "rank 7 began it")));
        }};
  }
};

std::vector<RankCase> chain_parts(const Plan& plan) {
  RoundOptions options;
  options.round_ns = 1;
  const auto ranks = rounds_of_all(plan, 3, options);
  std::vector<RankCase> parts;
  for (int32_t rank = 0; rank < 3; ++rank)
    parts.push_back(int64_case(plan, ranks[static_cast<size_t>(rank)], rank));
  return parts;
}

void end(World& world) {
  std::mt19937 rng(1);
  for (const int32_t rank : world.group)
    world.engine(rank).fail(std::make_exception_ptr(Error(ErrorKind::Aborted, "test over")));
  world.cluster.run(rng);
  world.poll();
  CHECK(world.cluster.mistakes.empty());
}

}  // namespace

TEST_CASE("the caller's stream goes on until it joins a gated run", "[rounds]") {
  std::mt19937 rng(1);
  const Plan plan = chain_plan(3, 64 * 8, 512);
  World world(3);
  world.cluster.rank(0).hangs = true;
  auto parts = chain_parts(plan);
  int went_on = 0;
  for (int32_t rank = 0; rank < 3; ++rank)
    world.start(rank, parts[static_cast<size_t>(rank)], 2, kLong, true, [&] { ++went_on; });
  CHECK_FALSE(world.cluster.run(rng));
  CHECK(went_on == 3);
  for (const RankCase& part : parts) CHECK(part.destination->seen.empty());
  world.cluster.rank(0).hangs = false;
  CHECK(world.cluster.run(rng));
  world.poll();
  for (const RankCase& part : parts) CHECK(part.destination->seen == part.expected);
  // Over: nothing is left to join.
  world.engine(1).follow(*parts[1].run, FakeCluster::kCaller);
  CHECK(world.cluster.rank(1).streams[FakeCluster::kCaller].empty());
  CHECK(world.cluster.mistakes.empty());
}

TEST_CASE("an observer gives failures that poll finds their name", "[rounds]") {
  std::mt19937 rng(1);
  const Plan plan = chain_plan(3, 64 * 8, 512);
  Judge judge;
  judge.silent = true;
  World world(3, [&](int32_t rank) { return judge.observer(rank); });
  judge.world = &world;
  world.cluster.rank(0).hangs = true;
  auto parts = chain_parts(plan);
  for (int32_t rank = 0; rank < 3; ++rank)
    world.start(rank, parts[static_cast<size_t>(rank)], 2, std::chrono::milliseconds(0));
  CHECK(judge.begun == 3);
  world.cluster.run(rng);
  // Deadlines are the observer's business.
  world.poll();
  CHECK(judge.heard.empty());
  CHECK(world.engine(1).in_flight().size() == 1);

  world.cluster.rank(1).failure = {GroupState::Failed, true, "remote process exited"};
  world.poll();
  world.poll();
  REQUIRE(judge.heard.size() == 1);  // once, however often it is found
  CHECK(judge.heard.front().find("remote process exited") != std::string::npos);
  CHECK_FALSE(parts[1].run->ended());  // until the observer has decided
  world.engine(1).fail(std::make_exception_ptr(Error(ErrorKind::PeerLost, "rank 7 began it")));
  CHECK(text_of(parts[1].run->error(), ErrorKind::PeerLost) == "rank 7 began it");
  end(world);
}

TEST_CASE("an observer gives a failure of a start its name", "[rounds]") {
  const Plan plan = chain_plan(3, 64, 512);
  Judge judge;
  World world(3, [&](int32_t rank) { return judge.observer(rank); });
  judge.world = &world;
  world.cluster.rank(0).busy_polls = 1'000'000'000;
  world.cluster.rank(0).failure = {GroupState::Failed, true, "connection closed"};
  auto parts = chain_parts(plan);
  try {
    world.start(0, parts[0], 2);
    FAIL("started on a communicator that has failed");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::PeerLost);
    CHECK(std::string(error.what()) == "rank 7 began it");
  }
  REQUIRE(judge.heard.size() == 1);
  CHECK(judge.heard.front().find("connection closed") != std::string::npos);
  CHECK(world.cluster.rank(0).aborted);
  world.cluster.rank(0).failure = {};
  end(world);
}

TEST_CASE("a start that is late waits for the observer, whose business deadlines are", "[rounds]") {
  const Plan plan = chain_plan(3, 64, 512);
  Judge judge;
  World world(3, [&](int32_t rank) { return judge.observer(rank); });
  judge.world = &world;
  world.cluster.rank(0).busy_polls = 1'000'000'000;
  auto parts = chain_parts(plan);
  std::exception_ptr thrown;
  std::thread user([&] {
    try {
      world.start(0, parts[0], 2, std::chrono::milliseconds(0));
    } catch (...) {
      thrown = std::current_exception();
    }
  });
  while (world.engine(0).in_flight().empty()) std::this_thread::yield();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  world.engine(0).fail(std::make_exception_ptr(Error(ErrorKind::DeadlineExceeded, "rank 2 has not called")));
  user.join();
  CHECK(text_of(thrown, ErrorKind::DeadlineExceeded) == "rank 2 has not called");
  CHECK(judge.heard.empty());
  end(world);
}

TEST_CASE("an engine whose GPU is lost says so, and goes with its tensors kept", "[rounds]") {
  std::mt19937 rng(1);
  const Plan plan = chain_plan(3, 64 * 8, 512);
  World world(3);
  auto parts = chain_parts(plan);
  for (int32_t rank = 0; rank < 3; ++rank) world.start(rank, parts[static_cast<size_t>(rank)], 2);
  CHECK(world.cluster.run(rng));
  world.cluster.rank(1).lost = true;
  CHECK_THROWS_WITH(world.engine(1).poll(Clock::now()), "the GPU is lost");
  CHECK_FALSE(parts[1].run->ended());
  world.engines.clear();
  text_of(parts[1].run->error(), ErrorKind::Aborted);
  CHECK(parts[1].source.use_count() > 1);
  CHECK_FALSE(parts[0].run->error());
  CHECK(parts[0].source.use_count() == 1);
}
