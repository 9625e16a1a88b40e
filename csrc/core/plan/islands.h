#pragma once

#include <cstdint>
#include <vector>

#include "plan/draft.h"
#include "plan/network.h"
#include "plan/plan.h"

namespace meshcast {

// Tasks whose hosts have none in common with those of other tasks: they share no port, so one plan of an island
// is as good as another beside it.
struct Island {
  std::vector<int32_t> tasks;  // of the plan, ascending
  std::vector<int32_t> ranks;  // global, in the order in which the tasks name them first
};

// Islands that are alike but for the numbers of ranks and the places of boxes: what is right for the first is
// right for all. As where each host of a trainer feeds one host of an inference mesh.
using IslandKind = std::vector<Island>;

// Empty where there is one island, or where none is like another.
std::vector<IslandKind> find_islands(const std::vector<Task>& tasks, const std::vector<Bundle>& bundles,
                                     const std::vector<Problem>& problems, const Topology& topology,
                                     const Network& network);

// The tasks of the first island of a kind.
std::vector<Task> tasks_of(const Island& island, const std::vector<Task>& tasks);

// One draft of all islands: `plans` has that of the first island of each kind, whose tasks are those of
// tasks_of. Hops stand in the order of their times.
Draft join_islands(const std::vector<IslandKind>& kinds, const std::vector<Plan>& plans,
                   const std::vector<Task>& tasks);

}  // namespace meshcast
