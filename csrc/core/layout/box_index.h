#pragma once

#include <algorithm>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <map>
#include <set>
#include <utility>
#include <vector>

#include "layout/box.h"

namespace meshcast {

// Numbered boxes by where they begin along one dimension, those of about one size together: finds the boxes
// near another one without a look at the rest.
class BoxIndex {
 public:
  // boxes: those to come, or most of them. The dimension is the one along which they begin at most places.
  explicit BoxIndex(const std::vector<Box>& boxes) {
    size_t most = 0;
    for (int d = 0; d < (boxes.empty() ? 0 : boxes.front().ndim); ++d) {
      std::vector<int64_t> begins;
      begins.reserve(boxes.size());
      for (const Box& box : boxes) begins.push_back(box.lo[d]);
      std::sort(begins.begin(), begins.end());
      const auto places = static_cast<size_t>(std::unique(begins.begin(), begins.end()) - begins.begin());
      if (places > most) {
        most = places;
        dim_ = d;
      }
    }
  }

  void insert(const Box& box, size_t number) { of_size_[size_of(box)].insert({box.lo[dim_], number}); }
  void erase(const Box& box, size_t number) { of_size_[size_of(box)].erase({box.lo[dim_], number}); }

  // Numbers of all boxes that overlap `box`, and of few others; ascending. Scalars overlap.
  std::vector<size_t> near(const Box& box) const {
    std::vector<size_t> out;
    const int64_t end = box.ndim == 0 ? 1 : box.hi[dim_];
    for (const auto& [size, begins] : of_size_) {
      // Boxes of this size are shorter than 2^size.
      const int64_t first =
          size < 62 ? box.lo[dim_] - (int64_t{1} << size) : std::numeric_limits<int64_t>::min();
      for (auto at = begins.lower_bound({first, 0}); at != begins.end() && at->first < end; ++at)
        out.push_back(at->second);
    }
    std::sort(out.begin(), out.end());
    return out;
  }

 private:
  int size_of(const Box& box) const { return std::bit_width(static_cast<uint64_t>(box.extent(dim_))); }

  int dim_ = 0;
  std::map<int, std::set<std::pair<int64_t, size_t>>> of_size_;
};

}  // namespace meshcast
