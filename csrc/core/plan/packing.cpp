#include "plan/packing.h"

#include <algorithm>
#include <array>

namespace meshcast {
namespace {

// For a box that has other dimensions than the local tensor.
bool contiguous(const Box& box, const BoxPlace& place, const std::vector<int64_t>& local_shape) {
  std::array<int64_t, kMaxDims> stride{};
  int64_t size = 1;
  for (size_t d = local_shape.size(); d-- > 0;) {
    stride[d] = size;
    size *= local_shape[d];
  }
  int64_t expected = 1;
  for (int d = box.ndim; d-- > 0;) {
    if (box.extent(d) == 1) continue;
    if (place.step[d] * stride[static_cast<uint8_t>(place.axis[d])] != expected) return false;
    expected *= box.extent(d);
  }
  return true;
}

bool contiguous(const Box& box, const std::vector<int64_t>& local_shape) {
  int d = 0;
  while (d < box.ndim && box.extent(d) == 1) ++d;
  for (++d; d < box.ndim; ++d) {
    if (box.extent(d) != local_shape[static_cast<size_t>(d)]) return false;
  }
  return true;
}

}  // namespace

Packing::Packing(const std::vector<Problem>& problems, Layout Problem::*side) {
  for (const Problem& problem : problems) {
    stacked_.push_back(problem.stacked);
    shards_.push_back(shards(problem.*side, problem.shape));
    auto& position = position_.emplace_back();
    for (size_t i = 0; i < shards_.back().size(); ++i) position[shards_.back()[i].rank] = i;
  }
}

bool Packing::packs(const ChunkPiece& piece, int32_t rank) const {
  const auto tensor = static_cast<size_t>(piece.tensor);
  if (stacked_[tensor] && piece.box.extent(0) > 1) return true;  // boxes of several tensors
  const auto position = position_[tensor].find(rank);
  if (position == position_[tensor].end()) return true;  // it only passes the result on
  const Shard& shard = shards_[tensor][position->second];
  const auto place = std::find_if(shard.pieces.begin(), shard.pieces.end(),
                                  [&](const ShardPiece& p) { return p.box.contains(piece.box); });
  if (place == shard.pieces.end()) return true;
  if (shard.places.empty()) return !contiguous(piece.box, shard.local_shape);
  const auto index = static_cast<size_t>(place - shard.pieces.begin());
  return !contiguous(piece.box, shard.places[index], shard.local_shape);
}

bool Packing::packs(const std::vector<ChunkPiece>& pieces, const Chunk& chunk, int32_t rank) const {
  if (chunk.piece_end - chunk.piece_begin != 1) return true;
  return packs(pieces[static_cast<size_t>(chunk.piece_begin)], rank);
}

}  // namespace meshcast
