#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "plan/bound/port_items.h"
#include "plan/network.h"

namespace meshcast {

// The part of a share for a chunk of `nbytes` of a bundle of `bundle_bytes`, rounded down. Exact: uses 128 bits
// only if 64 are too few, since a division of 128 bits takes longer.
inline int64_t part_of(int64_t share, int64_t nbytes, int64_t bundle_bytes) {
  int64_t product = 0;
  if (!__builtin_mul_overflow(share, nbytes, &product)) return product / bundle_bytes;
  return static_cast<int64_t>(static_cast<__int128>(share) * nbytes / bundle_bytes);
}

// Chooses the ports of each chunk, so that over all chunks every port carries its balanced share
// (PortItem::share). Each port has a credit: a chunk adds the part of it that the port should carry, and every
// hop subtracts a whole chunk. The next hop goes to the port with the most credit, which keeps all ports within
// about one chunk of their share at every moment, not only at the end.
class PortCredits {
 public:
  static constexpr int64_t kStar = 0;  // the first port sends all copies of a chunk inside a host, else as 1

  // `fan`: how often a chosen port sends the chunk, as long as there are hops left; or kStar.
  PortCredits(const Network& network, int64_t fan);

  // The next chunk has `nbytes` of a bundle of `bundle_bytes`.
  void accrue(const PortItem& item, int64_t bundle_bytes, int64_t nbytes);

  // Adds to all credits, by port.
  void add(const std::vector<int64_t>& credit);

  // Distributes `copies` (>= 1) hops of a chunk over the ports of an item; the first goes to an emitter, or to
  // `first_port` if given. Ports that are blocked get none. Returns hops per port, parallel to the item's
  // ports, until the next call.
  const std::vector<int32_t>& pick(const PortItem& item, int64_t copies, int64_t nbytes, int32_t first_port);

  const std::vector<int64_t>& all() const { return credit_; }  // by port
  int64_t of(int32_t port) const { return credit_[static_cast<size_t>(port)]; }
  void take(int32_t port, int64_t nbytes) { credit_[static_cast<size_t>(port)] -= nbytes; }
  void block(int32_t port, bool blocked) { blocked_[static_cast<size_t>(port)] = blocked; }

 private:
  const int64_t fan_;
  const bool star_;
  std::vector<int64_t> credit_;  // by port, bytes
  std::vector<char> blocked_;    // by port
  std::vector<int32_t> count_;
  std::vector<std::pair<int64_t, int32_t>> heap_;
  std::vector<int32_t> nic_host_;     // by NIC
  std::vector<int64_t> host_copies_;  // by host: copies of the current chunk that its NICs will send
};

}  // namespace meshcast
