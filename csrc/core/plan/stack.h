#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"
#include "plan/tasks.h"

namespace meshcast {

// Tensors of a batch with equal shape, element size and layouts, like those of a model's layers, planned as one
// tensor with one more dimension: the first one counts them. A plan for one of them is valid for all, so they
// share tasks and chunks, and the size of the problem depends only on the kinds of tensors.
struct Stack {
  std::vector<int32_t> tensors;  // of the batch, ascending
  Problem problem;               // the planned one: `stacked` if there are several tensors
};

// One stack for each kind of tensor, in the order of their first ones. Tensors that have the most dimensions
// allowed, or whose boxes lie in local tensors that do, are not stacked. Throws LayoutError if a problem is
// invalid.
std::vector<Stack> stack_alike(const std::vector<Problem>& problems);

std::vector<Problem> stacked_problems(const std::vector<Stack>& stacks);

// Whether the tensors of the stacks, planned one by one, would exceed the limits of a plan. `demand`: of the
// stacked problems.
bool too_large_apart(const std::vector<Stack>& stacks, const Demand& demand);

// Turns a plan of stacks into one of `problems`, with tasks, local copies and pieces of single tensors; those
// of a stack are next to each other. Chunks, hops and times stay. Throws LayoutError beyond the most tasks or
// pieces.
void unstack(const std::vector<Stack>& stacks, const std::vector<Problem>& problems, Plan* plan);

// A plan before unstack(), and its stacks: none if the tensors are planned one by one.
struct StackedPlan {
  Plan plan;
  std::vector<Stack> stacks;
};

// make_plan() without its last step, unstack(), for callers that do something between the two.
StackedPlan make_stacked_plan(const std::vector<Problem>& problems, const Topology& topology,
                              const PlanOptions& options);

}  // namespace meshcast
