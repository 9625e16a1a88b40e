#pragma once

#include <bit>
#include <cstdint>

#include "common/host_device.h"

// The floating-point formats narrower than float32. Operations compute in float32 and round to nearest, ties to
// even, with the results of torch; the bits of a resulting NaN are not specified.

namespace meshcast {

struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};
// Largest 448, no infinity. Larger values become 448 (torch from 2.13 on, if not before) or NaN (torch 2.11).
template <bool kSaturates>
struct Float8E4m3 {
  uint8_t bits;
};
struct Float8E5m2 {
  uint8_t bits;
};

namespace numbers {

inline constexpr uint32_t kInfinity = 0x7F800000;  // of float32

// The magnitude of a finite float32, given by its bits, as a float of these widths. The caller has to bound it:
// values that are too large yield the bits of infinity and beyond.
template <int kExponentBits, int kMantissaBits>
MESHCAST_HOST_DEVICE inline uint32_t narrowed(uint32_t magnitude) {
  constexpr uint32_t kBias = (1U << (kExponentBits - 1)) - 1;
  constexpr int kShift = 23 - kMantissaBits;
  if (magnitude < (128 - kBias) << 23) {
    // Below the normal range: this addend moves the last kept bit to the last bit of a float32, whose addition
    // then rounds correctly.
    constexpr uint32_t kAddend = (127 + 24 - kBias - kMantissaBits) << 23;
    const float shifted = std::bit_cast<float>(magnitude) + std::bit_cast<float>(kAddend);
    return std::bit_cast<uint32_t>(shifted) - kAddend;
  }
  const uint32_t rounded = magnitude + (1U << (kShift - 1)) - 1 + ((magnitude >> kShift) & 1);
  return (rounded - ((127 - kBias) << 23)) >> kShift;
}

}  // namespace numbers

MESHCAST_HOST_DEVICE inline float to_float(float x) { return x; }

MESHCAST_HOST_DEVICE inline float to_float(BFloat16 x) {
  return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}

MESHCAST_HOST_DEVICE inline float to_float(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t exponent = (x.bits >> 10) & 31;
  const uint32_t mantissa = x.bits & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | numbers::kInfinity | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;  // subnormal: exact
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

MESHCAST_HOST_DEVICE inline float to_float(Float8E5m2 x) {
  return to_float(Half{static_cast<uint16_t>(x.bits << 8)});  // its upper half, bit for bit
}

template <bool kSaturates>
MESHCAST_HOST_DEVICE float to_float(Float8E4m3<kSaturates> x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x80) << 24;
  const uint32_t exponent = (x.bits >> 3) & 15;
  const uint32_t mantissa = x.bits & 7;
  if ((x.bits & 0x7F) == 0x7F) return std::bit_cast<float>(sign | 0x7FF00000);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 120) << 23 | mantissa << 20);
  const float magnitude = static_cast<float>(mantissa) * 0x1p-9F;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

MESHCAST_HOST_DEVICE inline void round_to(float value, float* out) { *out = value; }

MESHCAST_HOST_DEVICE inline void round_to(float value, BFloat16* out) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFF) > numbers::kInfinity) {
    out->bits = 0x7FC0;  // NaN
    return;
  }
  out->bits = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

MESHCAST_HOST_DEVICE inline void round_to(float value, Half* out) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 16) & 0x8000;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  uint32_t narrow = 0x7C00;  // 65520 and above round to infinity
  if (magnitude > numbers::kInfinity) {
    narrow = 0x7E00;  // NaN
  } else if (magnitude < 0x477FF000) {
    narrow = numbers::narrowed<5, 10>(magnitude);
  }
  out->bits = static_cast<uint16_t>(sign | narrow);
}

MESHCAST_HOST_DEVICE inline void round_to(float value, Float8E5m2* out) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  uint32_t narrow = 0x7C;  // 61440 and above round to infinity
  if (magnitude > numbers::kInfinity) {
    narrow = 0x7F;  // NaN
  } else if (magnitude < 0x47700000) {
    narrow = numbers::narrowed<5, 2>(magnitude);
  }
  out->bits = static_cast<uint8_t>(sign | narrow);
}

template <bool kSaturates>
MESHCAST_HOST_DEVICE void round_to(float value, Float8E4m3<kSaturates>* out) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  uint32_t narrow = 0x7F;  // NaN
  if (magnitude <= 0x43E80000) {
    narrow = numbers::narrowed<4, 3>(magnitude);  // up to 464, which rounds to 448
  } else if (kSaturates && magnitude <= numbers::kInfinity) {
    narrow = 0x7E;
  }
  out->bits = static_cast<uint8_t>(sign | narrow);
}

}  // namespace meshcast
