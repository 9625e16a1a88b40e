#pragma once

#include <cstddef>
#include <cstdint>
#include <mutex>
#include <vector>

#include "exec/program.h"

namespace meshcast {

// The buffers of a run for values that it only passes on: results of reductions that go on to others.
// Bounded: the receives that need one take it in plan order, each as soon as fewer than Program::most_carried
// are held by those before it. That is no fewer than are held at a time when every hop is done in plan order,
// so the first hop in plan order that is missing anywhere never waits for a buffer, and no deadlock can come
// of them. Thread-safe.
class Carries {
 public:
  explicit Carries(const Program& program);

  // Whether the number-th receive of those that carry may be posted. Once true it stays true.
  bool may_take(int32_t number) const;

  // A buffer for it, and what it holds once it has been filled.
  std::vector<std::byte> take(int64_t nbytes);
  void keep(int32_t number, std::vector<std::byte> value);
  std::byte* data(int32_t number);

  // One of its sends is through. Returns whether others may now be posted that could not before.
  bool sent(int32_t number);

  int32_t peak() const;  // the most that were kept at a time

 private:
  const int32_t most_;
  mutable std::mutex mutex_;
  std::vector<int32_t> sends_left_;
  std::vector<std::vector<std::byte>> kept_;
  std::vector<std::vector<std::byte>> spare_;
  int32_t released_ = 0;
  int32_t held_ = 0;
  int32_t peak_ = 0;
};

}  // namespace meshcast
