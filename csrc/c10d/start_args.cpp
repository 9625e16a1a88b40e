#include "c10d/start_args.h"

#include <algorithm>
#include <chrono>

#include <fmt/format.h>

#include "common/error.h"

namespace meshcast {
namespace {

std::optional<std::vector<int64_t>> local_shape(const Layout& layout, const std::vector<int64_t>& shape,
                                                int32_t rank) {
  const auto& ranks = layout.mesh.ranks;
  const auto it = std::find(ranks.begin(), ranks.end(), rank);
  if (it == ranks.end()) return std::nullopt;
  return shards(layout, shape)[static_cast<size_t>(it - ranks.begin())].local_shape;
}

}  // namespace

ExpectedTensors expected_tensors(const Plan& plan, int32_t rank) {
  ExpectedTensors out;
  for (const Problem& problem : plan.problems) {
    out.source_shapes.push_back(local_shape(problem.src, problem.shape, rank));
    out.destination_shapes.push_back(local_shape(problem.dst, problem.shape, rank));
  }
  out.reductions.assign(plan.problems.size(), ReduceOp::None);
  for (const Task& task : plan.tasks) {
    if (task.reduce != ReduceOp::None) out.reductions[static_cast<size_t>(task.tensor)] = task.reduce;
  }
  return out;
}

void check_counts(const Plan& plan, const StartArgs& args) {
  const size_t n = plan.problems.size();
  if (args.source.size() == n && args.destination.size() == n) return;
  throw LayoutError(fmt::format("the plan has {} tensors, given are {} sources and {} destinations", n,
                                args.source.size(), args.destination.size()));
}

TimePoint deadline_after(double seconds) {
  const double capped = std::min(seconds, 365.0 * 24 * 3600);
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(capped));
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& e) {
    return e.what();
  }
}

}  // namespace meshcast
