#include "plan/strategies/pipeline.h"

#include <map>
#include <string>

#include "catch.h"
#include "plan/cases.h"
#include "plan/checker.h"
#include "plan/draft_case.h"
#include "plan/random_problems.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

// One rank of the first host to replicas on all others.
Problem to_replicas(std::vector<int64_t> shape, int64_t first, int64_t replicas) {
  return {std::move(shape), 2, layout({1}, 0, {kReplicate}),
          layout({replicas}, static_cast<int32_t>(first), {kReplicate})};
}

}  // namespace

TEST_CASE("in two trees every rank sends as much as it takes in", "[plan][pipeline]") {
  for (const int64_t replicas : {1, 2, 3, 6, 7, 12, 13, 40}) {
    // A host for each rank: 8 chunks, half of them in either tree.
    DraftCase c(to_replicas({64, 10}, 1, replicas), uniform_topology(replicas, 1, kTenGbit, 1, kTenGbit, 0),
                160);
    const Draft draft = draft_pipeline(c.inputs(), {false, true});
    INFO(replicas << " replicas");
    REQUIRE(draft.chunks.size() == 8);
    REQUIRE(draft.hops.size() == 8 * static_cast<size_t>(replicas));
    std::map<int32_t, int> sent, received;
    for (const Hop& hop : draft.hops) {
      ++sent[hop.src];
      ++received[hop.dst];
    }
    for (int32_t rank = 0; rank <= replicas; ++rank) CHECK(sent[rank] <= 8);
    for (int32_t rank = 1; rank <= replicas; ++rank) CHECK(received[rank] == 8);
    CHECK(sent[0] == 8);
  }
}

TEST_CASE("two trees fill in the logarithm of their stops, a chain in their number", "[plan][pipeline]") {
  DraftCase c(to_replicas({64, 10}, 8, 4096), uniform_topology(4103, 8, kTenGbit, 1, kTenGbit, 0), 160);
  const PipelineCost trees = pipeline_cost(c.inputs(), {false, true});
  const PipelineCost chain = pipeline_cost(c.inputs(), {false, false});
  CHECK(trees.hops == 4096);
  CHECK(chain.hops == 4096);
  CHECK(chain.fill == 511 + 8);
  CHECK(trees.fill <= 2 * 9 + 8);
  CHECK(pipeline_cost(c.inputs(), {true, false}).fill == 4095 + 1);
}

TEST_CASE("every host that holds a chunk begins a chain", "[plan][pipeline]") {
  const Problem problem{{64, 10}, 2, layout({4}, 0, {kReplicate}), layout({10}, 4, {kReplicate})};
  DraftCase c(problem, uniform_topology(13, 1, kTenGbit, 1, kTenGbit, 0), 160);
  CHECK(pipeline_cost(c.inputs(), {false, false}).fill == 2 + 1);  // chains of 3, 3, 3 and 1 stops
  std::map<int32_t, int> sent;
  for (const Hop& hop : draft_pipeline(c.inputs(), {false, false}).hops) ++sent[hop.src];
  for (int32_t rank = 0; rank < 14; ++rank) CHECK(sent[rank] <= 8);
  for (int32_t holder = 0; holder < 4; ++holder) CHECK(sent[holder] == 8);
}

TEST_CASE("a pipeline of too many hops is none", "[plan][pipeline]") {
  DraftCase c(to_replicas({40'000, 1}, 8, 64), uniform_topology(71, 8, kTenGbit, 1, kTenGbit, 0), 2);
  CHECK(draft_pipeline(c.inputs(), {false, false}).hops.empty());  // 40,000 chunks to 64 ranks
}

TEST_CASE("stops that are ranks follow each other on different hosts", "[plan][pipeline]") {
  DraftCase c(to_replicas({64, 10}, 8, 64), uniform_topology(71, 8, kTenGbit, 8, kTenGbit, 0), 1 << 20);
  for (const bool two_trees : {false, true}) {
    for (const Hop& hop : draft_pipeline(c.inputs(), {true, two_trees}).hops) CHECK(hop.src / 8 != hop.dst / 8);
  }
}

TEST_CASE("one rank to replicas on many hosts is near the bound", "[plan][pipeline]") {
  const Plan hosts = make_plan({to_replicas({1 << 14, 1 << 15}, 8, 56)},
                               uniform_topology(63, 8, 10 * kTenGbit, 1, 8 * kTenGbit, 20'000), {});
  CHECK(hosts.strategy == Strategy::Multicast);
  CHECK(ratio(hosts) < 1.05);
  // Ranks of a host copy at 80 Gbit/s among themselves and have a NIC of 400 Gbit/s each: chunks come over
  // NICs.
  const Plan slow_inside = make_plan({to_replicas({1 << 16, 1 << 16}, 8, 64)},
                                     uniform_topology(71, 8, 40 * kTenGbit, 8, 8 * kTenGbit, 20'000), {});
  CHECK(ratio(slow_inside) < 1.03);
}

TEST_CASE("random pipelines: every element arrives once", "[plan][pipeline]") {
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    Random random(seed);
    const RandomCase r = random_case(random, 300, true);
    const Plan made = make_plan({r.problem}, r.topology, {Strategy::SendRecv});
    DraftCase c(r.problem, r.topology, random.one_of<int64_t>({16, 64, 500}));
    for (const bool by_rank : {false, true}) {
      for (const bool two_trees : {false, true}) {
        INFO("seed " << seed << ", by rank " << by_rank << ", two trees " << two_trees);
        const Draft draft = draft_pipeline(c.inputs(), {by_rank, two_trees});
        const Schedule scheduled = schedule(draft, draft.chunks, c.network);
        CHECK(check_plan(with_draft(made, draft, scheduled)) == "");
        CHECK(scheduled.makespan_ns >= made.lower_bound_ns);
      }
    }
  }
}
