#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace meshcast {

// The most that is planned at once.
inline constexpr int64_t kMaxTasks = int64_t{1} << 18;
inline constexpr int64_t kMaxEntries = int64_t{1}
                                       << 26;  // holders and receivers in lists that differ, and copies
inline constexpr int64_t kMaxDeliveries = int64_t{3} << 20;  // see Demand

// What a batch of problems asks for, before any route is chosen.
struct Demand {
  std::vector<Task> tasks;  // those with at least one receiver, in row-major box order per tensor
  std::vector<LocalCopy> local_copies;
  // (box, receiver) pairs, each at least one hop. Boxes with the same holders and receivers count once, as they
  // travel together.
  int64_t deliveries = 0;
};

// Cuts every tensor where a source or a destination shard ends. Per dimension the cuts of both sides are
// merged, and the boxes are the product over dimensions, so the work is proportional to the boxes found.
// Throws LayoutError where a layout is invalid or a plan would have more boxes or deliveries than supported.
Demand intersect_layouts(const std::vector<Problem>& problems);

// Throws LayoutError where a problem is invalid.
void check_problem(const Problem& problem);

}  // namespace meshcast
