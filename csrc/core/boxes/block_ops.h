#pragma once

#include "boxes/piece.h"
#include "common/host_device.h"
#include "memory/block_quantize.h"
#include "memory/block_scale.h"

// What threads of a GPU do to quantise a box by blocks. The arithmetic, and so the bits, are those of
// block_amax() and block_values() on the CPU; only signs of values that are made of NaNs may differ.

namespace meshcast::cuda {

inline constexpr int kLanes = 32;  // of a warp, whose threads look at one block together
inline constexpr int kRun = 8;     // the most values of a row that a thread makes

// How blocks are shared among warps: several take turns at the rows of one block, where blocks are few.
struct AmaxShare {
  int64_t blocks = 0;
  int64_t warps_per_block = 1;
};

inline constexpr int64_t kManyWarps = 16384;  // with so many there is work for all of a GPU

inline AmaxShare amax_share(const BlockedView& box) {
  AmaxShare share;
  share.blocks = box.view.nbytes() == 0 ? 0 : box.num_blocks();
  int64_t rows = 1;  // that a block has at most, of this box
  for (int d = 0; d < box.view.ndim - 1; ++d)
    rows *= box.block[d] < box.view.extent[d] ? box.block[d] : box.view.extent[d];
  if (share.blocks > 0 && share.blocks < kManyWarps) {
    const int64_t most = kManyWarps / share.blocks;
    share.warps_per_block = rows < most ? rows : most;
  }
  return share;
}

template <typename T>
struct WordOf {
  using Type = uint16_t;
};
template <>
struct WordOf<float> {
  using Type = uint32_t;
};

template <typename T, class Memory>
MESHCAST_HOST_DEVICE float number_at(const Memory& memory, const std::byte* from) {
  return scaling::widened(std::bit_cast<T>(memory.template load<typename WordOf<T>::Type>(from)));
}

// The largest magnitude, as bits, of those elements of a block that one lane of one of its warps looks at. It
// takes every kLanes-th element of every warps-th row.
template <typename T, class Memory>
MESHCAST_HOST_DEVICE uint32_t lane_amax(const Memory& memory, const BlockedView& box, int64_t block,
                                        int64_t warp, int64_t warps, int lane) {
  const int last = box.view.ndim - 1;
  const std::byte* from = box.view.data;
  int64_t size[kMaxDims];  // NOLINT(*-avoid-c-arrays): local to a thread
  int64_t rows = 1;
  for (int d = last; d >= 0; --d) {
    const int64_t count = box.num_blocks(d);
    const int64_t begin = (box.first_block(d) + block % count) * box.block[d] - box.low[d];
    block /= count;
    const int64_t first = begin < 0 ? 0 : begin;
    const int64_t end = begin + box.block[d];
    size[d] = (end < box.view.extent[d] ? end : box.view.extent[d]) - first;
    from += first * box.view.stride[d];
    if (d < last) rows *= size[d];
  }
  uint32_t most = 0;
  for (int64_t row = warp; row < rows; row += warps) {
    const std::byte* at = from;
    int64_t rest = row;
    for (int d = last - 1; d >= 0; --d) {
      at += rest % size[d] * box.view.stride[d];
      rest /= size[d];
    }
    for (int64_t i = lane; i < size[last]; i += kLanes) {
      const float x = number_at<T>(memory, at + i * box.view.stride[last]);
      const uint32_t magnitude = std::bit_cast<uint32_t>(x) & scaling::kNoSign;
      most = most < magnitude ? magnitude : most;
    }
  }
  return most;
}

// Runs of at most kRun values, each of which ends with its row.
MESHCAST_HOST_DEVICE inline int64_t runs_of_row(const BlockedView& box) {
  return (box.view.extent[box.view.ndim - 1] + kRun - 1) / kRun;
}

inline int64_t num_runs(const BlockedView& box) {
  if (box.view.nbytes() == 0) return 0;
  int64_t rows = 1;
  for (int d = 0; d < box.view.ndim - 1; ++d) rows *= box.view.extent[d];
  return rows * runs_of_row(box);
}

// Makes the values of one run, row-major among those of the box. amax: of the blocks that the box touches.
template <BlockFormat kFormat, typename T, class Memory>
MESHCAST_HOST_DEVICE void make_run(const Memory& memory, const BlockedView& box, const float* amax,
                                   float tensor_scale, int64_t run, std::byte* values) {
  const int last = box.view.ndim - 1;
  const int64_t row_size = box.view.extent[last];
  const int64_t runs = runs_of_row(box);
  const int64_t row = run / runs;
  const int64_t first = (run - row * runs) * kRun;
  const int64_t n = row_size - first < kRun ? row_size - first : kRun;
  const std::byte* from = box.view.data + first * box.view.stride[last];
  int64_t rest = row;
  int64_t blocks = 0;  // number of the row's first block
  int64_t weight = box.num_blocks(last);
  for (int d = last - 1; d >= 0; --d) {
    const int64_t index = rest % box.view.extent[d];
    rest /= box.view.extent[d];
    from += index * box.view.stride[d];
    blocks += ((box.low[d] + index) / box.block[d] - box.first_block(d)) * weight;
    weight *= box.num_blocks(d);
  }
  // The block of an element, and how many elements it has from there on.
  int64_t block = (box.low[last] + first) / box.block[last];
  int64_t left = (block + 1) * box.block[last] - box.low[last] - first;
  block += blocks - box.first_block(last);
  float factor = scaling::factor_of<kFormat>(amax[block], tensor_scale);
  std::byte* to = values + (row * row_size + first) / (kFormat == BlockFormat::NvFp4 ? 2 : 1);
  uint8_t low_half = 0;
  for (int64_t i = 0; i < n; ++i) {
    if (left == 0) {
      factor = scaling::factor_of<kFormat>(amax[++block], tensor_scale);
      left = box.block[last];
    }
    --left;
    const float x = number_at<T>(memory, from + i * box.view.stride[last]);
    const float scaled = scaling::by_factor<kFormat>(x, factor);
    if constexpr (kFormat == BlockFormat::NvFp4) {
      const uint8_t code = scaling::e2m1_of(scaled);
      if (i % 2 != 0) memory.template store<uint8_t>(to + i / 2, static_cast<uint8_t>(low_half | code << 4));
      low_half = code;
    } else {
      memory.template store<uint8_t>(to + i, scaling::e4m3_of<true>(scaled));
    }
  }
}

// Calls visit with a value of the C++ type of elements that can be quantised; throws for all others.
template <typename Visit>
void visit_quantized(ElementType type, const Visit& visit) {
  switch (type) {
    case ElementType::Float32: return visit(float{});
    case ElementType::Float16: return visit(Half{});
    case ElementType::BFloat16: return visit(BFloat16{});
    default: throw Error(ErrorKind::Generic, "only float32, float16 and bfloat16 are quantised by blocks");
  }
}

}  // namespace meshcast::cuda
