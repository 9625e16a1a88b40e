#include "memory/digest.h"

#include <algorithm>
#include <cstring>

#include "memory/walk.h"

namespace meshcast {
namespace {

constexpr int64_t kBlock = 4096;  // words; their weights stay in a core's first cache

struct Weights {
  alignas(64) std::array<uint32_t, kBlock> of{};
};

constexpr Weights make_weights() {
  Weights out;
  for (uint32_t i = 0; i < kBlock; ++i) {  // the end of MurmurHash3, which mixes 32 bits
    uint32_t x = i + 0x9E3779B9U;
    x = (x ^ x >> 16) * 0x85EBCA6BU;
    x = (x ^ x >> 13) * 0xC2B2AE35U;
    out.of[i] = (x ^ x >> 16) << 1 | 1U;
  }
  return out;
}

constexpr Weights kWeights = make_weights();

// SplitMix64.
uint64_t weight_of_block(int64_t block) {
  uint64_t x = (static_cast<uint64_t>(block) + 1) * 0x9E3779B97F4A7C15U;
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9U;
  x = (x ^ x >> 27) * 0x94D049BB133111EBU;
  return (x ^ x >> 31) | 1U;
}

struct Nans {
  uint32_t magnitude = 0;
  uint32_t limit = 0;
};

using Sum = uint64_t (*)(const std::byte* from, const uint32_t* weights, int64_t n, Nans nans);

template <typename Word, bool kNans>
[[gnu::always_inline]] inline uint64_t sum_of(const std::byte* from, const uint32_t* weights, int64_t n,
                                              Nans nans) {
  uint64_t total = 0;
  for (int64_t i = 0; i < n; ++i) {
    Word word;
    std::memcpy(&word, from + i * static_cast<int64_t>(sizeof(Word)), sizeof(Word));
    uint32_t value = word;
    if constexpr (kNans) value = (value & nans.magnitude) > nans.limit ? nans.magnitude : value;
    total += uint64_t{value} * weights[i];
  }
  return total;
}

template <typename Word, bool kNans>
uint64_t plain(const std::byte* from, const uint32_t* weights, int64_t n, Nans nans) {
  return sum_of<Word, kNans>(from, weights, n, nans);
}

#if defined(__x86_64__)
// The compiler makes vectors of it; those of 32 bytes, which not every processor has, halve the time.
template <typename Word, bool kNans>
[[gnu::target("avx2")]] uint64_t wide(const std::byte* from, const uint32_t* weights, int64_t n, Nans nans) {
  return sum_of<Word, kNans>(from, weights, n, nans);
}

template <typename Word, bool kNans>
Sum chosen() {
  return __builtin_cpu_supports("avx2") ? wide<Word, kNans> : plain<Word, kNans>;
}
#else
template <typename Word, bool kNans>
Sum chosen() {
  return plain<Word, kNans>;
}
#endif

template <typename Word>
Sum chosen(bool nans) {
  return nans ? chosen<Word, true>() : chosen<Word, false>();
}

class Digest {
 public:
  Digest(const DigestWords& words, int64_t element_bytes)
      : words_(words),
        element_bytes_(element_bytes),
        by_element_(element_bytes / words.bytes),
        nans_{static_cast<uint32_t>(words.magnitude), static_cast<uint32_t>(words.limit)} {
    const bool nans = words.value_bytes == words.bytes;
    sum_ = words.bytes == 1   ? chosen<uint8_t>(nans)
           : words.bytes == 2 ? chosen<uint16_t>(nans)
                              : chosen<uint32_t>(nans);
  }

  uint64_t total() const { return total_; }

  // Elements one behind the other in memory and in the tensor.
  void add(const std::byte* from, int64_t element, int64_t n) {
    int64_t position = element * by_element_;
    for (int64_t left = n * by_element_; left > 0;) {
      const int64_t at = position % kBlock;
      const int64_t here = std::min(left, kBlock - at);
      total_ += sum_(from, kWeights.of.data() + at, here, nans_) * weight_of_block(position / kBlock);
      from += here * words_.bytes;
      position += here;
      left -= here;
    }
  }

  // Elements that are not, in either, or whose NaNs are no single words.
  void add_apart(const std::byte* from, int64_t stride, int64_t element, int64_t step, int64_t n) {
    std::array<std::byte, 4096> packed;
    const int64_t most = step == 1 ? static_cast<int64_t>(packed.size()) / element_bytes_ : 1;
    while (n > 0) {
      const int64_t here = std::min(n, most);
      for (int64_t i = 0; i < here; ++i) {
        std::memcpy(packed.data() + i * element_bytes_, from + i * stride, static_cast<size_t>(element_bytes_));
      }
      if (words_.value_bytes == 8) settle(packed.data(), here * element_bytes_);
      add(packed.data(), element, here);
      from += here * stride;
      element += here * step;
      n -= here;
    }
  }

  bool dense(int64_t stride, int64_t step) const {
    return stride == element_bytes_ && step == 1 && words_.value_bytes != 8;
  }

 private:
  void settle(std::byte* values, int64_t nbytes) const {
    for (int64_t at = 0; at < nbytes; at += 8) {
      uint64_t value = 0;
      std::memcpy(&value, values + at, 8);
      if ((value & words_.magnitude) > words_.limit) std::memcpy(values + at, &words_.magnitude, 8);
    }
  }

  const DigestWords words_;
  const int64_t element_bytes_;
  const int64_t by_element_;  // words
  const Nans nans_;
  Sum sum_ = nullptr;
  uint64_t total_ = 0;
};

}  // namespace

uint64_t digest(const StridedView& view, int64_t first, const std::array<int64_t, kMaxDims>& step,
                const DigestWords& words) {
  Digest digest(words, view.element_bytes);
  walk_runs(view.ndim, view.extent, view.stride, step,
            [&](int64_t at, int64_t stride, int64_t position, int64_t apart, int64_t n) {
              if (n == 1) {
                stride = view.element_bytes;
                apart = 1;
              }
              if (digest.dense(stride, apart)) {
                digest.add(view.data + at, first + position, n);
              } else {
                digest.add_apart(view.data + at, stride, first + position, apart, n);
              }
            });
  return digest.total();
}

}  // namespace meshcast
