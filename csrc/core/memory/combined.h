#pragma once

#include <cstdint>
#include <type_traits>

#include "common/host_device.h"
#include "common/numbers.h"
#include "layout/layout.h"
#include "memory/element_type.h"

// One step of a reduction, shared by the CPU and the kernels, so that both give the same bits.

namespace meshcast {

template <typename T>
constexpr bool is_small_float = std::is_same_v<T, BFloat16> || std::is_same_v<T, Half>;
template <typename T>
constexpr bool is_complex = std::is_same_v<T, Complex<float>> || std::is_same_v<T, Complex<double>>;

template <typename T>
MESHCAST_HOST_DEVICE bool is_nan(T x) {
  if constexpr (std::is_floating_point_v<T>) return x != x;
  return false;
}

// Avg adds; its end is divided().
template <ReduceOp kOp, typename T>
MESHCAST_HOST_DEVICE T combined(T a, T b) {
  constexpr bool kAdds = kOp == ReduceOp::Sum || kOp == ReduceOp::Avg;
  if constexpr (is_small_float<T>) {
    T out;
    round_to(combined<kOp>(to_float(a), to_float(b)), &out);
    return out;
  } else if constexpr (std::is_same_v<T, bool>) {
    return kAdds || kOp == ReduceOp::Max ? a || b : a && b;
  } else if constexpr (is_complex<T>) {
    if constexpr (kAdds) {
      return T{a.re + b.re, a.im + b.im};
    } else if constexpr (kOp == ReduceOp::Product) {
      return T{a.re * b.re - a.im * b.im, a.re * b.im + a.im * b.re};
    } else {
      return a;  // refused by can_reduce
    }
  } else if constexpr (kAdds || kOp == ReduceOp::Product) {
    // Integers wrap around, which is defined for unsigned ones only; 64 bits, since narrow ones are promoted to
    // int. Only the low bits are kept, so the high ones do not matter.
    if constexpr (std::is_integral_v<T>) {
      const auto x = uint64_t{static_cast<std::make_unsigned_t<T>>(a)};
      const auto y = uint64_t{static_cast<std::make_unsigned_t<T>>(b)};
      return static_cast<T>(kAdds ? x + y : x * y);
    } else {
      return kAdds ? a + b : a * b;
    }
  } else if constexpr (kOp == ReduceOp::Min) {
    return a < b || is_nan(a) ? a : b;
  } else {
    return a > b || is_nan(a) ? a : b;
  }
}

// The last step of an average of `count` values. Integers round towards zero; truth values have no mean.
template <typename T>
MESHCAST_HOST_DEVICE T divided(T x, int64_t count) {
  if constexpr (is_small_float<T>) {
    T out;
    round_to(to_float(x) / static_cast<float>(count), &out);
    return out;
  } else if constexpr (std::is_same_v<T, bool>) {
    return x;
  } else if constexpr (std::is_integral_v<T>) {
    return static_cast<T>(static_cast<int64_t>(x) / count);
  } else if constexpr (is_complex<T>) {
    const auto n = static_cast<decltype(x.re)>(count);
    return T{x.re / n, x.im / n};
  } else {
    return x / static_cast<T>(count);
  }
}

}  // namespace meshcast
