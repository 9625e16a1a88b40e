#pragma once

#include <cstdint>

#include "boxes/box_copy.h"

namespace meshcast::cuda {

inline constexpr int kThreads = 256;    // of a block
inline constexpr int kPiecesAhead = 4;  // the most pieces that a thread loads before it stores any

// The boxes of one launch. It is passed as the kernel's parameter: no memory is allocated, nothing has to stay
// alive until the kernel has run, and a CUDA graph keeps its own copy. A block moves one tile at a time:
// kThreads * per_thread pieces of one box.
template <int kBoxes>
struct BoxTable {
  static constexpr int kCapacity = kBoxes;
  uint32_t tiles = 0;
  int count = 0;
  int per_thread = 1;           // pieces, up to kPiecesAhead
  uint32_t first_tile[kBoxes];  // NOLINT(*-avoid-c-arrays): a kernel parameter
  BoxCopy box[kBoxes];
};

// These fill the 4 KiB that kernel parameters may have on every version, and the 32,764 bytes since CUDA 12.1.
using SmallTable = BoxTable<14>;
using LargeTable = BoxTable<112>;
static_assert(sizeof(SmallTable) <= 4000 && sizeof(LargeTable) <= 32'000);

// The last box that begins at or before `tile`.
template <class Table>
MESHCAST_HOST_DEVICE int box_of_tile(const Table& table, uint32_t tile) {
  int low = 0;
  int high = table.count;
  while (high - low > 1) {
    const int middle = (low + high) / 2;
    if (table.first_tile[middle] <= tile) {
      low = middle;
    } else {
      high = middle;
    }
  }
  return low;
}

// Runs one thread of a launch: `block` of `blocks` takes every blocks-th tile. Op loads and stores the pieces
// (box_ops.h); loads of several pieces are in flight before the first is stored.
template <class Op, class Memory, class Table>
MESHCAST_HOST_DEVICE void run_thread(const Op& op, const Memory& memory, const Table& table, uint32_t block,
                                     uint32_t blocks, uint32_t thread) {
  for (uint32_t tile = block; tile < table.tiles; tile += blocks) {
    const int index = box_of_tile(table, tile);
    const BoxCopy& box = table.box[index];
    const auto per_thread = static_cast<uint32_t>(table.per_thread);
    const uint32_t first = (tile - table.first_tile[index]) * (kThreads * per_thread) + thread;
    Place place[kPiecesAhead];             // NOLINT(*-avoid-c-arrays): registers
    typename Op::Held held[kPiecesAhead];  // NOLINT(*-avoid-c-arrays): registers
    MESHCAST_UNROLL
    for (int i = 0; i < kPiecesAhead; ++i) {
      const uint32_t piece = first + static_cast<uint32_t>(i) * kThreads;
      place[i].count = 0;
      if (static_cast<uint32_t>(i) < per_thread && piece < box.pieces) {
        place[i] = locate<Op::kFromBytes, Op::kToBytes, Op::kPiece>(box, piece);
        op.load(memory, box, place[i], &held[i]);
      }
    }
    MESHCAST_UNROLL
    for (int i = 0; i < kPiecesAhead; ++i) {
      if (place[i].count > 0) op.store(memory, box, place[i], held[i]);
    }
  }
}

}  // namespace meshcast::cuda
