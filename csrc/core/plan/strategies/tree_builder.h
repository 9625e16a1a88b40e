#pragma once

#include <cstdint>
#include <deque>
#include <vector>

#include "plan/bound/bound.h"
#include "plan/draft.h"
#include "plan/strategies/port_credits.h"

namespace meshcast {

// Builds the route of one chunk after another so that, over all chunks, every port carries its balanced share
// (see PortCredits). Receivers that the chunk reaches by a detour come last, when all hosts have it.
class TreeBuilder {
 public:
  // `fan`: how often a host that forwards a chunk sends it, as long as there are receivers left. With 1 the
  // trees are chains if shares are equal; with 2 every host forwards every other chunk twice, which makes the
  // same load in trees of logarithmic depth.
  TreeBuilder(const PortDemand& demand, const Network& network, int64_t fan);

  // The route of a chunk of `nbytes`. Hosts that forward come before those that do not, so the tree is as
  // shallow as the shares allow: with one sender it is a chain, with many it is nearly flat. The chunk leaves
  // its holders over `first_port` if given.
  const Route& route(int32_t bundle, int64_t bundle_bytes, int64_t nbytes, int32_t first_port = -1);

  // For bundles whose chunk sizes depend on the sender: the port over which the next chunk should leave its
  // holders, so that each is used in proportion to its share; -1 if nothing leaves a host.
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
    std::vector<int32_t> in, local;  // by party, -1 if none
    std::vector<int32_t> detour_in, detour_out;
    std::vector<int64_t> owed;  // by party, bytes that are still to come by detours
    bool detours = false;
    size_t entries = 0;  // ports of all its items
  };
  // The amounts that a chunk added to the credits.
  struct Accrued {
    int32_t bundle = -1;
    int64_t nbytes = 0;           // of the chunk
    std::vector<int64_t> credit;  // by port
  };
  // A receiver that the chunk reaches over a NIC at the end.
  struct Late {
    size_t party = 0;
    int32_t rank = -1;
    bool spreads = false;  // it copies the chunk to the others of its host
  };

  const PortItem& item(int32_t index) const { return demand_.items[static_cast<size_t>(index)]; }
  const std::vector<int32_t>& pick(int32_t index, int64_t nbytes, int32_t first_port) {
    return credits_.pick(item(index), item(index).copies, nbytes, first_port);
  }
  int32_t enter(const Parties& parties, size_t party, const BundleItems& items, int32_t bundle, int64_t nbytes);
  void spread_inside(const Parties& parties, size_t party, const BundleItems& items, int32_t root,
                     int32_t root_parent, int32_t bundle, int64_t nbytes);
  void add_edge(int32_t src, int32_t dst, int32_t parent);
  void accrue(int32_t bundle, int64_t bundle_bytes, int64_t nbytes);
  void build_tree(int32_t bundle, int64_t nbytes);

  // Detours (tree_detours.cpp).
  struct Sender;
  void choose_late(const Parties& parties, size_t party, BundleItems* items, int32_t root, int64_t nbytes);
  int32_t pick_late(const Parties& parties, size_t party, int32_t port, int32_t root) const;
  bool holder_waits(const Parties& parties, size_t party, const BundleItems& items);
  void enter_late(const Parties& parties, const BundleItems& items, int32_t bundle, int64_t nbytes);

  const PortDemand& demand_;
  const Network& network_;
  PortCredits credits_;
  std::vector<BundleItems> by_bundle_;
  Accrued last_;                  // of a bundle with many entries
  std::vector<int64_t> emitted_;  // by port, bytes that left the holders of emitting_bundle_
  int32_t emitting_bundle_ = -1;
  std::vector<int64_t> local_in_;  // by rank, bytes so far, hot hosts only
  std::vector<int64_t> due_in_;    // by rank, all bytes that it receives, less those of detours so far
  std::vector<int32_t> arrived_;   // by rank: edge of the current route that brings the chunk, -1 none yet
  std::vector<int32_t> nic_hops_;  // by NIC, of the current chunk between hosts, detours not counted
  std::vector<Late> late_;         // of the current chunk
  std::vector<char> is_late_;      // by rank
  Route route_;
};

}  // namespace meshcast
