#pragma once

#include <atomic>
#include <cstdint>
#include <mutex>
#include <vector>

namespace meshcast {

// How many receives a run posts beyond the first one in plan order that is still missing, over all its peers
// together: two windows, so that peers of unlike speed seldom wait for each other.
inline constexpr int32_t kRecvsAhead = 8;

// Keeps the receives of a run in plan order across its peers. Senders do not know of each other: were every
// peer's window posted at once, peers that the plan lets send in turn would share the network evenly, and what
// this rank forwards in plan order would wait for the slowest of them. Posting in order makes them take turns,
// since a send waits for its receive. No deadlock: the first message in plan order that is missing anywhere has
// been posted. Thread-safe.
class RecvOrder {
 public:
  // `count`: receives over the network, numbered from 0 in plan order.
  explicit RecvOrder(int32_t count);

  bool may_post(int32_t number) const { return number < limit_.load(); }

  // Returns whether others may now be posted that could not before.
  bool arrived(int32_t number);

 private:
  std::mutex mutex_;
  std::vector<bool> arrived_;
  int32_t first_ = 0;  // the first that is missing
  std::atomic<int32_t> limit_;
};

}  // namespace meshcast
