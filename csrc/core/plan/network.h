#pragma once

#include <cstdint>
#include <vector>

#include "plan/topology.h"

namespace meshcast {

inline constexpr int64_t kFitsNs = 8'000'000'000;  // so many bytes at 1 byte/s take ns that fit into 63 bits

// Nanoseconds that `nbytes` take at `rate`, rounded up. Exact: uses 128 bits only if 64 are too few, since a
// division of 128 bits takes ten times as long.
inline int64_t transfer_ns(int64_t nbytes, int64_t rate) {
  if (nbytes >= 0 && nbytes < kFitsNs && rate < 1'000'000'000'000'000'000)
    return (nbytes * 1000000000 + rate - 1) / rate;
  const __int128 ns = (static_cast<__int128>(nbytes) * 1000000000 + rate - 1) / rate;
  return static_cast<int64_t>(ns);
}

// The topology seen from the ranks of one plan: dense indices instead of global ranks, and ports. A port is
// one direction of one link and carries one hop at a time: for every NIC an out and an in port, for every
// rank a local out and a local in port. A hop between hosts takes the sender's NIC out port and the
// receiver's NIC in port, a hop inside a host the two local ports.
class Network {
 public:
  // `ranks` ascends. Throws LayoutError if a rank is on no host.
  Network(const Topology& topology, const std::vector<int32_t>& ranks);

  struct Link {
    int32_t out = -1;  // port indices
    int32_t in = -1;
  };

  int32_t index(int32_t rank) const;  // position of a global rank in `ranks`
  int32_t rank(int32_t index) const { return ranks_[static_cast<size_t>(index)]; }
  int32_t host(int32_t index) const { return host_[static_cast<size_t>(index)]; }
  int32_t nic(int32_t index) const { return nic_[static_cast<size_t>(index)]; }
  int32_t rank_count() const { return static_cast<int32_t>(ranks_.size()); }
  int32_t host_count() const { return hosts_; }
  int32_t nic_count() const { return nics_; }
  int32_t port_count() const { return static_cast<int32_t>(port_rate_.size()); }
  int64_t port_rate(int32_t port) const { return port_rate_[static_cast<size_t>(port)]; }
  int64_t latency_ns() const { return latency_ns_; }

  // Port numbers: NIC n has 2n and 2n+1, then rank i its local pair.
  int32_t nic_out(int32_t nic) const { return 2 * nic; }
  int32_t nic_in(int32_t nic) const { return 2 * nic + 1; }
  int32_t local_out(int32_t index) const { return 2 * (nics_ + index); }
  int32_t local_in(int32_t index) const { return 2 * (nics_ + index) + 1; }

  Link link(int32_t src, int32_t dst) const {
    if (host(src) == host(dst)) return {local_out(src), local_in(dst)};
    return {nic_out(nic(src)), nic_in(nic(dst))};
  }

 private:
  std::vector<int32_t> ranks_;
  std::vector<int32_t> dense_;  // global rank -> index if ranks are dense enough, else empty
  std::vector<int32_t> host_;   // topology host of each rank
  std::vector<int32_t> nic_;    // NIC of each rank, numbered over all hosts of the topology
  std::vector<int64_t> port_rate_;
  int32_t hosts_ = 0;
  int32_t nics_ = 0;
  int64_t latency_ns_ = 0;
};

}  // namespace meshcast
