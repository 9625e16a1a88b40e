#pragma once

#include <algorithm>
#include <array>
#include <cstdint>

namespace meshcast {

inline constexpr int kMaxDims = 8;  // tensor dimensions; torch has no hard limit, CUDA kernels do

// Half-open n-d interval of the global tensor. A 0-d box is one element; unused slots stay zero so
// that equality and hashing may look at all of them.
struct Box {
  int ndim = 0;
  std::array<int64_t, kMaxDims> lo{};
  std::array<int64_t, kMaxDims> hi{};

  int64_t extent(int d) const { return hi[d] - lo[d]; }

  bool empty() const {
    for (int d = 0; d < ndim; ++d) {
      if (hi[d] <= lo[d]) return true;
    }
    return false;
  }

  // Elements. The bytes of the whole tensor were checked against int64, so no product inside can wrap.
  int64_t volume() const {
    if (empty()) return 0;
    int64_t v = 1;
    for (int d = 0; d < ndim; ++d) v *= extent(d);
    return v;
  }

  bool contains(const Box& other) const {
    for (int d = 0; d < ndim; ++d) {
      if (other.lo[d] < lo[d] || other.hi[d] > hi[d]) return false;
    }
    return true;
  }

  friend bool operator==(const Box& a, const Box& b) {
    return a.ndim == b.ndim && a.lo == b.lo && a.hi == b.hi;
  }
  friend bool operator!=(const Box& a, const Box& b) { return !(a == b); }
};

inline Box intersect(const Box& a, const Box& b) {
  Box out;
  out.ndim = a.ndim;
  for (int d = 0; d < a.ndim; ++d) {
    out.lo[d] = std::max(a.lo[d], b.lo[d]);
    out.hi[d] = std::max(out.lo[d], std::min(a.hi[d], b.hi[d]));
  }
  return out;
}

}  // namespace meshcast
