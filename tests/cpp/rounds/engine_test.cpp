// The executor of rounds on GPUs that are faked: bytes against the true values, errors, deadlines.
#include <chrono>
#include <future>
#include <map>
#include <memory>
#include <numeric>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "catch.h"
#include "plan/cases.h"
#include "rounds/cases.h"
#include "rounds/fake_device.h"
#include "rounds/round_engine.h"
#include "rounds/world.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

// gated: half of the runs begin behind an event, and the caller's stream joins them later.
void check_random_runs(uint32_t seed, int count, bool gated) {
  CAPTURE(seed);
  std::mt19937 rng(seed);
  for (int number = 0; number < count; ++number) {
    const int size = 3 + 2 * static_cast<int>(rng() % 3);
    CAPTURE(number, size);
    World world(size);
    for (auto& rank : world.cluster.ranks) rank.busy_polls = static_cast<int>(rng() % 3 == 0);
    std::vector<RankCase> parts;
    int64_t exchanges = 0;
    // Several runs of different plans behind one another, which share staging.
    const int runs = 1 + static_cast<int>(rng() % 3);
    for (int run = 0; run < runs; ++run) {
      const Plan plan = random_case(rng, size);
      const auto ranks = rounds_of_all(plan, size, random_options(rng));
      for (const int32_t rank : world.group) {
        parts.push_back(int64_case(plan, ranks[static_cast<size_t>(rank)], rank));
        exchanges += static_cast<int64_t>(exchanges_of(*parts.back().rounds).size());
        world.start(rank, parts.back(), run, kLong, gated && rng() % 2 == 0);
      }
    }
    for (const RankCase& part : parts) REQUIRE_FALSE(part.run->ended());
    REQUIRE(world.cluster.run(rng));
    world.poll();
    REQUIRE(world.cluster.mistakes == std::vector<std::string>{});
    int64_t groups = 0;
    for (const auto& rank : world.cluster.ranks) groups += rank.groups;
    REQUIRE(groups == exchanges);
    for (const RankCase& part : parts) {
      REQUIRE(part.run->ended());
      REQUIRE_FALSE(part.run->error());
      REQUIRE(part.destination->seen == part.expected);
      REQUIRE(part.source.use_count() == 1);  // nothing keeps the tensors any longer
    }
    for (const auto& engine : world.engines) REQUIRE(engine->idle());
    world.engines.clear();
    for (const auto& rank : world.cluster.ranks) {
      REQUIRE(rank.events_alive == 0);
      REQUIRE(rank.staging_alive == 0);
    }
  }
}

}  // namespace

TEST_CASE("random rounds move the right bytes in any order that streams allow", "[rounds]") {
  check_random_runs(GENERATE(1U, 2U, 3U), 60, GENERATE(false, true));
}

TEST_CASE("very many random rounds move the right bytes", "[rounds][.][slow]") {
  check_random_runs(GENERATE(11U, 12U, 13U), 500, GENERATE(false, true));
}

TEST_CASE("dropped waits show in the bytes", "[rounds]") {
  std::mt19937 rng(5);
  int dropped = 0;
  int seen = 0;
  while (dropped < 60) {
    const Plan plan = random_case(rng, 5);
    const auto ranks = rounds_of_all(plan, 5, random_options(rng));
    const auto& victim = ranks[rng() % ranks.size()];
    std::vector<size_t> waits;
    for (size_t i = 0; i < victim.steps.size(); ++i)
      if (victim.steps[i].kind == StepKind::Wait) waits.push_back(i);
    if (waits.empty()) continue;
    RankRounds broken = victim;
    broken.steps.erase(broken.steps.begin() + static_cast<int64_t>(waits[rng() % waits.size()]));
    ++dropped;
    bool wrong = false;
    for (int attempt = 0; attempt < 40 && !wrong; ++attempt) {
      World world(5);
      std::vector<RankCase> parts;
      for (const int32_t rank : world.group) {
        const bool mine = rank == victim.program->rank;
        parts.push_back(int64_case(plan, mine ? broken : ranks[static_cast<size_t>(rank)], rank));
        world.start(rank, parts.back(), 0);
      }
      REQUIRE(world.cluster.run(rng));
      for (const RankCase& part : parts) wrong = wrong || part.destination->seen != part.expected;
    }
    seen += wrong;
  }
  // Not all: a wait may guard bytes that happen to be equal, or that only a rare order spoils.
  CHECK(seen * 10 >= dropped * 8);
}

TEST_CASE("an error that NCCL finds later ends everything, with its text", "[rounds]") {
  std::mt19937 rng(1);
  ChainWorld chain;
  World& world = chain.world;
  world.cluster.rank(0).hangs = true;  // as a peer that is gone
  CHECK_FALSE(world.cluster.run(rng));
  world.poll();
  CHECK_FALSE(chain.parts[1].run->ended());
  std::promise<void> heard;
  chain.parts[1].run->on_end([&] { heard.set_value(); });

  world.cluster.rank(1).failure = {GroupState::Failed, true, "remote process exited"};
  world.poll();
  CHECK((heard.get_future().wait_for(std::chrono::minutes(1)) == std::future_status::ready));
  CHECK(text_of(chain.parts[1].run->error(), ErrorKind::PeerLost) ==
        "rank 1: test number 4 failed in NCCL while moving data: remote process exited");
  CHECK(world.cluster.rank(1).aborted);
  CHECK_FALSE(world.cluster.rank(2).aborted);
  // The tensors stay until the GPU has let go of them; then the caller's stream goes on too.
  CHECK_FALSE(world.engine(1).idle());
  CHECK(chain.parts[1].source.use_count() > 1);
  world.cluster.run(rng);
  world.poll();
  CHECK(world.engine(1).idle());
  CHECK(chain.parts[1].source.use_count() == 1);
  CHECK(world.cluster.rank(1).streams[FakeCluster::kCaller].empty());

  RankCase again = int64_case(chain.plan, *chain.parts[1].rounds, 1);
  try {
    world.start(1, again, 5);
    FAIL("started on a failed engine");
  } catch (const Error& e) {
    CHECK(e.kind() == ErrorKind::Aborted);
    CHECK(std::string(e.what()).find("remote process exited") != std::string::npos);
  }
  CHECK(world.cluster.mistakes.empty());
  for (const int32_t rank : {0, 2})
    world.engine(rank).fail(std::make_exception_ptr(Error(ErrorKind::Aborted, "test over")));
  world.cluster.run(rng);
  world.poll();
}

TEST_CASE("a run that stands still is aborted at its deadline", "[rounds]") {
  std::mt19937 rng(1);
  ChainWorld chain;
  World& world = chain.world;
  world.cluster.rank(2).hangs = true;
  CHECK_FALSE(world.cluster.run(rng));
  RoundEngine& engine = world.engine(0);
  engine.poll(chain.parts[0].run->deadline() - std::chrono::seconds(1));
  CHECK_FALSE(chain.parts[0].run->ended());
  REQUIRE(engine.in_flight().size() == 1);
  engine.poll(chain.parts[0].run->deadline());
  CHECK(engine.in_flight().empty());
  CHECK(world.cluster.rank(0).aborted);
  const std::string text = text_of(chain.parts[0].run->error(), ErrorKind::DeadlineExceeded);
  CHECK(text.rfind("rank 0: test number 4 was not complete after 600 s while moving data", 0) == 0);
  for (const int32_t rank : {1, 2})
    world.engine(rank).fail(std::make_exception_ptr(Error(ErrorKind::Aborted, "test over")));
  CHECK(world.cluster.run(rng));
  world.poll();
  for (const auto& each : world.engines) CHECK(each->idle());
  CHECK(world.cluster.mistakes.empty());
}

TEST_CASE("a communicator that never connects is aborted at the deadline", "[rounds]") {
  const Plan plan = chain_plan(3, 64, 512);
  const auto ranks = rounds_of_all(plan, 3, {});
  World world(3);
  world.cluster.rank(0).busy_polls = 1'000'000'000;
  RankCase part = int64_case(plan, ranks[0], 0);
  try {
    world.start(0, part, 0, std::chrono::milliseconds(20));
    FAIL("started without a connection");
  } catch (const Error& e) {
    CHECK(e.kind() == ErrorKind::DeadlineExceeded);
    CHECK(std::string(e.what()).find("while connecting for round 0") != std::string::npos);
  }
  CHECK(world.cluster.rank(0).aborted);
  // The caller's stream is behind whatever was enqueued, and goes on.
  std::mt19937 rng(1);
  CHECK(world.cluster.run(rng));
  world.poll();
  CHECK(world.engine(0).idle());
  CHECK(world.cluster.mistakes.empty());
}

TEST_CASE("the caller's stream comes behind what was enqueued of a run that was cut short", "[rounds]") {
  std::mt19937 rng(3);
  int written = 0;
  for (int number = 0; number < 200; ++number) {
    CAPTURE(number);
    const Plan plan = random_case(rng, 5);
    const auto ranks = rounds_of_all(plan, 5, random_options(rng));
    World world(5);
    const auto rank = static_cast<int32_t>(rng() % 5);
    const RankRounds& rounds = ranks[static_cast<size_t>(rank)];
    if (exchanges_of(rounds).empty()) continue;
    world.cluster.rank(rank).busy_polls = 1'000'000'000;
    RankCase part = int64_case(plan, rounds, rank);
    CHECK_THROWS_AS(world.start(rank, part, 0, std::chrono::milliseconds(0)), Error);
    // The caller frees the tensors, and somebody else writes there.
    const auto memory = part.destination;
    const std::vector<std::byte> others(memory->memory.size(), std::byte{0x11});
    world.cluster.enqueue(rank, FakeCluster::kCaller, [memory, &others, &written] {
      written += memory->memory != memory->written;
      memory->memory = others;
    });
    CHECK(world.cluster.run(rng));
    REQUIRE(memory->memory == others);
    world.poll();
    CHECK(world.cluster.mistakes.empty());
  }
  CHECK(written > 10);
}

TEST_CASE("a failure reaches a thread that waits for a connection", "[rounds]") {
  const Plan plan = chain_plan(3, 64, 512);
  const auto ranks = rounds_of_all(plan, 3, {});
  World world(3);
  world.cluster.rank(0).busy_polls = 1'000'000'000;
  RankCase part = int64_case(plan, ranks[0], 0);
  std::exception_ptr thrown;
  std::thread user([&] {
    try {
      world.start(0, part, 0);
    } catch (...) {
      thrown = std::current_exception();
    }
  });
  while (world.engine(0).in_flight().empty()) std::this_thread::yield();
  world.engine(0).fail(std::make_exception_ptr(Error(ErrorKind::PeerLost, "rank 1 is gone")));
  user.join();
  CHECK(text_of(thrown, ErrorKind::PeerLost) == "rank 1 is gone");
  std::mt19937 rng(1);
  CHECK(world.cluster.run(rng));
  world.poll();
  CHECK(world.engine(0).idle());
  CHECK(world.cluster.mistakes.empty());
}

TEST_CASE("an engine that is closed while transfers are under way ends them", "[rounds]") {
  std::mt19937 rng(1);
  ChainWorld chain;
  chain.world.cluster.rank(0).hangs = true;
  CHECK_FALSE(chain.world.cluster.run(rng));
  chain.world.engines.clear();
  for (const RankCase& part : chain.parts) text_of(part.run->error(), ErrorKind::Aborted);
  for (const auto& rank : chain.world.cluster.ranks) CHECK(rank.aborted);
  // Nobody will tell when the GPU lets go of the tensors, so they are never given back.
  for (const RankCase& part : chain.parts) CHECK(part.source.use_count() > 1);
}

TEST_CASE("threads that start runs of one engine do so one after the other", "[rounds]") {
  const Plan plan = chain_plan(3, 64 * 8, 512);
  const auto ranks = rounds_of_all(plan, 3, {});
  World world(3);
  world.cluster.rank(0).busy_polls = 500;  // the first is waiting for its connection when the second comes
  std::vector<RankCase> parts{int64_case(plan, ranks[0], 0), int64_case(plan, ranks[0], 0)};
  std::thread first([&] { world.start(0, parts[0], 0); });
  while (world.engine(0).in_flight().empty()) std::this_thread::yield();
  world.start(0, parts[1], 1);  // on another stream
  first.join();
  CHECK(world.cluster.mistakes == std::vector<std::string>{});
  world.cluster.rank(0).busy_polls = 0;
  world.engine(0).fail(std::make_exception_ptr(Error(ErrorKind::Aborted, "test over")));
  std::mt19937 rng(1);
  CHECK(world.cluster.run(rng));
  world.poll();
}

TEST_CASE("a message that is not taken ends its group, and is named", "[rounds]") {
  const Plan plan = chain_plan(3, 64, 512);
  const auto ranks = rounds_of_all(plan, 3, {});
  for (const int32_t rank : {0, 2}) {
    World world(3);
    world.cluster.rank(rank).refuses = true;
    RankCase part = int64_case(plan, ranks[static_cast<size_t>(rank)], rank);
    try {
      world.start(rank, part, 4);
      FAIL("started without its messages");
    } catch (const Error& error) {
      const std::string text = error.what();
      CHECK(error.kind() == ErrorKind::Generic);
      CHECK(error.context().peer == 1);
      const std::string expected = rank == 0
                                       ? "sending 512 bytes to rank 1 in round 0: rank 1 invalid argument"
                                       : "receiving 512 bytes from rank 1 in round 1: rank 1 invalid argument";
      CHECK(text == "rank " + std::to_string(rank) + ": test number 4 failed in NCCL while " + expected);
    }
    CHECK(world.cluster.rank(rank).group_depth == 0);
    CHECK(world.cluster.rank(rank).aborted);
    std::mt19937 rng(1);
    CHECK(world.cluster.run(rng));
    world.poll();
    CHECK(world.engine(rank).idle());
    CHECK(world.cluster.mistakes == std::vector<std::string>{});
  }
}
