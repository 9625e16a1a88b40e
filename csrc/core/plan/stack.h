#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"
#include "plan/tasks.h"

namespace meshcast {

// Tensors of a batch with equal shape, element size and layouts, as the layers of a model have them, planned as
// one tensor with one more dimension: the first one counts them. What is right for one of them is right for
// all, so they share tasks and chunks, and the size of the problem follows from the kinds of tensors.
struct Stack {
  std::vector<int32_t> tensors;  // of the batch, ascending
  Problem problem;               // as it is planned: `stacked` if there are several tensors
};

// One stack for each kind of tensor, in the order of their first ones. Tensors whose layouts list boxes, or
// that have as many dimensions as there may be, are alone. Throws LayoutError where a problem is invalid.
std::vector<Stack> stack_alike(const std::vector<Problem>& problems);

std::vector<Problem> stacked_problems(const std::vector<Stack>& stacks);

// Whether the tensors of the stacks, planned one by one, would be more than is planned at once. `demand` is
// that of the stacked problems.
bool too_large_apart(const std::vector<Stack>& stacks, const Demand& demand);

// Turns a plan of stacks into one of `problems`: tasks, local copies and pieces are those of single tensors,
// those of a stack one after the other. Chunks, hops and times stay. Throws LayoutError beyond the most tasks
// or pieces.
void unstack(const std::vector<Stack>& stacks, const std::vector<Problem>& problems, Plan* plan);

// A plan before unstack(), and its stacks: none where the tensors are planned one by one.
struct StackedPlan {
  Plan plan;
  std::vector<Stack> stacks;
};

// make_plan() but for its last step, unstack(): for callers that have something to do between the two.
StackedPlan make_stacked_plan(const std::vector<Problem>& problems, const Topology& topology,
                              const PlanOptions& options);

}  // namespace meshcast
