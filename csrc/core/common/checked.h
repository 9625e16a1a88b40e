#pragma once

#include <cstdint>

#include "common/error.h"

namespace meshcast {

// Sizes come from users and from files: every product of them is checked, so that a tensor too large
// for int64 bytes is refused instead of planned wrongly.
inline int64_t checked_mul(int64_t a, int64_t b, const char* what) {
  int64_t result = 0;
  if (__builtin_mul_overflow(a, b, &result)) {
    throw LayoutError(std::string(what) + " overflows 64 bits: " + std::to_string(a) + " * " +
                      std::to_string(b));
  }
  return result;
}

inline int64_t checked_add(int64_t a, int64_t b, const char* what) {
  int64_t result = 0;
  if (__builtin_add_overflow(a, b, &result)) {
    throw LayoutError(std::string(what) + " overflows 64 bits: " + std::to_string(a) + " + " +
                      std::to_string(b));
  }
  return result;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

}  // namespace meshcast
