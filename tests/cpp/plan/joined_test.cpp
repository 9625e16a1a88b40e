#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "catch.h"
#include "plan/cases.h"
#include "plan/checker.h"
#include "plan/network.h"
#include "plan/packing.h"
#include "plan/staging.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// `src` ranks 0.., `dst` ranks behind them, every rank on a host of its own.
Plan plan_for(const std::vector<int64_t>& shape, Layout src, Layout dst, int64_t chunk_bytes = 0,
              int32_t ranks_per_host = 1) {
  const int64_t last = std::max(src.mesh.ranks.back(), dst.mesh.ranks.back());
  const Topology topology = uniform_topology(last, ranks_per_host, kTenGbit, 1, 8 * kTenGbit, 20'000);
  return make_plan({{shape, 4, std::move(src), std::move(dst)}}, topology,
                   {Strategy::Auto, Balance::Greedy, chunk_bytes});
}

std::map<std::pair<int32_t, int32_t>, int64_t> messages_by_pair(const Plan& plan) {
  std::map<std::pair<int32_t, int32_t>, int64_t> out;
  for (const Hop& hop : plan.hops) ++out[{hop.src, hop.dst}];
  return out;
}

int64_t packed_messages(const Plan& plan) {
  const Packing source(plan.problems, &Problem::src), destination(plan.problems, &Problem::dst);
  int64_t out = 0;
  for (const Hop& hop : plan.hops) {
    const Chunk& chunk = plan.chunks[static_cast<size_t>(hop.chunk)];
    const Packing& from = hop.after < 0 ? source : destination;
    out += from.packs(plan.pieces, chunk, hop.src) ? chunk.nbytes : 0;
    out += destination.packs(plan.pieces, chunk, hop.dst) ? chunk.nbytes : 0;
  }
  return out;
}

}  // namespace

TEST_CASE("what two ranks send each other alone goes in few messages", "[plan][joined]") {
  const Placement s0 = shard(0);
  for (const int64_t mib : {2, 16, 48, 1024}) {
    const Plan plan = plan_for({2 * mib * 256, 1024}, layout({2}, 0, {s0}), layout({2}, 2, {s0}));
    INFO(mib << " MiB per pair");
    for (const auto& [pair, count] : messages_by_pair(plan)) {
      CHECK(count >= 8);
      CHECK(count <= std::max<int64_t>(12, mib / 8 * 4 / 3));
    }
    for (const Chunk& chunk : plan.chunks) {
      CHECK(chunk.nbytes <= std::min(8 * kMiB, mib * kMiB / 8));
      CHECK(chunk.piece_end - chunk.piece_begin == 1);
    }
    CHECK(plan.makespan_ns <= plan.lower_bound_ns + 2 * 20'000);
  }
}

TEST_CASE("what two ranks send each other alone is not cut below a quarter of a MiB", "[plan][joined]") {
  const Placement s0 = shard(0);
  for (const int64_t quarters : {1, 2, 4, 8}) {
    const Plan plan = plan_for({2 * quarters * 64, 1024}, layout({2}, 0, {s0}), layout({2}, 2, {s0}));
    INFO(quarters << " of them per pair");
    for (const auto& [pair, count] : messages_by_pair(plan)) CHECK(count == quarters);
  }
}

TEST_CASE("chunks that are passed on stay as small as the chain wants them", "[plan][joined]") {
  // Rank 0's part goes to both others, each on a host of its own: a chain. 1/128 of the bound at most.
  const Plan plan = plan_for({64 * 256, 1024}, layout({1}, 0, {kReplicate}), layout({2}, 1, {kReplicate}));
  for (const Chunk& chunk : plan.chunks) CHECK(chunk.nbytes <= kMiB / 2);
  CHECK(plan.makespan_ns <= plan.lower_bound_ns + plan.lower_bound_ns / 50);
}

TEST_CASE("ports on which something is passed on keep small messages", "[plan][joined]") {
  // Rank 0 sends one tensor to rank 1 alone, the other to ranks 2 and 3, which is a chain.
  const Problem alone{{64 * 256, 1024}, 4, layout({1}, 0, {shard(0)}), layout({1}, 1, {shard(0)})};
  const Problem both{{64 * 256, 1024}, 4, layout({1}, 0, {kReplicate}), layout({2}, 2, {kReplicate})};
  const Topology topology = uniform_topology(3, 1, kTenGbit, 1, 8 * kTenGbit, 20'000);
  const Plan plan = make_plan({alone, both}, topology, {});
  for (const Chunk& chunk : plan.chunks) CHECK(chunk.nbytes <= kMiB);
  CHECK(plan.makespan_ns <= plan.lower_bound_ns + plan.lower_bound_ns / 50);
}

TEST_CASE("ports that serve several others get messages of middling size", "[plan][joined]") {
  // 64 MiB leave each of two ranks for two others.
  const Plan plan = plan_for({128 * 256, 1024}, layout({2}, 0, {shard(0)}), layout({2}, 2, {shard(1)}));
  int64_t largest = 0;
  for (const Chunk& chunk : plan.chunks) largest = std::max(largest, chunk.nbytes);
  CHECK(largest <= 2 * kMiB);
  CHECK(largest > kMiB);
  CHECK(plan.makespan_ns <= plan.lower_bound_ns + plan.lower_bound_ns / 50);
}

TEST_CASE("a size that the caller chose is kept", "[plan][joined]") {
  const Plan plan = plan_for({64 * 256, 1024}, layout({1}, 0, {shard(0)}), layout({1}, 1, {shard(0)}), kMiB);
  CHECK(plan.chunks.size() == 64);
  for (const Chunk& chunk : plan.chunks) CHECK(chunk.nbytes == kMiB);
}

TEST_CASE("joining makes no rank pack what it would not", "[plan][joined]") {
  // Columns of rows of 2 MiB: half a row is one run of memory, the halves of two rows are not.
  const Plan plan = plan_for({64, 512 << 10}, layout({1}, 0, {shard(1)}), layout({2}, 1, {shard(1)}));
  CHECK(packed_messages(plan) == 0);
  CHECK(plan.chunks.size() == 2 * 64);
}

TEST_CASE("joined messages keep to the goal for staging", "[plan][joined]") {
  // Columns of every row, from 8 ranks to 8 others: each packs for eight peers at a time.
  const Plan plan = plan_for({4096, 65536}, layout({8}, 0, {shard(0)}), layout({8}, 8, {shard(1)}));
  const std::vector<int64_t> staging = peak_staging(plan);
  CHECK(*std::max_element(staging.begin(), staging.end()) <= kStagingGoal);
  CHECK(packed_messages(plan) > 0);
}

TEST_CASE("plans with joined chunks move every element once", "[plan][joined]") {
  for (const int64_t rows : {7, 96, 1021}) {
    for (const int64_t columns : {24, 77}) {
      for (const int32_t per_host : {1, 2, 3}) {
        const Plan plan =
            plan_for({rows, columns}, layout({3}, 0, {shard(0)}), layout({4}, 3, {shard(1)}), 0, per_host);
        INFO(rows << " x " << columns << ", " << per_host << " ranks per host");
        CHECK(PlanChecker(plan).check() == "");
      }
    }
  }
}
