#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "layout/box.h"

namespace meshcast {

inline constexpr int kMaxMeshDims = 5;

enum class PlacementKind : uint8_t { Replicate, Shard, StridedShard, Partial };
enum class ReduceOp : uint8_t { None, Sum, Avg, Min, Max, Product };

// How one mesh dimension holds the tensor. The meaning is DTensor's.
struct Placement {
  PlacementKind kind = PlacementKind::Replicate;
  int dim = 0;                   // tensor dimension, Shard and StridedShard; never negative here
  int64_t split_factor = 1;      // StridedShard only
  ReduceOp op = ReduceOp::None;  // Partial only

  friend bool operator==(const Placement&, const Placement&) = default;
};

// n-d array of global ranks in row-major order, every rank at most once.
struct Mesh {
  std::vector<int64_t> shape;
  std::vector<int32_t> ranks;

  int64_t size() const { return static_cast<int64_t>(ranks.size()); }
  friend bool operator==(const Mesh&, const Mesh&) = default;
};

// One box of a shard and the index at which its first element sits in the rank's local tensor.
// A shard has several pieces only under StridedShard, or in a layout by boxes.
struct ShardPiece {
  Box box;
  std::array<int64_t, kMaxDims> local{};

  friend bool operator==(const ShardPiece&, const ShardPiece&) = default;
};

// The place of a box in a local tensor with other dimensions: a step along dimension d of the box is step[d]
// steps along dimension axis[d] of the local tensor.
struct BoxPlace {
  std::array<int8_t, kMaxDims> axis{};
  std::array<int64_t, kMaxDims> step{};

  friend bool operator==(const BoxPlace&, const BoxPlace&) = default;
};

// The part of a tensor on one rank. An empty shard has a local shape with a zero in it and no pieces.
struct Shard {
  int32_t rank = -1;
  std::vector<int64_t> local_shape;
  std::vector<ShardPiece> pieces;
  std::vector<BoxPlace> places{};  // of `pieces`; empty: each has the dimensions of the local tensor

  friend bool operator==(const Shard&, const Shard&) = default;
};

// A mesh and one placement for each of its dimensions; or, by boxes, a mesh of one dimension without
// placements, and the shard of each of its ranks.
struct Layout {
  Mesh mesh;
  std::vector<Placement> placements;
  std::vector<Shard> by_boxes{};  // empty: by placements; else in mesh order

  friend bool operator==(const Layout&, const Layout&) = default;
};

// Throws LayoutError naming the offending item: placement count, dims out of range, duplicate or
// negative ranks, mesh of zero ranks, more dims than supported, a box outside of the tensor or of its local
// tensor.
void validate(const Layout& layout, const std::vector<int64_t>& shape);

// One shard per mesh position, in row-major mesh order. Mesh dimensions are applied left to right; each
// cut follows torch.chunk: ceil(size / n) per part, the last ones shorter or empty.
std::vector<Shard> shards(const Layout& layout, const std::vector<int64_t>& shape);

// "mesh 2x4 [0..7], S0 R": for messages, plan descriptions and the agreement between ranks.
std::string describe(const Layout& layout);

const char* to_string(ReduceOp op);

// True if some placement is Partial: values are pending reduction over that mesh dimension.
bool has_partial(const Layout& layout);

}  // namespace meshcast
