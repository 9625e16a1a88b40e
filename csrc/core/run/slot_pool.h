#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "common/forks.h"
#include "common/sync.h"

namespace meshcast {

// The numbers of the transfers of a group in their messages. Assigned in turn, so that a number is unused for
// as long as possible before it is used again. Thread-safe.
class SlotPool {
 public:
  explicit SlotPool(int32_t size) : taken_(static_cast<size_t>(size), false) {}

  std::optional<int32_t> next() const;  // the one to take next; none if all are taken
  void take(int32_t slot);
  void release(int32_t slot);  // no effect in a forked child, where the lock may be held for ever
  int32_t taken() const;

 private:
  const Origin origin_;
  mutable Mutex mutex_;
  std::vector<bool> taken_;
  size_t begin_ = 0;  // where next() looks first
};

}  // namespace meshcast
