#pragma once

#include <atomic>
#include <cstdint>

namespace meshcast {

// Wakes one sleeping thread of another process (or of this one). Lives in shared memory. The sleeper announces
// itself, looks for work once more and only then sleeps; who makes work looks for the announcement afterwards.
// Both sides use sequentially consistent operations, so that at least one of them sees the other.
struct alignas(64) Bell {
  std::atomic<uint32_t> rings{0};
  std::atomic<uint32_t> asleep{0};

  // Call after the work has been published by a sequentially consistent operation or fence.
  void ring_if_asleep() {
    if (asleep.load() != 0) ring();
  }
  void ring();

  // Sleeps until the next ring unless `has_work()` holds. May return early.
  template <typename HasWork>
  void sleep_unless(HasWork has_work) {
    const uint32_t seen = rings.load();
    asleep.store(1);
    if (!has_work()) wait_while(seen);
    asleep.store(0);
  }

 private:
  void wait_while(uint32_t seen);
};

}  // namespace meshcast
