// How long an engine of rounds keeps the memory in which its runs stage bytes.
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include <sys/wait.h>
#include <unistd.h>

#include "catch.h"
#include "rounds/cases.h"
#include "rounds/world.h"

using namespace meshcast;
using namespace meshcast::testing;

TEST_CASE("an engine that is closed early keeps the staging that its GPU may still use", "[rounds]") {
  std::mt19937 rng(4);
  int kept = 0;
  while (kept < 5) {
    const Plan plan = random_case(rng, 5);
    const auto ranks = rounds_of_all(plan, 5, random_options(rng));
    const auto rank = static_cast<int32_t>(rng() % 5);
    if (ranks[static_cast<size_t>(rank)].staging_bytes == 0) continue;
    World world(5);
    RankCase part = int64_case(plan, ranks[static_cast<size_t>(rank)], rank);
    world.start(rank, part, 0);
    world.engines.clear();
    CHECK(world.cluster.rank(rank).staging_alive == 1);
    CHECK(world.cluster.run(rng));  // the kernels that were enqueued write to it
    ++kept;
  }
}

TEST_CASE("staging that was too small is kept for the runs that began with it", "[rounds]") {
  std::mt19937 rng(5);
  std::vector<std::pair<Plan, std::vector<RankRounds>>> cases;  // of which rank 0 needs more and more
  int64_t most = 0;
  while (cases.size() < 3) {
    Plan plan = random_case(rng, 5);
    auto ranks = rounds_of_all(plan, 5, random_options(rng));
    if (ranks[0].staging_bytes <= most) continue;
    most = ranks[0].staging_bytes;
    cases.emplace_back(std::move(plan), std::move(ranks));
  }
  World world(5);
  std::vector<RankCase> parts;
  for (size_t run = 0; run < cases.size(); ++run) {
    for (const int32_t rank : world.group) {
      parts.push_back(int64_case(cases[run].first, cases[run].second[static_cast<size_t>(rank)], rank));
      world.start(rank, parts.back(), static_cast<int>(run));
    }
    CHECK(world.cluster.rank(0).staging_alive == static_cast<int64_t>(run) + 1);
  }
  REQUIRE(world.cluster.run(rng));
  world.poll();
  CHECK(world.cluster.rank(0).staging_alive == 1);
  for (const RankCase& part : parts) CHECK(part.destination->seen == part.expected);
}

TEST_CASE("staging that no run has needed for a while is given back, and taken again", "[rounds]") {
  std::mt19937 rng(6);
  Plan plan = random_case(rng, 5);
  auto ranks = rounds_of_all(plan, 5, random_options(rng));
  while (ranks[0].staging_bytes == 0) {
    plan = random_case(rng, 5);
    ranks = rounds_of_all(plan, 5, random_options(rng));
  }
  World world(5);
  CHECK_FALSE(world.engine(0).rest(Clock::now()));  // has none yet
  for (int run = 0; run < 2; ++run) {
    std::vector<RankCase> parts;
    for (const int32_t rank : world.group) {
      parts.push_back(int64_case(plan, ranks[static_cast<size_t>(rank)], rank));
      world.start(rank, parts.back(), run);
    }
    CHECK_FALSE(world.engine(0).rest(Clock::now() + 2 * kStagingRest));  // its run is under way
    REQUIRE(world.cluster.run(rng));
    world.poll();
    const TimePoint over = Clock::now();
    CHECK(world.engine(0).rest(over + kStagingRest / 2));
    CHECK(world.cluster.rank(0).staging_alive == 1);
    CHECK(world.engine(0).rest(over + kStagingRest));  // for the sake of the others
    CHECK(world.cluster.rank(0).staging_alive == 0);
    CHECK_FALSE(world.engine(0).rest(over + 2 * kStagingRest));
    for (const RankCase& part : parts) CHECK(part.destination->seen == part.expected);
  }
  CHECK(world.cluster.mistakes.empty());
}

namespace {

struct MeetingDevice final : FakeDevice {
  using FakeDevice::FakeDevice;
  bool meets_hosts() const override { return true; }
};

}  // namespace

// A work of the parent may be the last that has the engine in a child: it ends without a thread to join, and
// asks nothing of the GPU.
TEST_CASE("a forked child lets go of an engine of its parent's", "[rounds]") {
  World world(2);
  auto device = std::make_shared<MeetingDevice>(world.cluster, 0);
  const std::weak_ptr<MeetingDevice> watched = device;
  auto engine = std::make_unique<RoundEngine>(std::move(device), 0, world.group);
  const pid_t child = fork();
  if (child == 0) {
    alarm(20);
    engine.reset();
    _exit(watched.expired() ? 1 : 0);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  engine.reset();
  CHECK(watched.expired());
}
