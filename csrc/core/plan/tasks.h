#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace meshcast {

// The limits of one plan.
inline constexpr int64_t kMaxTasks = int64_t{1} << 18;
inline constexpr int64_t kMaxEntries = int64_t{1} << 26;  // holders and receivers in distinct lists, and copies
inline constexpr int64_t kMaxDeliveries = int64_t{3} << 20;  // see Demand

// The tasks of a batch of problems, before any route is chosen.
struct Demand {
  std::vector<Task> tasks;  // those with at least one receiver, in row-major box order per tensor
  std::vector<LocalCopy> local_copies;
  // (box, receiver) pairs, each at least one hop. Boxes with the same holders and receivers count once, as they
  // travel together.
  int64_t deliveries = 0;
};

// Cuts every tensor at the ends of source and destination shards. For each dimension the cuts of both sides are
// merged, and the boxes are the product over dimensions, so the work is proportional to the number of boxes.
// Throws LayoutError if a layout is invalid or a plan would have more boxes or deliveries than supported.
Demand intersect_layouts(const std::vector<Problem>& problems);

// Throws LayoutError if a problem is invalid.
void check_problem(const Problem& problem);

}  // namespace meshcast
