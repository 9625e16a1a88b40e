#pragma once

#include <cstdint>
#include <vector>

#include "plan/draft.h"
#include "plan/network.h"
#include "plan/plan.h"

namespace meshcast {

// Tasks that share no host, and so no port, with other tasks: each island can be planned independently.
struct Island {
  std::vector<int32_t> tasks;  // of the plan, ascending
  std::vector<int32_t> ranks;  // global, in the order in which the tasks first name them
};

// Islands that differ only in the numbers of ranks and the places of boxes, so that a plan of the first is
// valid for all. For example, each host of a trainer sends to one host of an inference mesh.
using IslandKind = std::vector<Island>;

// Empty if there is one island, or if no two are of one kind.
std::vector<IslandKind> find_islands(const std::vector<Task>& tasks, const std::vector<Bundle>& bundles,
                                     const std::vector<Problem>& problems, const Topology& topology,
                                     const Network& network);

// The tasks of the first island of a kind.
std::vector<Task> tasks_of(const Island& island, const std::vector<Task>& tasks);

// One draft of all islands: `plans` has the plan of the first island of each kind, for the tasks of tasks_of.
// Hops are in the order of their times.
Draft join_islands(const std::vector<IslandKind>& kinds, const std::vector<Plan>& plans,
                   const std::vector<Task>& tasks);

}  // namespace meshcast
