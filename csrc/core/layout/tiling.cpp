#include "layout/tiling.h"

#include <algorithm>
#include <numeric>

#include "common/checked.h"
#include "common/error.h"

namespace meshcast {
namespace {

// A strided cut can turn one dimension into many intervals; past this a plan would have too many boxes.
constexpr int64_t kMaxIntervals = int64_t{1} << 20;

int64_t total_size(const std::vector<Interval>& list) {
  return std::accumulate(list.begin(), list.end(), int64_t{0},
                         [](int64_t sum, const Interval& i) { return sum + i.size(); });
}

// Elements [from, to) of the concatenation of `list`, appended to `out`. Neighbours are joined, so that a
// shard has as few pieces as its geometry allows.
void append_slice(const std::vector<Interval>& list, int64_t from, int64_t to, std::vector<Interval>* out) {
  int64_t at = 0;
  for (const Interval& i : list) {
    const int64_t lo = std::max(from, at);
    const int64_t hi = std::min(to, at + i.size());
    if (lo < hi) {
      const Interval cut{i.lo + (lo - at), i.lo + (hi - at)};
      if (!out->empty() && out->back().hi == cut.lo) {
        out->back().hi = cut.hi;
      } else {
        out->push_back(cut);
      }
    }
    at += i.size();
    if (at >= to) break;
  }
}

// Part `index` of `n` by torch.chunk's rule, as a half-open range of [0, size).
Interval chunk_range(int64_t size, int64_t n, int64_t index) {
  const int64_t step = ceil_div(size, n);
  // index * step may pass size, never wrap: index < n, so the product is at most size + n * 1.
  return {std::min(size, index * step), std::min(size, (index + 1) * step)};
}

// One mesh dimension's cut of the intervals that a position holds so far. A strided shard first cuts into
// split_factor blocks, then takes its part of every block (DTensor's _StridedShard).
std::vector<Interval> cut(const std::vector<Interval>& held, const Placement& p, int64_t n, int64_t index) {
  std::vector<Interval> out;
  const int64_t size = total_size(held);
  if (size == 0) return out;
  const int64_t blocks = p.kind == PlacementKind::StridedShard ? p.split_factor : 1;
  const int64_t step = ceil_div(size, blocks);
  for (int64_t lo = 0; lo < size; lo += step) {
    const int64_t block = std::min(step, size - lo);
    const Interval mine = chunk_range(block, n, index);
    append_slice(held, lo + mine.lo, lo + mine.hi, &out);
    if (static_cast<int64_t>(out.size()) > kMaxIntervals) {
      throw LayoutError("a strided shard cuts tensor dimension " + std::to_string(p.dim) + " into more than " +
                        std::to_string(kMaxIntervals) + " intervals");
    }
  }
  return out;
}

AxisTiling tile_axis(const Layout& layout, int dim, int64_t size) {
  AxisTiling axis;
  axis.parts.push_back({});
  if (size > 0) axis.parts[0].push_back({0, size});
  int64_t intervals = 1;
  for (size_t m = 0; m < layout.placements.size(); ++m) {
    const Placement& p = layout.placements[m];
    const bool cuts = p.kind == PlacementKind::Shard || p.kind == PlacementKind::StridedShard;
    if (!cuts || p.dim != dim) continue;
    axis.mesh_dims.push_back(static_cast<int>(m));
    const int64_t n = layout.mesh.shape[m];
    std::vector<std::vector<Interval>> next;
    next.reserve(axis.parts.size() * static_cast<size_t>(n));
    intervals = 0;
    for (const auto& part : axis.parts) {
      for (int64_t i = 0; i < n; ++i) {
        next.push_back(cut(part, p, n, i));
        intervals += static_cast<int64_t>(next.back().size());
        if (intervals > kMaxIntervals) {
          throw LayoutError("the layout cuts tensor dimension " + std::to_string(dim) + " into more than " +
                            std::to_string(kMaxIntervals) + " intervals");
        }
      }
    }
    axis.parts = std::move(next);
  }
  return axis;
}

}  // namespace

std::vector<int64_t> mesh_coordinates(const Mesh& mesh, int64_t position) {
  std::vector<int64_t> at(mesh.shape.size());
  for (size_t d = mesh.shape.size(); d-- > 0;) {
    at[d] = position % mesh.shape[d];
    position /= mesh.shape[d];
  }
  return at;
}

int64_t Tiling::tile(const std::vector<int64_t>& part) const {
  int64_t id = 0;
  for (size_t d = 0; d < axes.size(); ++d) id = id * static_cast<int64_t>(axes[d].parts.size()) + part[d];
  return id;
}

Tiling tile_layout(const Layout& layout, const std::vector<int64_t>& shape) {
  Tiling out;
  int64_t tiles = 1;  // at most the mesh size: each mesh dimension cuts one tensor dimension
  for (size_t d = 0; d < shape.size(); ++d) {
    out.axes.push_back(tile_axis(layout, static_cast<int>(d), shape[d]));
    tiles *= static_cast<int64_t>(out.axes.back().parts.size());
  }
  for (size_t m = 0; m < layout.placements.size(); ++m) {
    if (layout.placements[m].kind == PlacementKind::Partial) {
      out.contributions *= static_cast<int32_t>(layout.mesh.shape[m]);
    }
  }
  out.holders.resize(static_cast<size_t>(tiles));
  out.contribution.resize(static_cast<size_t>(tiles));
  std::vector<int64_t> part(shape.size());
  for (int64_t position = 0; position < layout.mesh.size(); ++position) {
    const std::vector<int64_t> at = mesh_coordinates(layout.mesh, position);
    for (size_t d = 0; d < shape.size(); ++d) {
      part[d] = 0;
      for (const int m : out.axes[d].mesh_dims) part[d] = part[d] * layout.mesh.shape[m] + at[m];
    }
    int64_t contribution = 0;
    for (size_t m = 0; m < layout.placements.size(); ++m) {
      if (layout.placements[m].kind == PlacementKind::Partial) {
        contribution = contribution * layout.mesh.shape[m] + at[m];
      }
    }
    const auto tile = static_cast<size_t>(out.tile(part));
    out.holders[tile].push_back(layout.mesh.ranks[static_cast<size_t>(position)]);
    out.contribution[tile].push_back(static_cast<int32_t>(contribution));
  }
  return out;
}

}  // namespace meshcast
