#pragma once

#include <cstdint>
#include <vector>

#include "layout/layout.h"

namespace meshcast {

// Half-open interval of one tensor dimension.
struct Interval {
  int64_t lo = 0;
  int64_t hi = 0;

  int64_t size() const { return hi - lo; }
  friend bool operator==(const Interval&, const Interval&) = default;
};

// How a layout cuts one tensor dimension. Part p belongs to the mesh positions whose coordinates in
// `mesh_dims` are p written in mixed radix; over all parts the intervals partition [0, size).
struct AxisTiling {
  std::vector<int> mesh_dims;                // those that cut this dimension, left to right
  std::vector<std::vector<Interval>> parts;  // in local order; several only under StridedShard
};

// A layout as a product of axes. Tile t (mixed radix over the parts of each axis) is held by
// holders[t], in mesh order; every mesh position is in exactly one tile.
struct Tiling {
  std::vector<AxisTiling> axes;
  std::vector<std::vector<int32_t>> holders;
  // The number of the partial value that each holder has; parallel to `holders`, all zero without Partial.
  std::vector<std::vector<int32_t>> contribution;
  int32_t contributions = 1;

  int64_t tile(const std::vector<int64_t>& part) const;
};

// Expects a validated layout.
Tiling tile_layout(const Layout& layout, const std::vector<int64_t>& shape);

// Coordinates of a row-major mesh position.
std::vector<int64_t> mesh_coordinates(const Mesh& mesh, int64_t position);

}  // namespace meshcast
