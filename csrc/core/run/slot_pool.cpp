#include "run/slot_pool.h"

#include <algorithm>

namespace meshcast {

std::optional<int32_t> SlotPool::next() const {
  const std::lock_guard lock(mutex_);
  for (size_t i = 0; i < taken_.size(); ++i) {
    const size_t slot = (begin_ + i) % taken_.size();
    if (!taken_[slot]) return static_cast<int32_t>(slot);
  }
  return std::nullopt;
}

void SlotPool::take(int32_t slot) {
  const std::lock_guard lock(mutex_);
  const auto index = static_cast<size_t>(slot);
  taken_.at(index) = true;
  begin_ = (index + 1) % taken_.size();
}

void SlotPool::release(int32_t slot) {
  if (origin_.foreign()) return;
  const std::lock_guard lock(mutex_);
  if (slot >= 0 && static_cast<size_t>(slot) < taken_.size()) taken_[static_cast<size_t>(slot)] = false;
}

int32_t SlotPool::taken() const {
  const std::lock_guard lock(mutex_);
  return static_cast<int32_t>(std::count(taken_.begin(), taken_.end(), true));
}

}  // namespace meshcast
