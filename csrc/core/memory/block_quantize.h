#pragma once

#include <array>
#include <cstdint>

#include "common/host_device.h"
#include "memory/element_type.h"
#include "memory/strided.h"

// Values that are scaled by blocks on the way to a type of 8 or 4 bits. First comes the largest magnitude of
// each block that a part of a tensor touches. Parts that share a block agree on it (the largest counts), and
// each part is then quantised by itself, with the bits that the whole tensor would get.

namespace meshcast {

// A value x of a block whose largest magnitude is m. All arithmetic is in float32, rounded to nearest, ties to
// even. Magnitudes beyond the largest of a type become that.
enum class BlockFormat : uint8_t {
  // Values float8_e4m3fn: x / scale; scales float32: max(m, 1e-12) / 448. torchao 0.18, quant_primitives.py,
  // _choose_scale_float8 with hp_value_lb=1e-12 and _quantize_affine_float8, of the tensor in float32.
  Fp8E4m3,
  // Values float8_e4m3fn: x / max(scale, 2^-126); scales float8_e8m0fnu: the power of two in m / 2^8, at least
  // 2^-127. torchao 0.18, mx_tensor.py, to_mx with ScaleCalculationMode.FLOOR.
  MxFp8,
  // Values float4_e2m1, the first of two in the low half of a byte: x * (1 / tensor_scale / scale).
  // tensor_scale, float32, is M / (448 * 6), where M >= 1e-12 is the largest magnitude of the tensor. Scales
  // float8_e4m3fn: m / 6 / tensor_scale, at least 2^-6. torchao 0.18, nvfp4_tensor.py, nvfp4_quantize with
  // per_tensor_amax_to_scale.
  NvFp4,
};

// Below this no scale is made of a magnitude: those of zeros stay finite.
inline constexpr float kLeastAmax = 1e-12F;

// A box of a tensor that is cut into blocks. The strides of the view may be any; its type is Float32, Float16
// or BFloat16. An element of `low` is where the box begins in the tensor.
struct BlockedView {
  StridedView view;
  ElementType type = ElementType::None;
  std::array<int64_t, kMaxDims> low{};
  std::array<int64_t, kMaxDims> block{};

  // Along a dimension, those that the box touches.
  MESHCAST_HOST_DEVICE int64_t first_block(int d) const { return low[d] / block[d]; }
  MESHCAST_HOST_DEVICE int64_t num_blocks(int d) const {
    return view.extent[d] == 0 ? 0 : (low[d] + view.extent[d] - 1) / block[d] + 1 - first_block(d);
  }
  int64_t num_blocks() const;
};

// The largest magnitude of each block that the box touches, among the elements of the box: row-major, one
// float32 a block. NaN where one of them is a NaN.
void block_amax(const BlockedView& box, float* amax);

// The scale of each of n blocks, 4 bytes (Fp8E4m3) or 1. tensor_amax: NvFp4 alone asks for it.
void block_scales(BlockFormat format, const float* amax, int64_t n, float tensor_amax, std::byte* scales);

// The values of the box, row-major without gaps. Of NvFp4, the box has an even number of elements in its last
// dimension, and begins at an even one.
void block_values(BlockFormat format, const BlockedView& box, const float* amax, float tensor_amax,
                  std::byte* values);

// M / (448 * 6), as above.
float nvfp4_tensor_scale(float tensor_amax);

}  // namespace meshcast
