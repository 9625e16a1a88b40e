#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "plan/bound.h"
#include "plan/draft.h"

namespace meshcast {

// Builds the route of one chunk after another so that, over all chunks, every lane carries its balanced share
// (LaneItem::share). Each lane keeps a credit: a chunk adds the part of it that the lane should carry, and
// every hop takes a whole chunk off. The next hop goes to the lane with the most credit, which keeps all
// lanes within about one chunk of their share at every moment, not only at the end.
class TreeBuilder {
 public:
  // `fan`: how often a host that forwards a chunk sends it, as long as there are receivers left. With 1 the
  // trees are chains wherever shares are equal; with 2 every host forwards every other chunk twice, which
  // makes the same load in trees of logarithmic depth.
  TreeBuilder(const LaneDemand& demand, const Network& network, int64_t fan);

  // The route of a chunk of `nbytes`. Hosts that forward come before those that do not, so the tree is as
  // shallow as the shares allow: with one sender it is a chain, with many it is nearly flat.
  // The chunk leaves its holders over `first_lane` where that is given.
  const Route& route(int32_t bundle, int64_t bundle_bytes, int64_t nbytes, int32_t first_lane = -1);

  // For bundles whose chunks have the size that suits their sender: the lane over which the next chunk should
  // leave its holders, so that each is used in proportion to its share; -1 where nothing leaves a host.
  int32_t next_emitter(int32_t bundle) const;

 private:
  // A rank that will send the chunk `count` more times, and the edge that brings it there.
  struct Slot {
    int32_t rank = -1;
    int32_t parent = -1;
    int32_t count = 0;
  };
  struct BundleItems {
    int32_t out = -1;                // indices into demand.items
    std::vector<int32_t> in, local;  // by party, -1 where none
  };

  void accrue(int32_t item, int64_t bundle_bytes, int64_t nbytes);
  // Distributes `copies` hops of a chunk over the lanes of an item; the first goes to an emitter, or to
  // `first_lane` where that is given. Returns hops per lane, parallel to the item's lanes.
  const std::vector<int32_t>& pick(int32_t item, int64_t nbytes, int32_t first_lane);
  int32_t enter(const Parties& parties, size_t party, const BundleItems& items, int32_t bundle, int64_t nbytes);
  void spread_inside(const Parties& parties, size_t party, const BundleItems& items, int32_t root,
                     int32_t root_parent, int32_t bundle, int64_t nbytes);
  void add_edge(int32_t src, int32_t dst, int32_t parent);

  const LaneDemand& demand_;
  const Network& network_;
  const int64_t fan_;
  std::vector<BundleItems> by_bundle_;
  std::vector<int64_t> credit_;   // by lane, bytes
  std::vector<int64_t> emitted_;  // by lane, bytes that left the holders of emitting_bundle_
  int32_t emitting_bundle_ = -1;
  std::vector<int64_t> local_in_;  // by rank, bytes so far, hot hosts only
  std::vector<int32_t> arrived_;   // by rank: edge of the current route that brings the chunk, -1 none yet
  std::vector<int32_t> count_;
  std::vector<std::pair<int64_t, int32_t>> heap_;
  std::vector<int32_t> nic_host_;     // by NIC
  std::vector<int64_t> host_copies_;  // by host: copies of the current chunk that its NICs will send
  Route route_;
};

}  // namespace meshcast
