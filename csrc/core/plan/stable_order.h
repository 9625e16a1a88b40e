#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <vector>

namespace meshcast {

// Indices of `keys` by key, the lower index first among equals. Linear if keys are spread evenly, like times of
// hops: they are distributed to as many ranges as there are keys, and each range is sorted separately.
inline std::vector<int32_t> stable_order(const std::vector<int64_t>& keys) {
  const size_t n = keys.size();
  std::vector<int32_t> out(n);
  const auto less = [&](int32_t a, int32_t b) {
    const int64_t x = keys[static_cast<size_t>(a)], y = keys[static_cast<size_t>(b)];
    return x != y ? x < y : a < b;
  };
  if (n < 256 || std::is_sorted(keys.begin(), keys.end())) {
    std::iota(out.begin(), out.end(), 0);
    if (n < 256) std::sort(out.begin(), out.end(), less);
    return out;
  }
  const auto [least, most] = std::minmax_element(keys.begin(), keys.end());
  const int64_t first = *least;
  int shift = 0;  // keys of a range differ in at most so many bits
  while (((static_cast<uint64_t>(*most) - static_cast<uint64_t>(first)) >> shift) >= n) ++shift;
  const auto range = [&](size_t i) {
    return (static_cast<uint64_t>(keys[i]) - static_cast<uint64_t>(first)) >> shift;
  };
  std::vector<int32_t> end(range(static_cast<size_t>(most - keys.begin())) + 1, 0);
  for (size_t i = 0; i < n; ++i) ++end[range(i)];
  std::partial_sum(end.begin(), end.end(), end.begin());
  for (size_t i = n; i-- > 0;) out[static_cast<size_t>(--end[range(i)])] = static_cast<int32_t>(i);
  // `end` now has the begin of each range.
  for (size_t r = 0; r < end.size() && shift > 0; ++r) {
    const auto begin = out.begin() + end[r];
    const auto last = r + 1 < end.size() ? out.begin() + end[r + 1] : out.end();
    if (last - begin > 1 && !std::is_sorted(begin, last, less)) std::sort(begin, last, less);
  }
  return out;
}

}  // namespace meshcast
