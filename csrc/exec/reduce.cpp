#include "exec/reduce.h"

#include <algorithm>
#include <array>
#include <bit>
#include <complex>
#include <cstring>
#include <type_traits>

#include "common/error.h"

namespace meshcast {
namespace {

// bfloat16 and IEEE half, computed with in float32 and rounded to nearest even, as torch does.
struct BFloat16 {
  uint16_t bits;
};
struct Half {
  uint16_t bits;
};

float to_float(BFloat16 x) { return std::bit_cast<float>(static_cast<uint32_t>(x.bits) << 16); }

void round_to(float value, BFloat16* out) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) {
    out->bits = 0x7FC0;  // NaN
    return;
  }
  out->bits = static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

float to_float(Half x) {
  const uint32_t sign = static_cast<uint32_t>(x.bits & 0x8000) << 16;
  const uint32_t exponent = (x.bits >> 10) & 31;
  const uint32_t mantissa = x.bits & 1023;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000 | mantissa << 13);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24F;  // subnormal: exact
  return sign ? -magnitude : magnitude;
}

void round_to(float value, Half* out) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) {
    out->bits = sign | 0x7E00;  // NaN
  } else if (magnitude >= 0x477FF000) {
    out->bits = sign | 0x7C00;  // 65520 and above round to infinity
  } else if (magnitude < 0x38800000) {
    // Below the normal range: adding a half brings the last bit kept to the last bit of a float32, whose
    // addition rounds as wanted.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5F;
    out->bits = static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000));
  } else {
    const uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1);
    out->bits = static_cast<uint16_t>(sign | ((rounded - 0x38000000) >> 13));
  }
}

template <typename T>
constexpr bool is_small_float = std::is_same_v<T, BFloat16> || std::is_same_v<T, Half>;
template <typename T>
constexpr bool is_complex = std::is_same_v<T, std::complex<float>> || std::is_same_v<T, std::complex<double>>;

template <typename T>
bool is_nan(T x) {
  if constexpr (std::is_floating_point_v<T>) return x != x;
  return false;
}

template <ReduceOp kOp, typename T>
T combined(T a, T b) {
  if constexpr (is_small_float<T>) {
    T out;
    round_to(combined<kOp>(to_float(a), to_float(b)), &out);
    return out;
  } else if constexpr (std::is_same_v<T, bool>) {
    return kOp == ReduceOp::Sum || kOp == ReduceOp::Max ? a || b : a && b;
  } else if constexpr (kOp == ReduceOp::Sum || kOp == ReduceOp::Product) {
    // Integers wrap around, which only unsigned ones may; wide ones, since narrow ones become int. Only the low
    // bits are kept, so how the high ones are filled does not matter.
    if constexpr (std::is_integral_v<T>) {
      const auto x = uint64_t{static_cast<std::make_unsigned_t<T>>(a)};
      const auto y = uint64_t{static_cast<std::make_unsigned_t<T>>(b)};
      return static_cast<T>(kOp == ReduceOp::Sum ? x + y : x * y);
    } else {
      return kOp == ReduceOp::Sum ? a + b : a * b;
    }
  } else if constexpr (is_complex<T>) {
    return a;  // refused by can_reduce
  } else if constexpr (kOp == ReduceOp::Min) {
    return a < b || is_nan(a) ? a : b;
  } else {
    return a > b || is_nan(a) ? a : b;
  }
}

// Loads and stores by memcpy: free of alignment rules, and vectorised all the same.
template <ReduceOp kOp, typename T>
void combine_block(const std::byte* own, std::byte* carried, int64_t n) {
  constexpr auto kSize = static_cast<int64_t>(sizeof(T));
  for (int64_t i = 0; i < n; ++i) {
    T a;
    T b;
    std::memcpy(&a, own + i * kSize, sizeof(T));
    std::memcpy(&b, carried + i * kSize, sizeof(T));
    const T c = combined<kOp>(a, b);
    std::memcpy(carried + i * kSize, &c, sizeof(T));
  }
}

template <typename T>
void combine_block(ReduceOp op, const std::byte* own, std::byte* carried, int64_t n) {
  switch (op) {
    case ReduceOp::Sum:
    case ReduceOp::Avg: return combine_block<ReduceOp::Sum, T>(own, carried, n);
    case ReduceOp::Min: return combine_block<ReduceOp::Min, T>(own, carried, n);
    case ReduceOp::Max: return combine_block<ReduceOp::Max, T>(own, carried, n);
    case ReduceOp::Product: return combine_block<ReduceOp::Product, T>(own, carried, n);
    case ReduceOp::None: break;
  }
}

template <typename T>
void divide_block(std::byte* carried, int64_t n, int64_t count) {
  for (int64_t i = 0; i < n; ++i) {
    std::byte* at = carried + i * static_cast<int64_t>(sizeof(T));
    T x;
    std::memcpy(&x, at, sizeof(T));
    if constexpr (is_small_float<T>) {
      round_to(to_float(x) / static_cast<float>(count), &x);
    } else if constexpr (std::is_integral_v<T>) {
      x = static_cast<T>(static_cast<int64_t>(x) / count);
    } else if constexpr (is_complex<T>) {
      x /= static_cast<typename T::value_type>(count);
    } else {
      x /= static_cast<T>(count);
    }
    std::memcpy(at, &x, sizeof(T));
  }
}

// Calls visit with a value of the C++ type.
template <typename Visit>
void with_type(ElementType type, const Visit& visit) {
  switch (type) {
    case ElementType::Float64: return visit(double{});
    case ElementType::Float32: return visit(float{});
    case ElementType::Float16: return visit(Half{});
    case ElementType::BFloat16: return visit(BFloat16{});
    case ElementType::Int64: return visit(int64_t{});
    case ElementType::Int32: return visit(int32_t{});
    case ElementType::Int16: return visit(int16_t{});
    case ElementType::Int8: return visit(int8_t{});
    case ElementType::UInt8: return visit(uint8_t{});
    case ElementType::Bool: return visit(bool{});
    case ElementType::Complex64: return visit(std::complex<float>{});
    case ElementType::Complex128: return visit(std::complex<double>{});
    case ElementType::None: break;
  }
  throw Error(ErrorKind::Generic, "a reduction of elements of an unknown type was started");
}

}  // namespace

bool can_reduce(ElementType type, ReduceOp op) {
  switch (type) {
    case ElementType::None: return false;
    case ElementType::Bool: return op != ReduceOp::Avg;
    case ElementType::Complex64:
    case ElementType::Complex128: return op != ReduceOp::Min && op != ReduceOp::Max;
    default: return true;
  }
}

void combine(const StridedView& own, std::byte* carried, ElementType type, ReduceOp op) {
  const int64_t nbytes = own.nbytes();
  const auto combine_range = [&](const std::byte* from, int64_t offset, int64_t n) {
    with_type(type, [&](auto element) {
      combine_block<decltype(element)>(op, from, carried + offset, n / static_cast<int64_t>(sizeof(element)));
    });
  };
  if (own.contiguous()) return combine_range(own.data, 0, nbytes);
  // A block at a time through the cache; blocks hold whole elements of any size.
  alignas(64) std::array<std::byte, size_t{16} * 1024> block;
  for (int64_t offset = 0; offset < nbytes;) {
    const int64_t n = std::min<int64_t>(static_cast<int64_t>(block.size()), nbytes - offset);
    pack_range(own, offset, n, block.data());
    combine_range(block.data(), offset, n);
    offset += n;
  }
}

void divide(std::byte* carried, int64_t nbytes, ElementType type, int64_t count) {
  with_type(type, [&](auto element) {
    if constexpr (!std::is_same_v<decltype(element), bool>)
      divide_block<decltype(element)>(carried, nbytes / static_cast<int64_t>(sizeof(element)), count);
  });
}

}  // namespace meshcast
