#include "plan/islands.h"

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

// `count` groups of ranks, each with a block of the first dimension. In a group `per_mesh` ranks send to as
// many others, with placements `src` and `dst` of the other dimensions.
Problem grouped(std::vector<int64_t> shape, int64_t count, int64_t per_mesh, Placement src, Placement dst) {
  Problem problem{std::move(shape), 2, layout({count, per_mesh}, 0, {shard(0), src}),
                  layout({count, per_mesh}, 0, {shard(0), dst})};
  for (int32_t g = 0; g < static_cast<int32_t>(count); ++g) {
    for (int32_t r = 0; r < static_cast<int32_t>(per_mesh); ++r) {
      const auto at = static_cast<size_t>(g * per_mesh + r);
      problem.src.mesh.ranks[at] = static_cast<int32_t>(2 * g * per_mesh) + r;
      problem.dst.mesh.ranks[at] = static_cast<int32_t>((2 * g + 1) * per_mesh) + r;
    }
  }
  return problem;
}

std::vector<size_t> sizes(const std::vector<IslandKind>& kinds) {
  std::vector<size_t> out;
  for (const IslandKind& kind : kinds) out.push_back(kind.size());
  return out;
}

std::vector<IslandKind> found(const DraftCase& c, const Topology& topology) {
  return find_islands(c.tasks, c.bundles, c.problems, topology, c.network);
}

}  // namespace

TEST_CASE("islands are told apart by what their plans depend on", "[plan][islands]") {
  const auto hosts = [](int64_t ranks) {
    return uniform_topology(ranks - 1, 4, kTenGbit, 2, 8 * kTenGbit, 20'000);
  };
  const auto kinds = [](const Problem& problem, const Topology& topology) {
    return sizes(found(DraftCase(problem, topology, 1 << 20), topology));
  };
  const Problem six = grouped({12, 64}, 6, 4, shard(1), kReplicate);
  CHECK(kinds(six, hosts(48)) == std::vector<size_t>{6});
  // The last block is smaller.
  CHECK(kinds(grouped({11, 64}, 6, 4, shard(1), kReplicate), hosts(48)) == std::vector<size_t>{5, 1});
  // A host of the third has other NICs; one of the fifth copies more slowly inside.
  Topology unlike = hosts(48);
  unlike.hosts[5].nics[1].in_rate /= 2;
  unlike.hosts[8].local_rate /= 2;
  CHECK(kinds(six, unlike) == std::vector<size_t>{4, 1, 1});
  // Every host is of another kind: nothing is gained.
  for (size_t h = 0; h < unlike.hosts.size(); ++h) unlike.hosts[h].local_rate += static_cast<int64_t>(h);
  CHECK(kinds(six, unlike).empty());
  // Hosts of 8 ranks have both sides of a group, hosts of 16 have two groups.
  CHECK(kinds(six, uniform_topology(47, 8, kTenGbit, 2, 8 * kTenGbit, 20'000)) == std::vector<size_t>{6});
  CHECK(kinds(six, uniform_topology(47, 16, kTenGbit, 2, 8 * kTenGbit, 20'000)) == std::vector<size_t>{3});
  // All columns go everywhere: one island.
  const Problem one{{48, 48}, 2, layout({24}, 0, {shard(0)}), layout({24}, 24, {shard(1)})};
  CHECK(kinds(one, hosts(48)).empty());
}

TEST_CASE("one plan for islands that are alike moves all of each", "[plan][islands]") {
  Random random(7);
  int many = 0;
  for (int n = 0; n < 200; ++n) {
    const int64_t per_mesh = random.between(1, 6), count = random.between(2, 5);
    const auto place = [&]() {
      return random.chance(40) ? kReplicate : shard(static_cast<int>(random.between(1, 2)));
    };
    const Problem problem = grouped({count * random.between(1, 3) - random.below(2), random.between(2, 9), 7},
                                    count, per_mesh, place(), place());
    Topology topology = uniform_topology(2 * count * per_mesh - 1, random.between(1, 2 * per_mesh), kTenGbit,
                                         random.between(1, 3), 8 * kTenGbit, 20'000);
    if (random.chance(30)) topology.hosts.back().nics[0].out_rate /= 3;
    INFO("case " << n);
    DraftCase c(problem, topology, 64);
    const std::vector<IslandKind> kinds = found(c, topology);
    if (kinds.empty()) continue;
    ++many;
    std::vector<Plan> plans;
    std::set<int32_t> tasks;
    int64_t slowest = 0;
    for (const IslandKind& kind : kinds) {
      // As if the first of the kind were alone: of all boxes, the plan has those of its tasks.
      Plan plan = make_plan({problem}, topology, {Strategy::Broadcast, Balance::None, 64});
      DraftCase alone(problem, topology, 64);
      alone.tasks = tasks_of(kind.front(), alone.tasks);
      alone.bundles = bundle_tasks(alone.tasks, alone.problems);
      const Draft draft = draft_broadcast(alone.inputs());
      const Schedule made = schedule(draft, draft.chunks, alone.network);
      plan = with_draft(plan, draft, made);
      plan.times = made.times;
      slowest = std::max(slowest, made.makespan_ns);
      plans.push_back(std::move(plan));
      for (const Island& island : kind) tasks.insert(island.tasks.begin(), island.tasks.end());
    }
    CHECK(tasks.size() == c.tasks.size());
    const Draft all = join_islands(kinds, plans, c.tasks);
    const Schedule made = sort_by_start(simulate(all.hops, all.chunks, c.network));
    CHECK(made.makespan_ns == slowest);
    const Plan whole =
        with_draft(make_plan({problem}, topology, {Strategy::Broadcast, Balance::None, 64}), all, made);
    CHECK(PlanChecker(whole).check() == "");
  }
  CHECK(many > 100);
}

TEST_CASE("hundreds of islands are planned as near to the bound as one", "[plan][islands]") {
  // A block of 4 MiB goes from each host of 8 ranks to all 8 ranks of another.
  const auto plan = [](int64_t count) {
    const Topology topology = uniform_topology(16 * count - 1, 8, 10 * kTenGbit, 1, 8 * kTenGbit, 20'000);
    return make_plan({grouped({64 * count, 1 << 15}, count, 8, shard(1), kReplicate)}, topology, {});
  };
  const Plan one = plan(1), many = plan(256);
  CHECK(many.makespan_ns == one.makespan_ns);
  CHECK(many.lower_bound_ns == one.lower_bound_ns);
  CHECK(many.hops.size() == 256 * one.hops.size());
  CHECK(ratio(one) < 1.2);
}

// Ports inside hosts are slower than NICs. Planned all together, a plan takes 1.34 of the bound.
TEST_CASE("few hops in islands are planned by island where that is better", "[plan][islands]") {
  Topology topology;
  topology.latency_ns = 20'000;
  for (int32_t first = 0; first < 320; first += first < 64 ? 2 : 8) {
    Host& host = topology.hosts.emplace_back();
    for (int32_t rank = first; rank < first + (first < 64 ? 2 : 8); ++rank) host.ranks.push_back(rank);
    host.nics = {{10 * kTenGbit, 10 * kTenGbit}};
    host.local_rate = 8 * kTenGbit;
  }
  const Problem problem{
      {224, 1024}, 1024, layout({32, 2}, 0, {shard(0), shard(1)}), layout({32, 8}, 64, {shard(0), kReplicate})};
  const Plan plan = make_plan({problem}, topology, {});
  CHECK(static_cast<double>(plan.makespan_ns) < 1.15 * static_cast<double>(plan.lower_bound_ns));
}
