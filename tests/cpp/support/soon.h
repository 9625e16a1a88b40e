#pragma once

#include <chrono>
#include <thread>

namespace meshcast::testing {

// Whether a condition comes true within a limit that only a hang reaches.
template <typename Condition>
bool soon(const Condition& condition) {
  const auto limit = std::chrono::steady_clock::now() + std::chrono::seconds(20);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > limit) return false;
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  return true;
}

}  // namespace meshcast::testing
