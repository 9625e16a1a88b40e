#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "boxes/box_table.h"
#include "memory/strided.h"

// From boxes to launches: the part of a launch that runs on the host before any kernel does. Nothing here uses
// the CUDA runtime or allocates memory.

namespace meshcast::cuda {

// Two views of equal extents that do not overlap in memory. Their elements have one size, except in a cast.
struct BoxPair {
  StridedView from;
  StridedView to;
};

// The size of the smallest unit that is moved, on either side, in bytes, and the number of units of a full
// piece.
struct Units {
  int from_bytes = 1;
  int to_bytes = 1;
  int piece = 16;
};

// A pair with the dimensions that are dense on both sides merged away and the others in the order of the
// destination's memory: loops, outermost first, around runs.
struct CopyNest {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  int64_t run = 0;  // contiguous units; 0 if the box is empty
  int ndim = 0;
  std::array<int64_t, kMaxDims> extent{};
  std::array<int64_t, kMaxDims> from_stride{};
  std::array<int64_t, kMaxDims> to_stride{};
};

// The units are bytes (elements of any size move as bytes) or whole elements.
CopyNest nest_of(const BoxPair& pair, const Units& units);

inline constexpr int64_t kMostPitch = (int64_t{1} << 31) - 1;  // of every GPU so far

// The best way to move the bytes of a nest (of bytes). A single run is a plain copy, wide rows at even
// distances are one call of the copy engine, the rest needs a kernel.
// most_pitch: largest distance of rows that the copy engine of the GPU takes.
enum class Route : uint8_t { Nothing, Flat, Pitched, Kernel };
Route route_of(const CopyNest& nest, int64_t most_pitch = kMostPitch);

// Rows below this are moved by the kernel, whose accesses are as wide; the value is a guess until measured.
inline constexpr int64_t kPitchedBytes = 4096;

inline constexpr int64_t kMostPieces = (int64_t{1} << 31) - 1;  // of one BoxCopy, see FastDivide

// The nest as one kernel entry. It must have at most kMostPieces pieces.
BoxCopy box_copy(const CopyNest& nest, const Units& units);

int64_t pieces_of(const CopyNest& nest, const Units& units);

// Halves a nest of more than one piece across its outermost loop, or across its run if it has no loop.
void halve(const CopyNest& nest, const Units& units, CopyNest* low, CopyNest* high);

// Passes the kernel entries of a nest to `visit`: one, or several if it has more pieces than `most` allows.
template <class Visit>
void visit_copies(const CopyNest& nest, const Units& units, int64_t most, const Visit& visit) {
  if (nest.run == 0) return;
  if (pieces_of(nest, units) <= most) return visit(box_copy(nest, units));
  CopyNest low;
  CopyNest high;
  halve(nest, units, &low, &high);
  visit_copies(low, units, most, visit);
  visit_copies(high, units, most, visit);
}

// Tests lower these to reach cases that otherwise only huge boxes reach.
struct Limits {
  int64_t most_pieces = kMostPieces;
  // From here on a thread moves several pieces: there are enough blocks to fill a large GPU twice.
  int64_t many_pieces = int64_t{2048} * kThreads * kPiecesAhead;
};

// Numbers the tiles of a table whose boxes are filled in.
template <class Table>
void finish(Table* table, const Limits& limits) {
  int64_t pieces = 0;
  for (int i = 0; i < table->count; ++i) pieces += table->box[i].pieces;
  table->per_thread = pieces >= limits.many_pieces ? kPiecesAhead : 1;
  const auto per_tile = static_cast<uint32_t>(kThreads * table->per_thread);
  table->tiles = 0;
  for (int i = 0; i < table->count; ++i) {
    table->first_tile[i] = table->tiles;
    table->tiles += (table->box[i].pieces - 1) / per_tile + 1;
  }
}

// Puts the nests of all pairs that `takes` accepts into as few tables as can hold them, and passes each
// finished table to `launch`. `table` is the memory in which they are built.
template <class Table, class Takes, class Launch>
void fill_tables(std::span<const BoxPair> pairs, const Units& units, Table* table, const Takes& takes,
                 const Launch& launch, const Limits& limits = {}) {
  table->count = 0;
  const auto flush = [&] {
    if (table->count == 0) return;
    finish(table, limits);
    launch(*table);
    table->count = 0;
  };
  for (const BoxPair& pair : pairs) {
    const CopyNest nest = nest_of(pair, units);
    if (nest.run == 0 || !takes(nest)) continue;
    visit_copies(nest, units, limits.most_pieces, [&](const BoxCopy& box) {
      if (table->count == Table::kCapacity) flush();
      table->box[table->count++] = box;
    });
  }
  flush();
}

}  // namespace meshcast::cuda
