#pragma once

#include <algorithm>
#include <chrono>
#include <cstdint>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "memory/reduce.h"
#include "run/harness.h"
#include "run/random_plans.h"

namespace meshcast::testing {

inline constexpr auto kReductionLimit = std::chrono::milliseconds(60'000);
inline constexpr ReduceOp kOps[] = {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max,
                                    ReduceOp::Product};

// The value that contribution c has of element i; any two differ. Sums and products wrap around.
inline int64_t value_of(int64_t i, int64_t c) {
  uint64_t z = static_cast<uint64_t>(i) * 1009 + static_cast<uint64_t>(c) + 1;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return static_cast<int64_t>(z ^ (z >> 31));
}

inline int64_t reduced(int64_t i, int64_t count, ReduceOp op) {
  auto out = static_cast<uint64_t>(value_of(i, 0));
  for (int64_t c = 1; c < count; ++c) {
    const int64_t next = value_of(i, c);
    const auto so_far = static_cast<int64_t>(out);
    switch (op) {
      case ReduceOp::Sum:
      case ReduceOp::Avg: out += static_cast<uint64_t>(next); break;
      case ReduceOp::Product: out *= static_cast<uint64_t>(next); break;
      case ReduceOp::Min: out = static_cast<uint64_t>(std::min(so_far, next)); break;
      case ReduceOp::Max: out = static_cast<uint64_t>(std::max(so_far, next)); break;
      case ReduceOp::None: break;
    }
  }
  return op == ReduceOp::Avg ? static_cast<int64_t>(out) / count : static_cast<int64_t>(out);
}

// Which partial value the rank holds: its coordinates along the Partial dimensions. -1: it is not in the mesh.
inline int64_t contribution_of(const Layout& layout, int32_t rank) {
  const auto it = std::find(layout.mesh.ranks.begin(), layout.mesh.ranks.end(), rank);
  if (it == layout.mesh.ranks.end()) return -1;
  if (layout.placements.empty()) return 0;  // boxes
  int64_t rest = it - layout.mesh.ranks.begin();
  int64_t out = 0;
  int64_t scale = 1;
  for (size_t d = layout.mesh.shape.size(); d-- > 0;) {
    const int64_t at = rest % layout.mesh.shape[d];
    rest /= layout.mesh.shape[d];
    if (layout.placements[d].kind != PlacementKind::Partial) continue;
    out += at * scale;
    scale *= layout.mesh.shape[d];
  }
  return out;
}

inline int64_t contributions_of(const Layout& layout) {
  int64_t out = 1;
  for (size_t d = 0; d < layout.placements.size(); ++d) {
    if (layout.placements[d].kind == PlacementKind::Partial) out *= layout.mesh.shape[d];
  }
  return out;
}

inline Plan random_reduction(std::mt19937& rng, int world, ReduceOp op,
                             const std::vector<std::vector<int32_t>>& hosts) {
  Problem problem;
  const size_t dims = rng() % 4;
  for (size_t d = 0; d < dims; ++d) problem.shape.push_back(static_cast<int64_t>(rng() % 9) + (rng() % 8 != 0));
  problem.element_bytes = 8;
  problem.dst = random_layout(rng, world, dims);
  do {
    problem.src = random_layout(rng, world, dims);
    for (Placement& placement : problem.src.placements) {
      if (rng() % 3 == 0) continue;
      placement = {};
      placement.kind = PlacementKind::Partial;
      placement.op = op;
    }
  } while (contributions_of(problem.src) < 2);
  if (rng() % 3 == 0) problem.dst = as_boxes(rng, problem.dst, problem.shape);
  PlanOptions options;
  options.chunk_bytes = 64;
  const int64_t per_host = hosts.empty() ? 1 : static_cast<int64_t>(hosts.front().size());
  return make_plan({problem},
                   uniform_topology(world - 1, static_cast<int32_t>(per_host), 1000000000, 1, 8000000000, 1000),
                   options);
}

inline RankRun start_reduction(Cluster& cluster, const Plan& plan, int rank, RunLabel run_label) {
  const Problem& problem = plan.problems.front();
  const int64_t c = contribution_of(problem.src, rank);
  const int64_t count = contributions_of(problem.src);
  const ReduceOp op =
      std::find_if(problem.src.placements.begin(), problem.src.placements.end(), [](const Placement& p) {
        return p.kind == PlacementKind::Partial;
      })->op;
  RankRun part;
  const Shard destination = shard_of(problem.dst, problem.shape, rank);
  part.source = make_local(shard_of(problem.src, problem.shape, rank), problem.shape, true);
  for (int64_t& x : part.source.data) x = value_of(x, c);
  part.destination = make_local(destination, problem.shape, false);
  part.expected = make_local(destination, problem.shape, true).data;
  for (int64_t& x : part.expected) x = x < 0 ? x : reduced(x, count, op);
  Buffers buffers;
  buffers.source = {part.source.memory};
  buffers.destination = {part.destination.memory};
  buffers.types = {ElementType::Int64};
  part.run = cluster.engine(rank).start(
      std::make_shared<const Program>(project(plan, rank, cluster.group(), cluster.local(rank))), buffers,
      std::move(run_label), Clock::now() + kReductionLimit);
  return part;
}

inline std::vector<std::vector<int32_t>> pairs_of(int world) {
  std::vector<std::vector<int32_t>> out;
  for (int32_t rank = 0; rank < world; rank += 2) {
    out.push_back({rank});
    if (rank + 1 < world) out.back().push_back(rank + 1);
  }
  return out;
}

}  // namespace meshcast::testing
