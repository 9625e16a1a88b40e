#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/forks.h"
#include "common/sync.h"

namespace meshcast {

// Numbers that the transfers of a group go by in their messages. Thread-safe. Given in turn, so that a number
// rests as long as possible before it is used again.
class SlotPool {
 public:
  explicit SlotPool(int32_t size) : taken_(static_cast<size_t>(size), false) {}

  std::optional<int32_t> next() const;  // the one to take next; none where all are taken
  void take(int32_t slot);
  void release(int32_t slot);  // nothing in a forked child, where the lock may be held for ever
  int32_t taken() const;

 private:
  const Origin origin_;
  mutable Mutex mutex_;
  std::vector<bool> taken_;
  size_t begin_ = 0;  // where next() looks first
};

}  // namespace meshcast
