#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

namespace meshcast {

// Ascending, each value once.
inline void sort_unique(std::vector<int32_t>* values) {
  // Most lists are joined from ascending ones.
  if (!std::is_sorted(values->begin(), values->end())) std::sort(values->begin(), values->end());
  values->erase(std::unique(values->begin(), values->end()), values->end());
}

}  // namespace meshcast
