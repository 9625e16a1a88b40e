#pragma once

#include <cstdint>
#include <numeric>
#include <vector>

namespace meshcast {

// Union-find of the numbers below `count`, each in its own set at first. Paths are halved, so that look-ups are
// short.
class DisjointSets {
 public:
  explicit DisjointSets(int32_t count) : parent_(static_cast<size_t>(count)) {
    std::iota(parent_.begin(), parent_.end(), 0);
  }

  // The representative of the set of i.
  int32_t find(int32_t i) {
    while (parent_[static_cast<size_t>(i)] != i) {
      int32_t& above = parent_[static_cast<size_t>(i)];
      above = parent_[static_cast<size_t>(above)];
      i = above;
    }
    return i;
  }

  // The root of a represents both.
  void link(int32_t a, int32_t b) {
    const int32_t root = find(a);
    parent_[static_cast<size_t>(find(b))] = root;
  }

 private:
  std::vector<int32_t> parent_;
};

}  // namespace meshcast
