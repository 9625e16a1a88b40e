#include "plan/packing.h"

#include <algorithm>

namespace meshcast {
namespace {

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
    shards_.push_back(shards(problem.*side, problem.shape));
    auto& position = position_.emplace_back();
    for (size_t i = 0; i < shards_.back().size(); ++i) position[shards_.back()[i].rank] = i;
  }
}

bool Packing::packs(const ChunkPiece& piece, int32_t rank) const {
  const auto tensor = static_cast<size_t>(piece.tensor);
  const auto position = position_[tensor].find(rank);
  if (position == position_[tensor].end()) return true;  // it has a result only to pass it on
  const Shard& shard = shards_[tensor][position->second];
  const auto place = std::find_if(shard.pieces.begin(), shard.pieces.end(),
                                  [&](const ShardPiece& p) { return p.box.contains(piece.box); });
  return place == shard.pieces.end() || !contiguous(piece.box, shard.local_shape);
}

bool Packing::packs(const std::vector<ChunkPiece>& pieces, const Chunk& chunk, int32_t rank) const {
  if (chunk.piece_end - chunk.piece_begin != 1) return true;
  return packs(pieces[static_cast<size_t>(chunk.piece_begin)], rank);
}

}  // namespace meshcast
