#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "plan/plan.h"
#include "run/run.h"

namespace meshcast::testing {

// Two mesh dimensions over a random choice of ranks; shards and replicas at random.
inline Layout random_layout(std::mt19937& rng, int world, size_t tensor_dims) {
  Layout layout;
  std::vector<int32_t> ranks(static_cast<size_t>(world));
  std::iota(ranks.begin(), ranks.end(), 0);
  std::shuffle(ranks.begin(), ranks.end(), rng);
  const int64_t rows = 1 + static_cast<int64_t>(rng() % 2);
  const int64_t columns =
      1 + static_cast<int64_t>(rng() % (static_cast<uint64_t>(world) / static_cast<uint64_t>(rows)));
  layout.mesh.shape = {rows, columns};
  layout.mesh.ranks.assign(ranks.begin(), ranks.begin() + rows * columns);
  for (int i = 0; i < 2; ++i) {
    Placement placement;
    if (tensor_dims > 0 && rng() % 3 != 0) {
      placement.kind = PlacementKind::Shard;
      placement.dim = static_cast<int>(rng() % tensor_dims);
    }
    layout.placements.push_back(placement);
  }
  return layout;
}

// The same shards as boxes, cut at random, which lie in a flat local tensor in any order.
inline Layout as_boxes(std::mt19937& rng, const Layout& layout, const std::vector<int64_t>& shape) {
  Layout out;
  out.mesh = {{layout.mesh.size()}, layout.mesh.ranks};
  for (const Shard& shard : shards(layout, shape)) {
    std::vector<Box> boxes;
    for (const ShardPiece& piece : shard.pieces) {
      Box low = piece.box;
      const int d = low.ndim == 0 ? 0 : static_cast<int>(rng() % static_cast<uint32_t>(low.ndim));
      if (low.ndim > 0 && low.extent(d) > 1) {
        Box high = low;
        low.hi[d] = high.lo[d] = low.lo[d] + 1 + static_cast<int64_t>(rng() % (low.extent(d) - 1));
        boxes.push_back(high);
      }
      boxes.push_back(low);
    }
    std::shuffle(boxes.begin(), boxes.end(), rng);
    Shard flat;
    flat.rank = shard.rank;
    int64_t at = 0;
    for (const Box& box : boxes) {
      ShardPiece piece{box, {}};
      piece.local[0] = at;
      BoxPlace place;
      int64_t step = 1;
      for (int d = box.ndim; d-- > 0; step *= box.extent(d)) place.step[d] = step;
      at += box.volume();
      flat.pieces.push_back(piece);
      flat.places.push_back(place);
    }
    flat.local_shape = {at};
    out.by_boxes.push_back(std::move(flat));
  }
  return out;
}

inline Plan random_plan(std::mt19937& rng, int world) {
  Problem problem;
  const size_t dims = rng() % 4;
  for (size_t d = 0; d < dims; ++d) problem.shape.push_back(static_cast<int64_t>(rng() % 9) + (rng() % 8 != 0));
  problem.element_bytes = 8;
  problem.src = random_layout(rng, world, dims);
  problem.dst = random_layout(rng, world, dims);
  if (rng() % 3 == 0) problem.src = as_boxes(rng, problem.src, problem.shape);
  if (rng() % 3 == 0) problem.dst = as_boxes(rng, problem.dst, problem.shape);
  PlanOptions options;
  options.chunk_bytes = 64;  // many chunks even of a small tensor, so that windows and forwards matter
  options.strategy = rng() % 2 ? Strategy::Broadcast : Strategy::SendRecv;
  return make_plan({problem}, uniform_topology(world - 1, 2, 1000000000, 1, 8000000000, 1000), options);
}

inline RunLabel label(int number, int32_t lane = 0) {
  RunLabel out;
  out.lane = lane;
  out.ordinal = number;
  out.text = std::make_shared<const PlanText>(PlanText{"test", "a test's plan"});
  return out;
}

// A plan that forwards: rank 0 holds everything, ranks 1..n-1 need it.
inline Plan chain_plan(int world, int64_t elements, int64_t chunk_bytes = 512) {
  Problem problem;
  problem.shape = {elements};
  problem.element_bytes = 8;
  problem.src = {{{1}, {0}}, {{}}};
  problem.dst.mesh.shape = {world - 1};
  for (int32_t rank = 1; rank < world; ++rank) problem.dst.mesh.ranks.push_back(rank);
  problem.dst.placements = {{}};
  PlanOptions options;
  options.strategy = Strategy::Broadcast;
  options.chunk_bytes = chunk_bytes;
  return make_plan({problem}, uniform_topology(world - 1, 1, 1000000000, 1, 8000000000, 1000), options);
}

}  // namespace meshcast::testing
