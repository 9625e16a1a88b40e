#include "memory/digest.h"

#include <algorithm>
#include <cstring>
#include <type_traits>

#include "memory/walk.h"

namespace meshcast {
namespace {

constexpr int64_t kBlock = 4096;   // words; with their weights they fit into a core's L1 cache
constexpr int64_t kPacked = 4096;  // bytes
constexpr int64_t kPart = 256;     // bytes at a time; a number that the compiler knows gives better vectors
constexpr int64_t kCacheLine = 64;
// Bytes are prefetched this far ahead, so that they have arrived from memory when they are needed. Past the end
// of a tensor this has no effect.
constexpr int64_t kAhead = 8192;

struct Weights {
  alignas(64) std::array<int16_t, kBlock> lower{};
  alignas(64) std::array<int16_t, kBlock> upper{};
};

constexpr Weights make_weights() {
  Weights out;
  for (uint32_t i = 0; i < kBlock; ++i) {  // the finalizer of MurmurHash3, which mixes 32 bits
    uint32_t x = i + 0x9E3779B9U;
    x = (x ^ x >> 16) * 0x85EBCA6BU;
    x = (x ^ x >> 13) * 0xC2B2AE35U;
    x ^= x >> 16;
    out.lower[i] = static_cast<int16_t>(x | 1U);
    out.upper[i] = static_cast<int16_t>(x >> 16 | 1U);
  }
  return out;
}

constexpr Weights kWeights = make_weights();

struct Sums {
  uint32_t lower = 0;
  uint32_t upper = 0;
};

// SplitMix64.
Sums weights_of_block(int64_t block) {
  uint64_t x = (static_cast<uint64_t>(block) + 1) * 0x9E3779B97F4A7C15U;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9U;
  x = (x ^ x >> 27) * 0x94D049BB133111EBU;
  x ^= x >> 31;
  return {static_cast<uint32_t>(x) | 1U, static_cast<uint32_t>(x >> 32) | 1U};
}

// If no value is a NaN, none has a magnitude above the limit.
constexpr DigestNans kNoNans{0, ~uint64_t{0}, ~uint64_t{0}};

// The sums of n words of a block, from its word `at` on. ahead: distance in bytes to the prefetched ones.
using Sum = Sums (*)(const std::byte* from, int64_t at, int64_t n, const DigestNans& nans, int64_t ahead);

// A value has 1, 2, 4 or 8 bytes; n is a multiple of its words.
template <typename Value>
[[gnu::always_inline]] inline Sums sums_of(const std::byte* from, int64_t at, int64_t n, const DigestNans& nans,
                                           int64_t ahead) {
  using Word = std::conditional_t<sizeof(Value) == 1, uint8_t, int16_t>;
  constexpr auto kValue = static_cast<int64_t>(sizeof(Value));
  constexpr auto kWord = static_cast<int64_t>(sizeof(Word));
  alignas(64) std::array<std::byte, kPart> settled;
  const auto magnitude = static_cast<Value>(nans.magnitude);
  const auto limit = static_cast<Value>(nans.limit);
  Sums sums;
  const auto add = [&](int64_t nbytes) __attribute__((always_inline)) {
    for (int64_t i = 0; i < nbytes; i += kValue) {
      Value value;
      std::memcpy(&value, from + i, sizeof(Value));
      value = static_cast<Value>(value & magnitude) > limit ? magnitude : value;
      std::memcpy(settled.data() + i, &value, sizeof(Value));
    }
    for (int64_t i = 0; i < nbytes / kWord; ++i) {
      Word word;
      std::memcpy(&word, settled.data() + i * kWord, sizeof(Word));
      const auto wide = static_cast<int16_t>(word);
      sums.lower += static_cast<uint32_t>(int32_t{wide} * kWeights.lower[at + i]);
      sums.upper += static_cast<uint32_t>(int32_t{wide} * kWeights.upper[at + i]);
    }
  };
  int64_t left = n * kWord;
  for (; left >= kPart; left -= kPart, from += kPart, at += kPart / kWord) {
    for (int64_t i = 0; i < kPart; i += kCacheLine) __builtin_prefetch(from + ahead + i, 0, 2);
    add(kPart);
  }
  add(left);
  return sums;
}

template <typename Value>
Sums plain(const std::byte* from, int64_t at, int64_t n, const DigestNans& nans, int64_t ahead) {
  return sums_of<Value>(from, at, n, nans, ahead);
}

#if defined(__x86_64__)
// The compiler vectorises this; vectors of 32 and of 64 bytes, which not every processor has, each halve the
// time.
template <typename Value>
[[gnu::target("avx2")]] Sums wide(const std::byte* from, int64_t at, int64_t n, const DigestNans& nans,
                                  int64_t ahead) {
  return sums_of<Value>(from, at, n, nans, ahead);
}

// Processors that multiply and add words in one instruction run vectors of 64 bytes at full speed. The first
// ones with such vectors did not, and lacked that instruction.
template <typename Value>
[[gnu::target("avx512bw,avx512vnni")]] Sums widest(const std::byte* from, int64_t at, int64_t n,
                                                   const DigestNans& nans, int64_t ahead) {
  return sums_of<Value>(from, at, n, nans, ahead);
}

template <typename Value>
Sum chosen() {
  if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni")) return widest<Value>;
  return __builtin_cpu_supports("avx2") ? wide<Value> : plain<Value>;
}
#else
template <typename Value>
Sum chosen() {
  return plain<Value>;
}
#endif

class Digest {
 public:
  Digest(const DigestNans& nans, int64_t element_bytes, int64_t ahead)
      : element_bytes_(element_bytes),
        word_bytes_(element_bytes == 1 ? 1 : 2),
        ahead_(ahead),
        nans_(nans.value_bytes == 0 ? kNoNans : nans) {
    switch (nans.value_bytes == 0 ? word_bytes_ : nans.value_bytes) {
      case 1: sum_ = chosen<uint8_t>(); break;
      case 2: sum_ = chosen<uint16_t>(); break;
      case 4: sum_ = chosen<uint32_t>(); break;
      default: sum_ = chosen<uint64_t>();
    }
  }

  uint64_t total() const { return uint64_t{total_.upper} << 32 | total_.lower; }

  // Elements that are contiguous in memory and in the tensor.
  void add(const std::byte* from, int64_t element, int64_t n) {
    const int64_t by_element = element_bytes_ / word_bytes_;
    int64_t position = element * by_element;
    for (int64_t left = n * by_element; left > 0;) {
      const int64_t at = position % kBlock;
      const int64_t here = std::min(left, kBlock - at);
      const Sums sums = sum_(from, at, here, nans_, ahead_);
      const Sums weights = weights_of_block(position / kBlock);
      total_.lower += sums.lower * weights.lower;
      total_.upper += sums.upper * weights.upper;
      from += here * word_bytes_;
      position += here;
      left -= here;
    }
  }

  // Elements that are not contiguous in one of them, or in both.
  void add_apart(const std::byte* from, int64_t stride, int64_t element, int64_t step, int64_t n) {
    std::array<std::byte, kPacked> packed;
    const int64_t most = step == 1 ? kPacked / element_bytes_ : 1;
    while (n > 0) {
      const int64_t here = std::min(n, most);
      for (int64_t i = 0; i < here; ++i) {
        std::memcpy(packed.data() + i * element_bytes_, from + i * stride, static_cast<size_t>(element_bytes_));
      }
      add(packed.data(), element, here);
      from += here * stride;
      element += here * step;
      n -= here;
    }
  }

  void add(const StridedView& view, int64_t first, const std::array<int64_t, kMaxDims>& step) {
    walk_runs(view.ndim, view.extent, view.stride, step,
              [&](int64_t at, int64_t stride, int64_t position, int64_t apart, int64_t n) {
                if (n == 1 || (stride == element_bytes_ && apart == 1)) {
                  add(view.data + at, first + position, n);
                } else {
                  add_apart(view.data + at, stride, first + position, apart, n);
                }
              });
  }

 private:
  const int64_t element_bytes_;
  const int64_t word_bytes_;
  const int64_t ahead_;
  const DigestNans nans_;
  Sum sum_ = nullptr;
  Sums total_;
};

// The steps of the last `ndim` of `of` dimensions.
std::array<int64_t, kMaxDims> last_of(const std::array<int64_t, kMaxDims>& step, int of, int ndim) {
  std::array<int64_t, kMaxDims> out{};
  for (int d = 0; d < ndim; ++d) out[d] = step[d + of - ndim];
  return out;
}

}  // namespace

uint64_t digest(const StridedView& view, int64_t first, const std::array<int64_t, kMaxDims>& step,
                const DigestNans& nans) {
  Digest digest(nans, view.element_bytes, kAhead);
  digest.add(view, first, step);
  return digest.total();
}

uint64_t digest_of_copied(const StridedView& view, int64_t begin, int64_t end, int64_t first,
                          const std::array<int64_t, kMaxDims>& step, const DigestNans& nans) {
  Digest digest(nans, view.element_bytes, 0);
  walk_range(view, begin, end, first, step, [&](const StridedView& part, int64_t at) {
    digest.add(part, at, last_of(step, view.ndim, part.ndim));
  });
  return digest.total();
}

}  // namespace meshcast
