#pragma once

#include <bit>
#include <cstdint>

#include "common/host_device.h"
#include "common/numbers.h"
#include "memory/block_quantize.h"

// The arithmetic of block-scaled types: scales and codes of single numbers, for the rows of block_quantize.cpp
// and for the kernels of GPUs (boxes/block_ops.h), whose bits are the same because of it. Additions, products
// and divisions are rounded one by one: no fused multiply-add, no approximate division, subnormals are kept.

#if defined(__CUDACC__)
#define MESHCAST_ALWAYS_INLINE __host__ __device__ __forceinline__
#else
#define MESHCAST_ALWAYS_INLINE [[gnu::always_inline]] inline
#endif

namespace meshcast::scaling {

inline constexpr uint32_t kNoSign = 0x7FFFFFFF;
inline constexpr float kLargestE4m3 = 448.0F;
inline constexpr float kLargestE2m1 = 6.0F;
inline constexpr float kLeastE4m3Scale = 0x1p-6F;

MESHCAST_ALWAYS_INLINE float widened(float x) { return x; }
MESHCAST_ALWAYS_INLINE float widened(BFloat16 x) { return to_float(x); }
// to_float(Half) without branches, of which no vectors can be made. A number that is subnormal there is the
// distance to 2^-14: no step is subnormal in float32, which torch.set_flush_denormal() makes a CPU take for
// zero.
MESHCAST_ALWAYS_INLINE float widened(Half x) {
  const uint32_t magnitude = x.bits & 0x7FFFU;
  const uint32_t normal = (magnitude << 13) + (112U << 23);
  const float subnormal = std::bit_cast<float>(normal + (1U << 23)) - 0x1p-14F;
  const uint32_t bits = magnitude < 0x400 ? std::bit_cast<uint32_t>(subnormal) : normal;
  const uint32_t special = magnitude >= 0x7C00 ? numbers::kInfinity : 0;
  return std::bit_cast<float>(bits | special | (x.bits & 0x8000U) << 16);
}

// A magnitude that is at most the largest of a type with kMantissa bits behind the leading one, whose smallest
// normal number is 2^kLeast: the code that it rounds to, in the last 8 bits; the others are not set.
//
// The last bit of the addend is that of the result, so that the addition rounds as wanted. The sum then ends in
// the mantissa, which is 2^kMantissa or more for normal numbers, and thereby counts one of the exponent. What
// is added to it without a shift has to be even, so that ties stay even.
template <int kMantissa, int kLeast>
MESHCAST_ALWAYS_INLINE uint32_t code_of(uint32_t magnitude) {
  constexpr uint32_t kLow = static_cast<uint32_t>(127 + kLeast) << 23;
  constexpr int kShift = 23 - kMantissa;
  constexpr uint32_t kOffset = -(kLow >> kShift) & 0xFF;
  static_assert(kOffset % 2 == 0);
  uint32_t exponent = magnitude & numbers::kInfinity;
  exponent = exponent < kLow ? kLow : exponent;
  const uint32_t addend = exponent + ((static_cast<uint32_t>(kShift) << 23) + kOffset);
  const float sum = std::bit_cast<float>(magnitude) + std::bit_cast<float>(addend);
  return std::bit_cast<uint32_t>(sum) + (exponent >> kShift);
}

// kNans: some may be NaNs.
template <bool kNans>
MESHCAST_ALWAYS_INLINE uint8_t e4m3_of(float x) {
  constexpr uint32_t kMost = 0x43E00000;  // 448
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & kNoSign;
  uint32_t code = code_of<3, -6>(magnitude < kMost ? magnitude : kMost);
  if constexpr (kNans) code = magnitude > numbers::kInfinity ? 0x7F : code;
  return static_cast<uint8_t>(code | (bits >> 24 & 0x80));
}

// NaNs become the largest number.
MESHCAST_ALWAYS_INLINE uint8_t e2m1_of(float x) {
  constexpr uint32_t kMost = 0x40C00000;  // 6
  const auto bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & kNoSign;
  return static_cast<uint8_t>(code_of<1, 0>(magnitude < kMost ? magnitude : kMost) | (bits >> 28 & 8));
}

MESHCAST_ALWAYS_INLINE float at_least(float x, float least) { return x < least ? least : x; }

MESHCAST_ALWAYS_INLINE float fp8_scale(float amax) { return at_least(amax, kLeastAmax) / kLargestE4m3; }

// The biased exponent; 255 is NaN.
MESHCAST_ALWAYS_INLINE uint32_t mx_scale(float amax) {
  const auto bits = std::bit_cast<uint32_t>(amax);
  const uint32_t exponent = bits >> 23;
  const uint32_t scale = exponent < 8 ? 0 : exponent - 8;  // 2^8 is the power of two in 448
  return bits > numbers::kInfinity ? 255 : scale;
}

MESHCAST_ALWAYS_INLINE uint8_t nvfp4_scale(float amax, float tensor_scale) {
  const float scale = at_least(amax / kLargestE2m1 / tensor_scale, kLeastE4m3Scale);
  return e4m3_of<true>(scale);
}

// Never of zero, and of what nvfp4_scale has made: positive, or NaN.
MESHCAST_ALWAYS_INLINE float nvfp4_scale_value(uint8_t code) {
  const uint32_t exponent = code >> 3;
  const float normal = std::bit_cast<float>((exponent + 120) << 23 | (code & 7U) << 20);
  return code == 0x7F ? std::bit_cast<float>(0x7FC00000U) : normal;
}

// M / (448 * 6); see nvfp4_tensor_scale().
MESHCAST_ALWAYS_INLINE float tensor_scale_of(float tensor_amax) {
  return at_least(tensor_amax, kLeastAmax) / (kLargestE4m3 * kLargestE2m1);
}

// By which the values of a block are divided (Fp8E4m3) or multiplied.
template <BlockFormat kFormat>
MESHCAST_ALWAYS_INLINE float factor_of(float amax, float tensor_scale) {
  if constexpr (kFormat == BlockFormat::Fp8E4m3) {
    return fp8_scale(amax);
  } else if constexpr (kFormat == BlockFormat::MxFp8) {
    // Of a power of two, the reciprocal gives the bits of a division.
    const uint32_t scale = mx_scale(amax);
    return 1.0F / std::bit_cast<float>((scale < 1 ? 1 : scale) << 23);
  } else {
    return 1.0F / tensor_scale / nvfp4_scale_value(nvfp4_scale(amax, tensor_scale));
  }
}

template <BlockFormat kFormat>
MESHCAST_ALWAYS_INLINE float by_factor(float x, float factor) {
  return kFormat == BlockFormat::Fp8E4m3 ? x / factor : x * factor;
}

}  // namespace meshcast::scaling
