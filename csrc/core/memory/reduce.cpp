#include "memory/reduce.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "common/error.h"
#include "memory/combined.h"

namespace meshcast {
namespace {

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
    x = divided(x, count);
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
    case ElementType::Complex64: return visit(Complex<float>{});
    case ElementType::Complex128: return visit(Complex<double>{});
    case ElementType::Float8E4m3:
    case ElementType::Float8E5m2:
    case ElementType::None: break;
  }
  throw Error(ErrorKind::Generic, "a reduction of elements of a type that has none was started");
}

}  // namespace

bool can_reduce(ElementType type, ReduceOp op) {
  switch (type) {
    case ElementType::Float8E4m3:
    case ElementType::Float8E5m2:
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
