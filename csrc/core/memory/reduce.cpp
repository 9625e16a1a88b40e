#include "memory/reduce.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <type_traits>

#include "memory/combined.h"

namespace meshcast {
namespace {

// Loads and stores by memcpy, which has no alignment rules and is still vectorised.
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

}  // namespace

void combine(const StridedView& own, std::byte* carried, ElementType type, ReduceOp op) {
  const int64_t nbytes = own.nbytes();
  const auto combine_range = [&](const std::byte* from, int64_t offset, int64_t n) {
    visit_reduced(type, [&](auto element) {
      combine_block<decltype(element)>(op, from, carried + offset, n / static_cast<int64_t>(sizeof(element)));
    });
  };
  if (own.contiguous()) return combine_range(own.data, 0, nbytes);
  // One block at a time through the cache; a block holds whole elements of any size.
  alignas(64) std::array<std::byte, size_t{16} * 1024> block;
  for (int64_t offset = 0; offset < nbytes;) {
    const int64_t n = std::min<int64_t>(static_cast<int64_t>(block.size()), nbytes - offset);
    pack_range(own, offset, n, block.data());
    combine_range(block.data(), offset, n);
    offset += n;
  }
}

void divide(std::byte* carried, int64_t nbytes, ElementType type, int64_t count) {
  visit_reduced(type, [&](auto element) {
    if constexpr (!std::is_same_v<decltype(element), bool>)
      divide_block<decltype(element)>(carried, nbytes / static_cast<int64_t>(sizeof(element)), count);
  });
}

}  // namespace meshcast
