#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace meshcast {

// Ascending, each value once.
inline void sort_unique(std::vector<int32_t>* values) {
  std::sort(values->begin(), values->end());
  values->erase(std::unique(values->begin(), values->end()), values->end());
}

}  // namespace meshcast
