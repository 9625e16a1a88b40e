#pragma once

#include <cstdint>
#include <unordered_map>
#include <vector>

#include "layout/layout.h"
#include "plan/plan.h"

namespace meshcast {

// Which messages are not a contiguous range of the local tensor, taken as row-major, and have to be packed or
// unpacked. One object is for one side of every problem: the source shards or the destination shards.
class Packing {
 public:
  Packing(const std::vector<Problem>& problems, Layout Problem::*side);

  // Whether `rank` packs, or unpacks, a message of this one box.
  bool packs(const ChunkPiece& piece, int32_t rank) const;

  // The same for a chunk of `pieces`. Several boxes are always packed.
  bool packs(const std::vector<ChunkPiece>& pieces, const Chunk& chunk, int32_t rank) const;

 private:
  std::vector<char> stacked_;                                  // by problem
  std::vector<std::vector<Shard>> shards_;                     // by problem, mesh position
  std::vector<std::unordered_map<int32_t, size_t>> position_;  // by problem: rank -> mesh position
};

}  // namespace meshcast
