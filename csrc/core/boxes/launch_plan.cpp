#include "boxes/launch_plan.h"

#include <algorithm>

namespace meshcast::cuda {
namespace {

struct Loop {
  int64_t extent = 1;
  int64_t from = 0;  // strides in bytes
  int64_t to = 0;
};

// The widest power of two up to 16 that divides all of `bits`, or-ed together.
uint8_t width_of(uint64_t bits) { return static_cast<uint8_t>(uint64_t{1} << std::countr_zero(bits | 16)); }

}  // namespace

CopyNest nest_of(const BoxPair& pair, const Units& units) {
  CopyNest nest;
  nest.from = pair.from.data;
  nest.to = pair.to.data;
  std::array<Loop, kMaxDims> loops;
  int count = 0;
  for (int d = 0; d < pair.from.ndim; ++d) {
    if (pair.from.extent[d] == 0) return nest;
    if (pair.from.extent[d] == 1) continue;
    loops[count++] = {pair.from.extent[d], pair.from.stride[d], pair.to.stride[d]};
  }
  // Sorted by hand: std::stable_sort may allocate.
  const auto outside = [](const Loop& a, const Loop& b) {
    return a.to != b.to ? a.to > b.to : a.from > b.from;
  };
  for (int i = 1; i < count; ++i) {
    for (int j = i; j > 0 && outside(loops[j], loops[j - 1]); --j) std::swap(loops[j], loops[j - 1]);
  }
  // If the units are bytes, an element is a run of its bytes.
  nest.run = pair.from.element_bytes / units.from_bytes;
  while (count > 0 && loops[count - 1].from == nest.run * units.from_bytes &&
         loops[count - 1].to == nest.run * units.to_bytes) {
    nest.run *= loops[--count].extent;
  }
  for (int i = 0; i < count; ++i) {
    const int last = nest.ndim - 1;
    const Loop& loop = loops[i];
    const bool dense = last >= 0 && nest.from_stride[last] == loop.extent * loop.from &&
                       nest.to_stride[last] == loop.extent * loop.to;
    const int at = dense ? last : nest.ndim++;
    nest.extent[at] = dense ? nest.extent[at] * loop.extent : loop.extent;
    nest.from_stride[at] = loop.from;
    nest.to_stride[at] = loop.to;
  }
  return nest;
}

Route route_of(const CopyNest& nest, int64_t most_pitch) {
  if (nest.run == 0) return Route::Nothing;
  if (nest.ndim == 0) return Route::Flat;
  const auto pitch = [&](int64_t stride) { return stride >= nest.run && stride <= most_pitch; };
  const bool rows = nest.ndim == 1 && nest.run >= kPitchedBytes;
  return rows && pitch(nest.from_stride[0]) && pitch(nest.to_stride[0]) ? Route::Pitched : Route::Kernel;
}

int64_t pieces_of(const CopyNest& nest, const Units& units) {
  int64_t pieces = (nest.run + units.piece - 1) / units.piece;
  for (int d = 0; d < nest.ndim; ++d) pieces *= nest.extent[d];
  return pieces;
}

BoxCopy box_copy(const CopyNest& nest, const Units& units) {
  BoxCopy box;
  box.from = nest.from;
  box.to = nest.to;
  box.run = static_cast<uint64_t>(nest.run);
  box.pieces = static_cast<uint32_t>(pieces_of(nest, units));
  box.pieces_per_run = FastDivide(static_cast<uint32_t>((nest.run + units.piece - 1) / units.piece));
  box.ndim = nest.ndim;
  auto from_bits = reinterpret_cast<uint64_t>(nest.from);
  auto to_bits = reinterpret_cast<uint64_t>(nest.to);
  for (int d = 0; d < nest.ndim; ++d) {
    box.extent[d] = FastDivide(static_cast<uint32_t>(nest.extent[d]));
    box.from_stride[d] = nest.from_stride[d];
    box.to_stride[d] = nest.to_stride[d];
    from_bits |= static_cast<uint64_t>(nest.from_stride[d]);
    to_bits |= static_cast<uint64_t>(nest.to_stride[d]);
  }
  box.from_width = width_of(from_bits);
  box.to_width = width_of(to_bits);
  box.tail_width = width_of(from_bits | to_bits | static_cast<uint64_t>(nest.run));
  return box;
}

void halve(const CopyNest& nest, const Units& units, CopyNest* low, CopyNest* high) {
  *low = nest;
  *high = nest;
  if (nest.ndim == 0) {
    low->run = (pieces_of(nest, units) / 2) * units.piece;
    high->run = nest.run - low->run;
    high->from += low->run * units.from_bytes;
    high->to += low->run * units.to_bytes;
    return;
  }
  low->extent[0] = nest.extent[0] / 2;
  high->extent[0] = nest.extent[0] - low->extent[0];
  high->from += low->extent[0] * nest.from_stride[0];
  high->to += low->extent[0] * nest.to_stride[0];
  for (CopyNest* half : {low, high}) {
    if (half->extent[0] > 1) continue;  // a loop of one iteration is dropped
    --half->ndim;
    for (int d = 0; d < half->ndim; ++d) {
      half->extent[d] = half->extent[d + 1];
      half->from_stride[d] = half->from_stride[d + 1];
      half->to_stride[d] = half->to_stride[d + 1];
    }
  }
}

}  // namespace meshcast::cuda
