#include "plan/strategies/rotation.h"

#include <algorithm>
#include <set>
#include <string>

#include "catch.h"
#include "plan/cases.h"
#include "plan/checker.h"
#include "plan/draft_case.h"
#include "plan/random_problems.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

// Rows cut over `sources`, columns cut over the ranks of each host, hosts replicas: a row-parallel weight that
// goes from FSDP to tensor parallel. A NIC of 400 Gbit/s for each rank.
Problem rows_to_columns(std::vector<int64_t> shape, int64_t sources, int64_t hosts, int64_t per_host) {
  return {std::move(shape), 2, layout({sources}, 0, {shard(0)}),
          layout({hosts, per_host}, static_cast<int32_t>(sources), {kReplicate, shard(1)})};
}

Topology rails(int64_t ranks, int64_t per_host) {
  return uniform_topology(ranks - 1, per_host, 40 * kTenGbit, per_host, 8 * kTenGbit, 20'000);
}

}  // namespace

TEST_CASE("in rotation no two sends of a turn share a port", "[plan][rotation]") {
  // 24 sources on 6 hosts, 6 hosts of 4 replicas: 24 turns of 24 sends, all of one size.
  DraftCase c(rows_to_columns({240, 80}, 24, 6, 4), rails(48, 4), 1 << 20);
  const Draft draft = draft_rotation(c.inputs());
  REQUIRE(draft.hops.size() == 24 * 24);
  for (size_t turn = 0; turn < 24; ++turn) {
    std::set<int32_t> ports;
    for (size_t i = 24 * turn; i < 24 * (turn + 1); ++i) {
      const Hop& hop = draft.hops[i];
      const Network::Link link = c.network.link(c.network.index(hop.src), c.network.index(hop.dst));
      ports.insert({link.out, link.in});
    }
    CHECK(ports.size() == 48);
  }
  // So all ports are busy from the first hop to the last: 24 times 10 rows of 20 columns of 2 bytes.
  const Schedule made = simulate(draft.hops, draft.chunks, c.network);
  CHECK(made.makespan_ns == 24 * transfer_ns(10 * 20 * 2, 40 * kTenGbit) + 20'000);
}

TEST_CASE("all ranks with all of them meet the bound, whatever their number", "[plan][rotation]") {
  for (const int32_t ranks : {12, 17, 24, 31, 40, 48}) {
    for (const int32_t per_host : {1, 4}) {
      if (ranks % per_host != 0) continue;
      const Problem problem{
          {ranks, 1024 * ranks}, 4, layout({ranks}, 0, {shard(0)}), layout({ranks}, 0, {shard(1)})};
      const Topology topology = uniform_topology(ranks - 1, per_host, 10 * kTenGbit, 1, 80 * kTenGbit, 20'000);
      const Plan plan = make_plan({problem}, topology, {});
      INFO(ranks << " ranks, " << per_host << " on a host");
      CHECK(PlanChecker(plan).check() == "");
      // The time of each hop is rounded up; a port carries one for each pair of a rank of its host and another.
      CHECK(plan.makespan_ns <= plan.lower_bound_ns + per_host * (ranks - per_host));
    }
  }
}

TEST_CASE("ports that do not meet rotate apart", "[plan][rotation]") {
  // Rows to rows: a quarter of the sources goes to four hosts, the next quarter to the next four.
  const Problem problem{{1024, 8}, 2, layout({64}, 0, {shard(0)}), layout({4, 16}, 64, {shard(0), kReplicate})};
  DraftCase c(problem, rails(128, 4), 1 << 20);
  const Draft draft = draft_rotation(c.inputs());
  REQUIRE(draft.hops.size() == 64 * 16);
  const Schedule made = simulate(draft.hops, draft.chunks, c.network);
  CHECK(made.makespan_ns == 16 * transfer_ns(16 * 8 * 2, 40 * kTenGbit) + 20'000);
}

TEST_CASE("copies inside hosts take the place of the last steps of a turn", "[plan][rotation]") {
  // 16 sources, 16 replicas, 4 ranks a host. Ranks copy at a third of the rate of a NIC: of four receivers one
  // gets its chunk inside, but in the turn that makes up for 31/32. Each chunk takes 8 us over a NIC.
  const Problem problem{{16, 40'000}, 1, layout({16}, 0, {shard(0)}), layout({16}, 16, {kReplicate})};
  const Topology topology = uniform_topology(31, 4, 5'000'000'000, 4, 5'000'000'000 / 3, 0);
  DraftCase c(problem, topology, 1 << 20);
  const Draft draft = draft_rotation_with_copies(c.inputs());
  REQUIRE(draft.hops.size() == 16 * 16);
  const Schedule made = sort_by_start(simulate(draft.hops, draft.chunks, c.network));
  const auto inside =
      std::count_if(draft.hops.begin(), draft.hops.end(), [](const Hop& hop) { return hop.after >= 0; });
  CHECK(inside == 16 * 3);  // in the first of four turns the next step is not due yet
  // From the first step of the second turn on, the ports inside are busy to the end.
  CHECK(made.makespan_ns == 5 * 8'000 + 3 * transfer_ns(40'000, 5'000'000'000 / 3));
  const Plan plan = with_draft(make_plan({problem}, topology, {}), draft, made);
  CHECK(PlanChecker(plan).check() == "");
}

TEST_CASE("copies inside hosts move all of any problem", "[plan][rotation]") {
  Random random(11);
  int copies = 0;
  for (int n = 0; n < 150; ++n) {
    const RandomCase one = random_case(random, 4000, false);
    DraftCase c(one.problem, one.topology, 64);
    if (c.inputs().reduces()) continue;
    INFO("case " << n);
    const Draft draft = draft_rotation_with_copies(c.inputs());
    copies += std::any_of(draft.hops.begin(), draft.hops.end(), [](const Hop& hop) { return hop.after >= 0; });
    const Schedule made = sort_by_start(simulate(draft.hops, draft.chunks, c.network));
    CHECK(PlanChecker(with_draft(make_plan({one.problem}, one.topology, {}), draft, made)).check() == "");
  }
  CHECK(copies > 20);
}

TEST_CASE("rows to replicas use NICs and copies inside at once", "[plan][rotation]") {
  const Problem problem{{8192, 8192}, 2, layout({128}, 0, {shard(0)}), layout({128}, 128, {kReplicate})};
  CHECK(ratio(make_plan({problem}, rails(256, 8), {})) < 1.04);
}

TEST_CASE("rows to columns with replicas take the bound", "[plan][rotation]") {
  const Plan plan = make_plan({rows_to_columns({8192, 8192}, 512, 64, 8)}, rails(1024, 8), {});
  CHECK(plan.strategy == Strategy::SendRecv);
  CHECK(plan.hops.size() == 512 * 512);
  CHECK(ratio(plan) < 1.005);
  const Network network(plan.topology, plan.ranks);
  CHECK(simulate(plan.hops, plan.chunks, network).makespan_ns == plan.makespan_ns);
}

TEST_CASE("rows that do not divide evenly are within a per cent of the bound", "[plan][rotation]") {
  // 251 rows a source, the last but one 246 and the last none; cuts of the receivers fall inside of sources.
  const Problem problem{
      {128'256, 8192}, 2, layout({512}, 0, {shard(0)}), layout({64, 8}, 512, {kReplicate, shard(0)})};
  CHECK(ratio(make_plan({problem}, rails(1024, 8), {})) < 1.01);
}

TEST_CASE("random rows to columns: every element arrives once, in the simulated time", "[plan][rotation]") {
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    Random random(seed);
    const int64_t per_host = random.between(1, 4);
    const int64_t hosts = random.between(1, 5);
    const int64_t sources = random.between(1, 12);
    Problem problem = rows_to_columns({random.between(1, 40), random.between(1, 12)}, sources, hosts, per_host);
    if (random.chance(30)) problem.dst.placements[1] = shard(0);
    const Topology topology = uniform_topology(sources + hosts * per_host - 1, per_host, kTenGbit,
                                               random.between(1, per_host), 8 * kTenGbit, 1000);
    INFO("seed " << seed);
    DraftCase c(problem, topology, random.one_of<int64_t>({8, 64, 1 << 20}));
    const Plan plan = make_plan({problem}, topology, {Strategy::SendRecv});
    const Draft draft = draft_rotation(c.inputs());
    const Schedule made = sort_by_start(simulate(draft.hops, draft.chunks, c.network));
    CHECK(check_plan(with_draft(plan, draft, made)) == "");
    CHECK(made.makespan_ns >= plan.lower_bound_ns);
    CHECK(simulate(made.hops, draft.chunks, c.network).makespan_ns == made.makespan_ns);
  }
}
