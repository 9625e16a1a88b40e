#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "catch.h"
#include "memory/digest.h"
#include "run/harness.h"
#include "run/random_plans.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

uint64_t added(uint64_t a, uint64_t b) {
  const auto lower = static_cast<uint32_t>(a + b);
  const auto upper = static_cast<uint32_t>((a >> 32) + (b >> 32));
  return uint64_t{upper} << 32 | lower;
}

// By a pass over the pieces of a shard of `element_bytes`.
uint64_t by_a_pass(const Shard& shard, const std::vector<int64_t>& shape, const TensorMemory& memory,
                   int64_t element_bytes = 8) {
  uint64_t out = 0;
  for (size_t p = 0; p < shard.pieces.size(); ++p) {
    const ShardPiece& piece = shard.pieces[p];
    StridedView view{memory.data, static_cast<int>(shape.size()), element_bytes, {}, {}};
    for (size_t d = 0; d < shard.local_shape.size(); ++d) view.data += piece.local[d] * memory.stride[d];
    std::array<int64_t, kMaxDims> step{};
    int64_t first = 0;
    int64_t unit = 1;
    for (size_t d = shape.size(); d-- > 0; unit *= shape[d]) {
      const size_t axis = shard.places.empty() ? d : static_cast<size_t>(shard.places[p].axis[d]);
      view.stride[d] = memory.stride[axis] * (shard.places.empty() ? 1 : shard.places[p].step[d]);
      view.extent[d] = piece.box.extent(static_cast<int>(d));
      step[d] = unit;
      first += piece.box.lo[d] * unit;
    }
    out = added(out, digest(view, first, step, {}));
  }
  return out;
}

}  // namespace

TEST_CASE("digests taken with the copies are those of passes over the shards", "[exec][digest]") {
  const uint32_t seed = 2611;
  INFO("seed " << seed);
  std::mt19937 rng(seed);
  int taken = 0;
  for (int round = 0; round < 60; ++round) {
    const Plan plan = random_plan(rng, 4);
    const Problem& problem = plan.problems.front();
    const bool one_host = round % 2 == 0;
    Cluster cluster(4, nullptr,
                    one_host ? std::vector<std::vector<int32_t>>{{0, 1, 2, 3}}
                             : std::vector<std::vector<int32_t>>{{0, 1}, {2, 3}});
    std::vector<RankRun> parts;
    for (int rank = 0; rank < 4; ++rank)
      parts.push_back(start_rank(cluster, plan, rank, label(0), std::chrono::seconds(20), {{}}));
    for (int rank = 0; rank < 4; ++rank) {
      const RankRun& part = parts[static_cast<size_t>(rank)];
      REQUIRE(part.run->wait_until(Clock::now() + std::chrono::seconds(20)));
      REQUIRE_FALSE(part.run->error());
      REQUIRE(part.destination.data == part.expected);
      INFO("round " << round << ", rank " << rank);
      const auto found = part.run->digest(0);
      if (one_host) REQUIRE(found.has_value());
      if (!found) continue;
      const uint64_t expected =
          by_a_pass(shard_of(problem.dst, problem.shape, rank), problem.shape, part.destination.memory);
      REQUIRE(*found == expected);
      taken += expected != 0;
    }
  }
  CHECK(taken > 20);
}

TEST_CASE("runs without digests have none", "[exec][digest]") {
  std::mt19937 rng(1);
  const Plan plan = random_plan(rng, 2);
  const Run run(std::make_shared<const Program>(project(plan, 0, {0, 1}, {0, 1})), {}, label(0), Clock::now());
  CHECK_FALSE(run.digest(0).has_value());
}

// Pieces cut elements, and one byte may change on its way.
TEST_CASE("a byte that changes between two ranks shows in their digests", "[exec][digest]") {
  std::mt19937 rng(2612);
  for (int round = 0; round < 60; ++round) {
    const std::vector<int64_t> shape{1 + static_cast<int64_t>(rng() % 40),
                                     1 + static_cast<int64_t>(rng() % 40)};
    const auto sharded = [](int32_t rank) { return Layout{{{1}, {rank}}, {{}}}; };
    PlanOptions options;
    options.chunk_bytes = 1 << (6 + rng() % 6);
    const Plan plan = make_plan({{shape, 8, sharded(0), sharded(1)}},
                                uniform_topology(1, 2, 1000000000, 1, 8000000000, 1000), options);
    const auto run_of = [&](int32_t rank, const LocalTensor& source, const LocalTensor& destination) {
      Buffers buffers;
      buffers.source = {source.memory};
      buffers.destination = {destination.memory};
      buffers.nans = {{}};
      return std::make_unique<Run>(std::make_shared<const Program>(project(plan, rank, {0, 1}, {0, 1})),
                                   buffers, label(0), Clock::now() + std::chrono::seconds(20));
    };
    const LocalTensor source = make_local(shard_of(plan.problems[0].src, shape, 0), shape, true);
    const LocalTensor destination = make_local(shard_of(plan.problems[0].dst, shape, 1), shape, false);
    const auto sender = run_of(0, source, {});
    const auto receiver = run_of(1, {}, destination);
    const Program& sends = sender->program();
    const Program& recvs = receiver->program();
    REQUIRE(sends.sends.size() == recvs.recvs.size());
    int64_t bad = round % 2 == 0 ? -1 : static_cast<int64_t>(rng() % static_cast<uint64_t>(sends.bytes_sent));
    for (size_t i = 0; i < sends.sends.size(); ++i) {
      const int64_t nbytes = sends.sends[i].nbytes;
      for (int64_t at = 0; at < nbytes;) {
        const int64_t here = std::min<int64_t>(nbytes - at, 1 + static_cast<int64_t>(rng() % 99));
        std::vector<std::byte> slot(static_cast<size_t>(here));
        sender->read(sends.sends[i], at, here, slot.data());
        if (bad >= 0 && bad < here) slot[static_cast<size_t>(bad)] ^= static_cast<std::byte>(1U << rng() % 8);
        bad -= bad >= 0 ? here : 0;
        receiver->write(recvs.recvs[i], at, here, slot.data());
        at += here;
      }
    }
    const uint64_t sent = by_a_pass(shard_of(plan.problems[0].src, shape, 0), shape, source.memory);
    const auto arrived = receiver->digest(0);
    REQUIRE(arrived.has_value());
    CHECK((sent == *arrived) == (round % 2 == 0));
  }
}
