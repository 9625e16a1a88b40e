#include "memory/block_quantize.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <type_traits>

#include "common/error.h"
#include "common/numbers.h"
#include "memory/block_scale.h"

namespace meshcast {
namespace {

using namespace scaling;

constexpr int64_t kRowPart = 1024;  // elements of a row at a time: they, and what is made of them, stay near
// Of a tensor whose rows do not lie so in memory, as one that is turned: a tile that fits in a core's first
// cache.
constexpr int64_t kTurnedPart = 256;
constexpr int64_t kTurnedRows = 32;
constexpr int64_t kRowAhead = 2048;  // bytes

// Magnitudes as integers, whose order is that of the values; a NaN is the largest.
template <typename T>
struct Magnitude;
template <>
struct Magnitude<float> {
  using Type = uint32_t;
  static constexpr Type kMask = 0x7FFFFFFF;
};
template <>
struct Magnitude<BFloat16> {
  using Type = uint16_t;
  static constexpr Type kMask = 0x7FFF;
};
template <>
struct Magnitude<Half> : Magnitude<BFloat16> {};

template <typename T>
[[gnu::always_inline]] inline typename Magnitude<T>::Type largest_of(const T* __restrict from, int64_t n) {
  using Type = typename Magnitude<T>::Type;
  Type most = 0;
  for (int64_t i = 0; i < n; ++i) {
    Type bits;
    std::memcpy(&bits, from + i, sizeof(Type));
    bits = static_cast<Type>(bits & Magnitude<T>::kMask);
    most = most < bits ? bits : most;
  }
  return most;
}

template <BlockFormat kFormat>
[[gnu::always_inline]] inline void factors_of(const float* amax, int64_t n, float tensor_scale,
                                              float* factors) {
  for (int64_t i = 0; i < n; ++i) factors[i] = factor_of<kFormat>(amax[i], tensor_scale);
}

template <typename T>
[[gnu::always_inline]] inline void widen(const T* __restrict from, int64_t n, float* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[i] = widened(from[i]);
}

// n elements of one block.
template <BlockFormat kFormat, typename T>
[[gnu::always_inline]] inline void scale_block(const T* __restrict from, int64_t n, float factor,
                                               float* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[i] = by_factor<kFormat>(widened(from[i]), factor);
}

template <bool kNans>
[[gnu::always_inline]] inline void to_e4m3(const float* __restrict scaled, int64_t n, uint8_t* __restrict to) {
  for (int64_t i = 0; i < n; ++i) to[i] = e4m3_of<kNans>(scaled[i]);
}

// codes: room for n of them, each in a byte.
[[gnu::always_inline]] inline void to_e2m1(const float* __restrict scaled, int64_t n, uint8_t* __restrict codes,
                                           uint8_t* __restrict to) {
  for (int64_t i = 0; i < n; ++i) codes[i] = e2m1_of(scaled[i]);
  for (int64_t i = 0; i < n / 2; ++i) to[i] = static_cast<uint8_t>(codes[2 * i] | codes[2 * i + 1] << 4);
}

// Visits the blocks that n elements of a row touch, of which the first lies `at` elements into its block. A
// number of elements that the compiler knows gives better vectors.
template <typename Visit>
[[gnu::always_inline]] inline void each_block(int64_t n, int64_t at, int64_t block, const Visit& visit) {
  int64_t begin = 0;
  int64_t index = 0;
  const auto some = [&](int64_t count) __attribute__((always_inline)) {
    visit(begin, count, index++);
    begin += count;
  };
  if (at != 0) some(std::min(n, block - at));
  const auto whole = [&](auto size) __attribute__((always_inline)) {
    for (; begin + size() <= n; begin += size(), ++index) visit(begin, size(), index);
  };
  if (block == 16) {
    whole([] { return int64_t{16}; });
  } else if (block == 32) {
    whole([] { return int64_t{32}; });
  } else if (block == 128) {
    whole([] { return int64_t{128}; });
  } else {
    whole([&] { return block; });
  }
  if (begin < n) some(n - begin);
}

template <typename T>
[[gnu::always_inline]] inline void amax_of_row(const std::byte* from, int64_t n, int64_t at, int64_t block,
                                               bool once, float* amax) {
  each_block(
      n, at, block, [&](int64_t begin, int64_t count, int64_t index) __attribute__((always_inline)) {
        const T* first = reinterpret_cast<const T*>(from) + begin;
        __builtin_prefetch(reinterpret_cast<const std::byte*>(first) + kRowAhead);
        const auto most = largest_of(first, count);
        T value;
        std::memcpy(&value, &most, sizeof(T));
        const auto found = std::bit_cast<uint32_t>(widened(value));
        const uint32_t before = once ? 0 : std::bit_cast<uint32_t>(amax[index]);
        amax[index] = std::bit_cast<float>(before < found ? found : before);
      });
}

template <BlockFormat kFormat, typename T>
[[gnu::always_inline]] inline void values_of_row(const std::byte* from, int64_t n, int64_t at, int64_t block,
                                                 const float* amax, float tensor_scale, std::byte* to) {
  alignas(64) std::array<float, kRowPart> factors;  // a block has one element or more
  alignas(64) std::array<float, kRowPart> scaled;
  alignas(64) std::array<uint8_t, kRowPart> codes;
  const int64_t blocks = (at + n - 1) / block + 1;
  factors_of<kFormat>(amax, blocks, tensor_scale, factors.data());
  const auto scale_all = [&](const auto* values) __attribute__((always_inline)) {
    each_block(
        n, at, block, [&](int64_t begin, int64_t count, int64_t index) __attribute__((always_inline)) {
          __builtin_prefetch(from + begin * int64_t{sizeof(T)} + kRowAhead);
          scale_block<kFormat>(values + begin, count, factors[index], scaled.data() + begin);
        });
  };
  // Of small blocks the compiler makes vectors only where they are float32 already.
  if (sizeof(T) < sizeof(float) && block <= 16) {
    alignas(64) std::array<float, kRowPart> wide;
    widen(reinterpret_cast<const T*>(from), n, wide.data());
    scale_all(wide.data());
  } else {
    scale_all(reinterpret_cast<const T*>(from));
  }
  auto* out = reinterpret_cast<uint8_t*>(to);
  if constexpr (kFormat == BlockFormat::NvFp4) {
    to_e2m1(scaled.data(), n, codes.data(), out);
  } else if (largest_of(amax, blocks) < numbers::kInfinity) {
    to_e4m3<false>(scaled.data(), n, out);
  } else {
    to_e4m3<true>(scaled.data(), n, out);
  }
}

template <BlockFormat kFormat>
[[gnu::always_inline]] inline void scales_of(const float* amax, int64_t n, float tensor_scale, std::byte* to) {
  for (int64_t i = 0; i < n; ++i) {
    if constexpr (kFormat == BlockFormat::Fp8E4m3) {
      const float scale = fp8_scale(amax[i]);
      std::memcpy(to + i * int64_t{sizeof(float)}, &scale, sizeof(float));
    } else if constexpr (kFormat == BlockFormat::MxFp8) {
      to[i] = static_cast<std::byte>(mx_scale(amax[i]));
    } else {
      to[i] = static_cast<std::byte>(nvfp4_scale(amax[i], tensor_scale));
    }
  }
}

// The kernels of one format for sources of one type.
struct Kernels {
  void (*amax)(const std::byte* from, int64_t n, int64_t at, int64_t block, bool once, float* amax);
  void (*scales)(const float* amax, int64_t n, float tensor_scale, std::byte* to);
  void (*values)(const std::byte* from, int64_t n, int64_t at, int64_t block, const float* amax,
                 float tensor_scale, std::byte* to);
};

// The compiler makes vectors of them, as in digest.cpp.
#define MESHCAST_KERNELS(name, ...)                                                                      \
  template <BlockFormat kFormat, typename T>                                                             \
  struct name {                                                                                          \
    __VA_ARGS__ static void amax(const std::byte* from, int64_t n, int64_t at, int64_t block, bool once, \
                                 float* amax) {                                                          \
      amax_of_row<T>(from, n, at, block, once, amax);                                                    \
    }                                                                                                    \
    __VA_ARGS__ static void scales(const float* amax, int64_t n, float tensor_scale, std::byte* to) {    \
      scales_of<kFormat>(amax, n, tensor_scale, to);                                                     \
    }                                                                                                    \
    __VA_ARGS__ static void values(const std::byte* from, int64_t n, int64_t at, int64_t block,          \
                                   const float* amax, float tensor_scale, std::byte* to) {               \
      values_of_row<kFormat, T>(from, n, at, block, amax, tensor_scale, to);                             \
    }                                                                                                    \
    static constexpr Kernels kAll{amax, scales, values};                                                 \
  }

MESHCAST_KERNELS(PlainRows);
#if defined(__x86_64__)
MESHCAST_KERNELS(WideRows, [[gnu::target("avx2")]]);
MESHCAST_KERNELS(WidestRows, [[gnu::target("avx512bw,avx512vl,avx512vnni")]]);
#endif
#undef MESHCAST_KERNELS

template <BlockFormat kFormat, typename T>
const Kernels& chosen_rows() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512vnni")) {
    return WidestRows<kFormat, T>::kAll;
  }
  if (__builtin_cpu_supports("avx2")) return WideRows<kFormat, T>::kAll;
#endif
  return PlainRows<kFormat, T>::kAll;
}

template <typename T>
const Kernels& kernels_of(BlockFormat format) {
  switch (format) {
    case BlockFormat::Fp8E4m3: return chosen_rows<BlockFormat::Fp8E4m3, T>();
    case BlockFormat::MxFp8: return chosen_rows<BlockFormat::MxFp8, T>();
    default: return chosen_rows<BlockFormat::NvFp4, T>();
  }
}

const Kernels& kernels_for(BlockFormat format, ElementType type) {
  switch (type) {
    case ElementType::Float32: return kernels_of<float>(format);
    case ElementType::Float16: return kernels_of<Half>(format);
    case ElementType::BFloat16: return kernels_of<BFloat16>(format);
    default: throw Error(ErrorKind::Generic, "only float32, float16 and bfloat16 are quantised by blocks");
  }
}

// Copies n elements of each of some rows, so that those of a row lie one behind the other. By columns: where a
// tensor is turned, those of a column do so already.
template <typename Word>
void turn(const std::byte* from, int64_t stride, int64_t row_stride, int64_t n, int64_t rows, std::byte* to) {
  for (int64_t i = 0; i < n; ++i) {
    for (int64_t r = 0; r < rows; ++r) {
      std::memcpy(to + (r * kTurnedPart + i) * int64_t{sizeof(Word)}, from + i * stride + r * row_stride,
                  sizeof(Word));
    }
  }
}

// Visits the box in parts of rows, whose elements lie one behind the other in memory: `from` is the first, the
// n-th element of the box in row-major order is `first`, `block` the first block of it among those of the box.
template <typename Visit>
void each_part(const BlockedView& box, const Visit& visit) {
  const StridedView& view = box.view;
  if (view.nbytes() == 0) return;
  const int last = view.ndim - 1;
  const int64_t row = view.extent[last];
  const int64_t block = box.block[last];
  const int64_t at = box.low[last] % block;
  const bool dense = view.stride[last] == view.element_bytes;
  // Parts end where blocks do, except for blocks that are larger than a part; block_amax() relies on it.
  const int64_t room = dense ? kRowPart : kTurnedPart;
  const int64_t most = block < room ? room / block * block : room;
  alignas(64) std::array<std::byte, kTurnedRows * kTurnedPart * sizeof(float)> turned;
  std::array<int64_t, kMaxDims> index{};
  const auto blocks_of = [&](int64_t further) {  // of the row so many rows behind `index`
    int64_t blocks = 0;
    for (int d = 0; d < last; ++d) {
      const int64_t here = index[d] + (d == last - 1 ? further : 0);
      blocks = blocks * box.num_blocks(d) + (box.low[d] + here) / box.block[d] - box.first_block(d);
    }
    return blocks * box.num_blocks(last);
  };
  int64_t first = 0;
  for (;;) {
    const std::byte* from = view.data;
    for (int d = 0; d < last; ++d) from += index[d] * view.stride[d];
    const bool several = !dense && last > 0;
    const int64_t rows = several ? std::min(kTurnedRows, view.extent[last - 1] - index[last - 1]) : 1;
    for (int64_t begin = 0; begin < row;) {
      const int64_t within = (at + begin) % block;
      const int64_t n = std::min(row - begin, most - within % most);
      const std::byte* part = from + begin * view.stride[last];
      if (!dense) {
        const int64_t row_stride = several ? view.stride[last - 1] : 0;
        const auto copy_rows = view.element_bytes == 2 ? turn<uint16_t> : turn<uint32_t>;
        copy_rows(part, view.stride[last], row_stride, n, rows, turned.data());
        part = turned.data();
      }
      for (int64_t r = 0; r < rows; ++r) {
        visit(part + r * kTurnedPart * view.element_bytes, n, within, first + r * row + begin,
              blocks_of(r) + (at + begin) / block);
      }
      begin += n;
    }
    first += rows * row;
    int d = last - 1;
    for (int64_t step = rows; d >= 0; --d, step = 1) {
      index[d] += step;
      if (index[d] < view.extent[d]) break;
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

}  // namespace

int64_t BlockedView::num_blocks() const {
  int64_t n = 1;
  for (int d = 0; d < view.ndim; ++d) n *= num_blocks(d);
  return n;
}

float nvfp4_tensor_scale(float tensor_amax) { return tensor_scale_of(tensor_amax); }

void block_amax(const BlockedView& box, float* amax) {
  const Kernels& kernels = kernels_for(BlockFormat::Fp8E4m3, box.type);  // the same for all formats
  const int last = box.view.ndim - 1;
  const int64_t block = box.block[last];
  // Whether no two parts have elements of one block: the result is as large as a quarter of what is read.
  bool once = block <= kTurnedPart;
  for (int d = 0; d < last; ++d) once = once && box.block[d] == 1;
  if (!once) std::fill_n(amax, box.num_blocks(), 0.0F);
  each_part(box, [&](const std::byte* from, int64_t n, int64_t at, int64_t, int64_t first) {
    kernels.amax(from, n, at, block, once, amax + first);
  });
}

void block_scales(BlockFormat format, const float* amax, int64_t n, float tensor_amax, std::byte* scales) {
  kernels_of<float>(format).scales(amax, n, nvfp4_tensor_scale(tensor_amax), scales);
}

void block_values(BlockFormat format, const BlockedView& box, const float* amax, float tensor_amax,
                  std::byte* values) {
  const float tensor_scale = nvfp4_tensor_scale(tensor_amax);
  const Kernels& kernels = kernels_for(format, box.type);
  const int64_t block = box.block[box.view.ndim - 1];
  const int64_t each = format == BlockFormat::NvFp4 ? 2 : 1;
  each_part(box, [&](const std::byte* from, int64_t n, int64_t at, int64_t first, int64_t first_block) {
    kernels.values(from, n, at, block, amax + first_block, tensor_scale, values + first / each);
  });
}

}  // namespace meshcast
