#pragma once

#include <cstdint>
#include <set>
#include <vector>

#include "plan/plan.h"
#include "plan/schedule.h"
#include "plan/strategies/reductions.h"
#include "plan/strategies/strategies.h"
#include "plan/tasks.h"

namespace meshcast::testing {

// Everything that one strategy drafts from, kept alive together.
struct DraftCase {
  DraftCase(const Problem& asked, const Topology& its_topology, int64_t chunk_bytes)
      : DraftCase(std::vector<Problem>{asked}, its_topology, chunk_bytes) {}
  DraftCase(const std::vector<Problem>& asked, const Topology& its_topology, int64_t chunk_bytes)
      : problems(asked),
        topology(its_topology),
        tasks(intersect_layouts(problems).tasks),
        bundles(bundle_tasks(tasks, problems)),
        ranks(ranks_of(asked)),
        network(topology, ranks),
        chunk(chunk_bytes) {}

  static std::vector<int32_t> ranks_of(const std::vector<Problem>& problems) {
    std::set<int32_t> all;
    for (const Problem& problem : problems) {
      all.insert(problem.src.mesh.ranks.begin(), problem.src.mesh.ranks.end());
      all.insert(problem.dst.mesh.ranks.begin(), problem.dst.mesh.ranks.end());
    }
    return {all.begin(), all.end()};
  }

  Inputs inputs() {
    return {problems, tasks, bundles, network, bound_ns, chunk, Balance::None, 0, ways, &reductions};
  }

  std::vector<Problem> problems;
  Topology topology;
  std::vector<Task> tasks;
  std::vector<Bundle> bundles;
  std::vector<int32_t> ranks;
  Network network;
  int64_t chunk;
  int64_t bound_ns = 1'000'000;
  std::vector<std::vector<WayPart>> ways;
  ReductionRoutes reductions;
};

// The plan with a draft as its hops, so that the draft is looked at also where another one is better.
inline Plan with_draft(Plan plan, const Draft& draft, const Schedule& scheduled) {
  plan.pieces = draft.pieces;
  plan.chunks = draft.chunks;
  plan.hops = scheduled.hops;
  return plan;
}

inline double ratio(const Plan& plan) {
  return static_cast<double>(plan.makespan_ns) / static_cast<double>(plan.lower_bound_ns);
}

}  // namespace meshcast::testing
