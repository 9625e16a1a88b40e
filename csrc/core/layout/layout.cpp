#include "layout/layout.h"

#include <algorithm>
#include <unordered_set>

#include "common/checked.h"
#include "common/error.h"
#include "layout/tiling.h"

namespace meshcast {
namespace {

constexpr int64_t kMaxPieces = int64_t{1} << 22;  // of all shards of a layout together

std::string list_text(const std::vector<int64_t>& values, const char* separator) {
  std::string out;
  for (size_t i = 0; i < values.size(); ++i) out += (i ? separator : "") + std::to_string(values[i]);
  return out;
}

void check_mesh(const Mesh& mesh) {
  if (mesh.shape.empty() || mesh.shape.size() > kMaxMeshDims) {
    throw LayoutError("a mesh has 1 to " + std::to_string(kMaxMeshDims) + " dimensions, got " +
                      std::to_string(mesh.shape.size()));
  }
  int64_t size = 1;
  for (const int64_t n : mesh.shape) {
    if (n < 1) throw LayoutError("mesh shape (" + list_text(mesh.shape, ", ") + ") has a dimension below 1");
    size = checked_mul(size, n, "mesh size");
  }
  if (size != mesh.size()) {
    throw LayoutError("mesh shape (" + list_text(mesh.shape, ", ") + ") needs " + std::to_string(size) +
                      " ranks, got " + std::to_string(mesh.size()));
  }
  std::unordered_set<int32_t> seen;
  for (const int32_t rank : mesh.ranks) {
    if (rank < 0) throw LayoutError("mesh holds the negative rank " + std::to_string(rank));
    if (!seen.insert(rank).second) throw LayoutError("mesh holds rank " + std::to_string(rank) + " twice");
  }
}

void check_placement(const Placement& p, size_t mesh_dim, size_t ndim) {
  const std::string where = " on mesh dimension " + std::to_string(mesh_dim);
  switch (p.kind) {
    case PlacementKind::Replicate: return;
    case PlacementKind::Partial:
      if (p.op == ReduceOp::None) throw LayoutError("Partial" + where + " names no reduce operation");
      return;
    case PlacementKind::Shard:
    case PlacementKind::StridedShard:
      if (p.dim < 0 || static_cast<size_t>(p.dim) >= ndim) {
        throw LayoutError("Shard(" + std::to_string(p.dim) + ")" + where + " is out of range for a tensor of " +
                          std::to_string(ndim) + " dimensions");
      }
      if (p.kind == PlacementKind::StridedShard && p.split_factor < 1) {
        throw LayoutError("_StridedShard" + where + " has split_factor " + std::to_string(p.split_factor) +
                          ", it must be at least 1");
      }
      return;
  }
  throw LayoutError("unknown placement kind " + std::to_string(static_cast<int>(p.kind)) + where);
}

// "[0..7]" if the ranks count up by one, else the first ranks in full.
std::string ranks_text(const std::vector<int32_t>& ranks) {
  bool consecutive = true;
  for (size_t i = 1; i < ranks.size(); ++i) {
    consecutive = consecutive && int64_t{ranks[i]} - ranks[i - 1] == 1;  // in 64 bits: a rank may be INT32_MAX
  }
  if (consecutive && ranks.size() > 1) {
    return "[" + std::to_string(ranks.front()) + ".." + std::to_string(ranks.back()) + "]";
  }
  constexpr size_t kShown = 16;
  std::string out = "[";
  for (size_t i = 0; i < std::min(ranks.size(), kShown); ++i) out += (i ? "," : "") + std::to_string(ranks[i]);
  return out + (ranks.size() > kShown ? ",...]" : "]");
}

std::string box_text(const Box& box) {
  std::string out = "[";
  for (int d = 0; d < box.ndim; ++d)
    out += (d ? ", " : "") + std::to_string(box.lo[d]) + ":" + std::to_string(box.hi[d]);
  return out + "]";
}

// Whether the memory of a piece is inside its local tensor.
bool fits_local(const Shard& shard, size_t index) {
  const ShardPiece& piece = shard.pieces[index];
  std::array<int64_t, kMaxDims> last = piece.local;
  for (int d = 0; d < piece.box.ndim; ++d) {
    const int axis = shard.places.empty() ? d : shard.places[index].axis[d];
    const int64_t step = shard.places.empty() ? 1 : shard.places[index].step[d];
    if (axis < 0 || axis >= kMaxDims || step < 0) return false;
    if (piece.box.extent(d) == 1) continue;
    if (static_cast<size_t>(axis) >= shard.local_shape.size()) return false;
    last[axis] =
        checked_add(last[axis], checked_mul(piece.box.extent(d) - 1, step, "local index"), "local index");
  }
  for (size_t d = 0; d < shard.local_shape.size(); ++d) {
    if (piece.local[d] < 0 || last[d] >= shard.local_shape[d]) return false;
  }
  return true;
}

// Boxes come from users and from other ranks, so everything about them is checked.
void check_boxes(const Layout& layout, const std::vector<int64_t>& shape) {
  if (layout.mesh.shape.size() != 1 || layout.by_boxes.size() != layout.mesh.ranks.size())
    throw LayoutError(
        "a layout by boxes has a mesh of one dimension and a list of boxes for each of its ranks");
  for (const Shard& shard : layout.by_boxes) {
    if (shard.local_shape.size() > kMaxDims)
      throw LayoutError("a local tensor of " + std::to_string(shard.local_shape.size()) +
                        " dimensions: at most " + std::to_string(kMaxDims) + " are supported");
    if (!shard.places.empty() && shard.places.size() != shard.pieces.size())
      throw LayoutError("a place in the local tensor is needed for every box of a rank, or for none");
    for (size_t i = 0; i < shard.pieces.size(); ++i) {
      const Box& box = shard.pieces[i].box;
      bool inside = box.ndim == static_cast<int>(shape.size()) && !box.empty();
      for (int d = 0; inside && d < box.ndim; ++d) inside = box.lo[d] >= 0 && box.hi[d] <= shape[d];
      if (!inside)
        throw LayoutError("the box " + box_text(box) + " of rank " + std::to_string(shard.rank) +
                          " is not inside a tensor of shape (" + list_text(shape, ", ") + ")");
      if (!fits_local(shard, i))
        throw LayoutError("the box " + box_text(box) + " of rank " + std::to_string(shard.rank) +
                          " is not inside its local tensor of shape (" + list_text(shard.local_shape, ", ") +
                          ")");
    }
  }
}

}  // namespace

void validate(const Layout& layout, const std::vector<int64_t>& shape) {
  if (shape.size() > kMaxDims) {
    throw LayoutError("a tensor of " + std::to_string(shape.size()) + " dimensions: at most " +
                      std::to_string(kMaxDims) + " are supported");
  }
  int64_t elements = 1;
  bool empty = false;
  for (const int64_t n : shape) {
    if (n < 0) throw LayoutError("tensor shape (" + list_text(shape, ", ") + ") has a negative dimension");
    empty = empty || n == 0;
    if (n > 0) elements = checked_mul(elements, n, "number of elements");
  }
  check_mesh(layout.mesh);
  if (!layout.by_boxes.empty()) {
    check_boxes(layout, shape);
    return;
  }
  if (layout.placements.size() != layout.mesh.shape.size()) {
    throw LayoutError(std::to_string(layout.placements.size()) + " placements for a mesh of " +
                      std::to_string(layout.mesh.shape.size()) + " dimensions: one is needed for each");
  }
  for (size_t m = 0; m < layout.placements.size(); ++m) check_placement(layout.placements[m], m, shape.size());
}

// The shards of a mesh in the order of its ranks. For each dimension of the tensor, a rank's coordinates on the
// mesh dimensions that cut it give a part, which is a list of intervals: several only under _StridedShard. The
// pieces of a shard are the products of its intervals over all dimensions.
std::vector<Shard> shards(const Layout& layout, const std::vector<int64_t>& shape) {
  validate(layout, shape);
  if (!layout.by_boxes.empty()) return layout.by_boxes;
  const Tiling tiling = tile_layout(layout, shape);
  const size_t ndim = shape.size();
  std::vector<Shard> out(static_cast<size_t>(layout.mesh.size()));
  int64_t pieces = 0;
  for (int64_t position = 0; position < layout.mesh.size(); ++position) {
    const std::vector<int64_t> at = mesh_coordinates(layout.mesh, position);
    Shard& shard = out[static_cast<size_t>(position)];
    shard.rank = layout.mesh.ranks[static_cast<size_t>(position)];
    shard.local_shape.assign(ndim, 0);
    std::vector<const std::vector<Interval>*> held(ndim);
    int64_t count = 1;
    for (size_t d = 0; d < ndim; ++d) {
      int64_t part = 0;
      for (const int m : tiling.axes[d].mesh_dims) part = part * layout.mesh.shape[m] + at[m];
      held[d] = &tiling.axes[d].parts[static_cast<size_t>(part)];
      for (const Interval& i : *held[d]) shard.local_shape[d] += i.size();
      count = checked_mul(count, static_cast<int64_t>(held[d]->size()), "number of pieces");
    }
    pieces += count;
    if (pieces > kMaxPieces) {
      throw LayoutError("the shards of " + describe(layout) + " have more than " + std::to_string(kMaxPieces) +
                        " pieces");
    }
    shard.pieces.reserve(static_cast<size_t>(count));
    // Odometer over the intervals of every dimension, the last one fastest: row-major local order.
    std::vector<size_t> index(ndim, 0);
    std::vector<int64_t> local(ndim, 0);
    for (int64_t n = 0; n < count; ++n) {
      ShardPiece piece;
      piece.box.ndim = static_cast<int>(ndim);
      for (size_t d = 0; d < ndim; ++d) {
        piece.box.lo[d] = (*held[d])[index[d]].lo;
        piece.box.hi[d] = (*held[d])[index[d]].hi;
        piece.local[d] = local[d];
      }
      shard.pieces.push_back(piece);
      for (size_t d = ndim; d-- > 0;) {
        local[d] += (*held[d])[index[d]].size();
        if (++index[d] < held[d]->size()) break;
        index[d] = 0;
        local[d] = 0;
      }
    }
  }
  return out;
}

const char* to_string(ReduceOp op) {
  switch (op) {
    case ReduceOp::Sum: return "sum";
    case ReduceOp::Avg: return "avg";
    case ReduceOp::Min: return "min";
    case ReduceOp::Max: return "max";
    case ReduceOp::Product: return "product";
    case ReduceOp::None: break;
  }
  return "none";
}

std::string describe(const Layout& layout) {
  std::string out = "mesh " + list_text(layout.mesh.shape, "x") + " " + ranks_text(layout.mesh.ranks) + ",";
  if (!layout.by_boxes.empty()) {
    size_t boxes = 0;
    for (const Shard& shard : layout.by_boxes) boxes += shard.pieces.size();
    return out + " " + std::to_string(boxes) + (boxes == 1 ? " box" : " boxes");
  }
  for (const Placement& p : layout.placements) {
    switch (p.kind) {
      case PlacementKind::Replicate: out += " R"; break;
      case PlacementKind::Shard: out += " S" + std::to_string(p.dim); break;
      case PlacementKind::StridedShard:
        out += " SS" + std::to_string(p.dim) + "/" + std::to_string(p.split_factor);
        break;
      case PlacementKind::Partial: out += std::string(" P(") + to_string(p.op) + ")"; break;
    }
  }
  return out;
}

bool has_partial(const Layout& layout) {
  return std::any_of(layout.placements.begin(), layout.placements.end(),
                     [](const Placement& p) { return p.kind == PlacementKind::Partial; });
}

}  // namespace meshcast
