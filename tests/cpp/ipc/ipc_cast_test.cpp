// Casts over the protocol of CUDA IPC: peers read what has been packed, never what is still to be cast.
#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "catch.h"
#include "ipc/fake_ipc.h"
#include "rounds/cast_cases.h"

using namespace meshcast;
using namespace meshcast::testing;

TEST_CASE("random rounds cast over CUDA IPC", "[ipc]") {
  const auto seed = GENERATE(1U, 2U, 3U, 4U);
  CAPTURE(seed);
  std::mt19937 rng(seed);
  std::mt19937 order(seed);  // asked as often as threads take, so that what is tried does not depend on them
  CastCounts counts;
  for (int number = 0; number < 40; ++number) {
    const int size = 3 + 2 * static_cast<int>(rng() % 3);
    CAPTURE(number, size);
    IpcWorld world(size);
    const CastBatch batch = random_cast_batch(rng, size);
    const RoundTable table = make_rounds(batch.plan, random_options(rng));
    std::vector<RankCase> parts;
    for (const int32_t rank : world.group) {
      parts.push_back(cast_case(rng, batch, table, rank, world.group));
      count_casts(*parts.back().rounds, &counts);
      auto& memory = parts.back().source->memory;
      if (!memory.empty())
        world.host.allocate(memory.data(), static_cast<int64_t>(memory.size()), rng() % 2 == 0);
    }
    std::atomic<size_t> through = 0;
    std::vector<std::thread> ranks;
    for (const int32_t rank : world.group) {
      ranks.emplace_back([&, rank] {
        world.start(rank, parts[static_cast<size_t>(rank)], 0);
        world.join(rank, parts[static_cast<size_t>(rank)]);
        ++through;
      });
    }
    const bool in_time = world.run_until(order, [&] {
      return through == world.group.size() &&
             std::all_of(parts.begin(), parts.end(), [](const RankCase& part) { return part.run->ended(); });
    });
    for (std::thread& thread : ranks) thread.join();
    REQUIRE(in_time);
    {
      const std::lock_guard lock(world.host.mutex);
      REQUIRE(world.host.cluster.run(order));
    }
    for (const RankCase& part : parts) {
      REQUIRE_FALSE(part.run->error());
      REQUIRE(part.destination->seen == part.expected);
      if (!part.source->memory.empty()) world.host.free(part.source->memory.data());
    }
    REQUIRE(world.host.cluster.mistakes == std::vector<std::string>{});
  }
  CHECK(counts.packed > 5);
  CHECK(counts.unpacked > 30);
  CHECK(counts.straight > 30);
}
