#pragma once

#include <cstdint>
#include <exception>
#include <optional>
#include <string>
#include <vector>

#include <ATen/core/Tensor.h>

#include "plan/plan.h"
#include "run/watched_run.h"

namespace meshcast {

// What one start() is given besides the plan.
struct StartArgs {
  RunLabel label;
  std::vector<std::optional<at::Tensor>> source;       // by problem; none where this rank holds nothing
  std::vector<std::optional<at::Tensor>> destination;  // likewise
  double timeout_seconds = 0;
  bool driven = false;  // the caller waits at once, see Engine::start
};

// What a plan expects of the tensors of one (global) rank, by problem.
struct ExpectedTensors {
  std::vector<std::optional<std::vector<int64_t>>> source_shapes;  // none: not in that mesh
  std::vector<std::optional<std::vector<int64_t>>> destination_shapes;
  std::vector<ReduceOp> reductions;  // None: the source of that problem is not reduced
};

ExpectedTensors expected_tensors(const Plan& plan, int32_t rank);

// Throws LayoutError unless there is one source and one destination for each problem of the plan.
void check_counts(const Plan& plan, const StartArgs& args);

// From now on. Capped at a year, so that "no limit" in any spelling cannot overflow the clock.
TimePoint deadline_after(double seconds);

std::string text_of(const std::exception_ptr& error);

}  // namespace meshcast
