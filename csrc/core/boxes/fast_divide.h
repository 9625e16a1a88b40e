#pragma once

#include <bit>
#include <cstdint>

#include "common/host_device.h"

namespace meshcast::cuda {

// Division by a number that the host knows: a multiplication and a shift on the device, which divides slowly.
// For dividends below 2^31 (Granlund and Montgomery, "Division by Invariant Integers using Multiplication",
// 1994, figure 4.1).
struct FastDivide {
  uint32_t divisor = 1;
  uint32_t multiplier = 1;
  uint32_t shift = 0;

  FastDivide() = default;

  // `by` is from 1 to 2^31.
  explicit FastDivide(uint32_t by) : divisor(by), shift(static_cast<uint32_t>(std::bit_width(by - 1))) {
    multiplier = static_cast<uint32_t>((uint64_t{1} << 32) * ((uint64_t{1} << shift) - by) / by + 1);
  }

  MESHCAST_HOST_DEVICE uint32_t quotient(uint32_t n) const {
    const auto high = static_cast<uint32_t>(uint64_t{n} * multiplier >> 32);
    return (high + n) >> shift;  // no overflow: both are below 2^31
  }
};

}  // namespace meshcast::cuda
