#pragma once

#include <cstdint>
#include <string>
#include <unordered_map>
#include <vector>

namespace meshcast {

// One network interface of a host, full duplex. Rates in bytes per second.
struct Nic {
  int64_t out_rate = 0;
  int64_t in_rate = 0;

  friend bool operator==(const Nic&, const Nic&) = default;
};

// The ranks of a host share its NICs: the rank at position i of `ranks` uses NIC i mod nics.size() for all
// its traffic with other hosts (as processes are bound to the nearest interface). Among themselves the ranks
// of a host copy at local_rate (bytes/s, per rank, full duplex); that traffic never touches a NIC.
struct Host {
  std::vector<int32_t> ranks;
  std::vector<Nic> nics;
  int64_t local_rate = 0;

  size_t nic_of(size_t position) const { return position % nics.size(); }

  friend bool operator==(const Host&, const Host&) = default;
};

struct Topology {
  std::vector<Host> hosts;
  int64_t latency_ns = 0;  // alpha of one hop

  friend bool operator==(const Topology&, const Topology&) = default;
};

// Throws LayoutError: no NIC, a rate that is not positive, a rank on two hosts.
void validate(const Topology& topology);

// Hosts of `ranks_per_host` consecutive ranks each, covering ranks 0..max_rank.
Topology uniform_topology(int64_t max_rank, int64_t ranks_per_host, int64_t nic_rate, int64_t nics_per_host,
                          int64_t local_rate, int64_t latency_ns);

// rank -> index into topology.hosts. Throws LayoutError if a rank of `ranks` is on no host.
std::unordered_map<int32_t, int32_t> host_index(const Topology& topology, const std::vector<int32_t>& ranks);

}  // namespace meshcast
