#pragma once

#include <cstddef>
#include <cstdint>

#include "boxes/fast_divide.h"
#include "common/host_device.h"
#include "layout/box.h"

namespace meshcast::cuda {

// The copy of one box from a strided region to another, as a kernel sees it: loops around runs. A run is the
// elements that are contiguous in both regions, and is cut into pieces; a thread moves whole pieces, and the
// pieces of a box are numbered in the order of the destination's memory, so that neighbouring threads write
// neighbouring bytes. Made by visit_copies (launch_plan.h).
struct BoxCopy {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  uint64_t run = 0;               // elements
  uint32_t pieces = 0;            // in all runs together; below 2^31
  FastDivide pieces_per_run;      // all pieces of a run except the last have the full size
  int ndim = 0;                   // loops, outermost first
  FastDivide extent[kMaxDims];    // NOLINT(*-avoid-c-arrays): a kernel parameter
  int64_t from_stride[kMaxDims];  // bytes
  int64_t to_stride[kMaxDims];
  // from, to: the widest access, a power of two up to 16, that is aligned for every run. tail: the widest that
  // also divides the length of a run, on both sides; for pieces that are not full.
  uint8_t from_width = 1;
  uint8_t to_width = 1;
  uint8_t tail_width = 1;
};

struct Place {
  const std::byte* from = nullptr;
  std::byte* to = nullptr;
  uint32_t count = 0;  // elements
};

// The memory of piece number `piece`; kFromBytes and kToBytes are the sizes of an element on either side.
template <int kFromBytes, int kToBytes, int kPiece>
MESHCAST_HOST_DEVICE Place locate(const BoxCopy& box, uint32_t piece) {
  uint32_t row = box.pieces_per_run.quotient(piece);
  const uint64_t first = uint64_t{piece - row * box.pieces_per_run.divisor} * kPiece;
  int64_t from = static_cast<int64_t>(first) * kFromBytes;
  int64_t to = static_cast<int64_t>(first) * kToBytes;
  for (int d = box.ndim - 1; d > 0; --d) {
    const uint32_t outer = box.extent[d].quotient(row);
    const int64_t index = row - outer * box.extent[d].divisor;
    from += index * box.from_stride[d];
    to += index * box.to_stride[d];
    row = outer;
  }
  if (box.ndim > 0) {  // the rest is the index of the outermost loop
    from += row * box.from_stride[0];
    to += row * box.to_stride[0];
  }
  const uint64_t left = box.run - first;
  return {box.from + from, box.to + to, left < kPiece ? static_cast<uint32_t>(left) : uint32_t{kPiece}};
}

}  // namespace meshcast::cuda
