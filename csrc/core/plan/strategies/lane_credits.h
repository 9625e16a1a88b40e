#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "plan/bound/lane_items.h"
#include "plan/network.h"

namespace meshcast {

// Who carries the next chunk, so that over all chunks every lane carries its balanced share
// (LaneItem::share). Each lane keeps a credit: a chunk adds the part of it that the lane should carry, and
// every hop takes a whole chunk off. The next hop goes to the lane with the most credit, which keeps all
// lanes within about one chunk of their share at every moment, not only at the end.
class LaneCredits {
 public:
  // `fan`: how often a lane that is taken sends the chunk, as long as there are hops left.
  LaneCredits(const Network& network, int64_t fan);

  // A chunk of `nbytes` of a bundle of `bundle_bytes` comes next.
  void accrue(const LaneItem& item, int64_t bundle_bytes, int64_t nbytes);

  // Distributes `copies` (>= 1) hops of a chunk over the lanes of an item; the first goes to an emitter, or to
  // `first_lane` where that is given. Lanes that are blocked get none. Returns hops per lane, parallel to the
  // item's lanes, until the next call.
  const std::vector<int32_t>& pick(const LaneItem& item, int64_t copies, int64_t nbytes, int32_t first_lane);

  int64_t of(int32_t lane) const { return credit_[static_cast<size_t>(lane)]; }
  void take(int32_t lane, int64_t nbytes) { credit_[static_cast<size_t>(lane)] -= nbytes; }
  void block(int32_t lane, bool blocked) { blocked_[static_cast<size_t>(lane)] = blocked; }

 private:
  const int64_t fan_;
  std::vector<int64_t> credit_;  // by lane, bytes
  std::vector<char> blocked_;    // by lane
  std::vector<int32_t> count_;
  std::vector<std::pair<int64_t, int32_t>> heap_;
  std::vector<int32_t> nic_host_;     // by NIC
  std::vector<int64_t> host_copies_;  // by host: copies of the current chunk that its NICs will send
};

}  // namespace meshcast
