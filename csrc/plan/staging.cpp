#include "plan/staging.h"

#include <algorithm>
#include <array>
#include <unordered_map>

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

// The shards of all ranks under one side of every problem.
class Shards {
 public:
  Shards(const Plan& plan, Layout Problem::*side) : plan_(plan) {
    for (const Problem& problem : plan.problems) {
      shards_.push_back(shards(problem.*side, problem.shape));
      auto& position = position_.emplace_back();
      for (size_t i = 0; i < shards_.back().size(); ++i) position[shards_.back()[i].rank] = i;
    }
  }

  // Whether the rank has to pack the chunk, or to unpack it.
  bool packs(const Chunk& chunk, int32_t rank) const {
    if (chunk.piece_end - chunk.piece_begin != 1) return true;
    const ChunkPiece& piece = plan_.pieces[static_cast<size_t>(chunk.piece_begin)];
    const auto tensor = static_cast<size_t>(piece.tensor);
    const auto position = position_[tensor].find(rank);
    if (position == position_[tensor].end()) return true;  // it has a result only to pass it on
    const Shard& shard = shards_[tensor][position->second];
    const auto place = std::find_if(shard.pieces.begin(), shard.pieces.end(),
                                    [&](const ShardPiece& p) { return p.box.contains(piece.box); });
    return place == shard.pieces.end() || !contiguous(piece.box, shard.local_shape);
  }

 private:
  const Plan& plan_;
  std::vector<std::vector<Shard>> shards_;                     // by problem, mesh position
  std::vector<std::unordered_map<int32_t, size_t>> position_;  // by problem: rank -> mesh position
};

// The largest messages of one peer and direction, descending.
using Largest = std::array<int64_t, kMessageWindow + 1>;

void insert(int64_t nbytes, Largest* largest) {
  for (int64_t& place : *largest)
    if (nbytes > place) std::swap(nbytes, place);
}

}  // namespace

std::vector<int64_t> peak_staging(const Plan& plan) {
  const Shards source(plan, &Problem::src);
  const Shards destination(plan, &Problem::dst);
  std::unordered_map<uint64_t, Largest> out, in;  // by (rank, peer)
  const auto key = [](int32_t rank, int32_t peer) {
    return (static_cast<uint64_t>(rank) << 32) | static_cast<uint32_t>(peer);
  };
  for (const Hop& hop : plan.hops) {
    const Chunk& chunk = plan.chunks[static_cast<size_t>(hop.chunk)];
    const bool reduces = hop.reduce != ReduceOp::None;
    if (reduces || (hop.after < 0 ? source : destination).packs(chunk, hop.src))
      insert(chunk.nbytes, &out.try_emplace(key(hop.src, hop.dst), Largest{}).first->second);
    if (reduces || destination.packs(chunk, hop.dst))
      insert(chunk.nbytes, &in.try_emplace(key(hop.dst, hop.src), Largest{}).first->second);
  }
  std::vector<int64_t> total(plan.ranks.size(), 0);
  for (const auto* side : {&out, &in}) {
    for (const auto& [pair, largest] : *side) {
      const auto rank = static_cast<int32_t>(pair >> 32);
      const auto at = std::lower_bound(plan.ranks.begin(), plan.ranks.end(), rank) - plan.ranks.begin();
      for (size_t i = 0; i < largest.size() - (side == &out); ++i) total[static_cast<size_t>(at)] += largest[i];
    }
  }
  return total;
}

}  // namespace meshcast
