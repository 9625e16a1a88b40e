#pragma once

#include <atomic>
#include <cstdint>
#include <vector>

#include "common/sync.h"

namespace meshcast {

// How many receives, and sends, of a run over the network may be in flight beyond the first one in plan order
// that is not complete, over all its peers together. Few keep the plan's order, many tolerate peers of
// different speed: measured on the paper's cases, where chains need the order (docs/decisions.md).
inline constexpr int32_t kRecvsAhead = 8;
inline constexpr int32_t kSendsAhead = 8;

// If a plan relays nothing, receives have no such limit: ranks that share a NIC do not know of each other, and
// one that waits for its turn there delays others. Sends have a wide one: if a rank sends to all peers at once,
// they share its NIC by chance, and those of a host that gets less end late. They have none on a NIC that sends
// clearly longest, which must never wait for a busy receiver while it has data for another.
inline constexpr int32_t kDirectSendsAhead = 16;

// Keeps one direction of a run in plan order across its peers. Senders do not know of each other: if every
// peer's window were posted at once, peers that the plan lets send in turn would share the network evenly, and
// what this rank forwards in plan order would wait for the slowest of them. Posting in order makes them take
// turns, since a send waits for its receive; and a rank that sends in order serves its receivers in the plan's
// order. No deadlock: the first message in plan order that is not complete is the first at both its ends, has
// been posted, and its data is there. Thread-safe.
class PlanOrder {
 public:
  // `count`: messages over the network, numbered from 0 in plan order.
  PlanOrder(int32_t count, int32_t ahead);

  bool may_go(int32_t number) const { return number < limit_.load(); }

  // Returns whether more messages may now go than before.
  bool done(int32_t number);

 private:
  const int32_t ahead_;
  Mutex mutex_;
  std::vector<bool> done_;
  int32_t first_ = 0;  // the first that is not done
  std::atomic<int32_t> limit_;
};

}  // namespace meshcast
