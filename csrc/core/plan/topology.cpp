#include "plan/topology.h"

#include <algorithm>
#include <unordered_set>

#include "common/checked.h"
#include "common/error.h"

namespace meshcast {
namespace {

constexpr int64_t kMaxRanks = int64_t{1} << 20;
constexpr int64_t kMaxLatency = int64_t{1} << 40;  // about 18 minutes

void check_rate(int64_t rate, const char* what, size_t host) {
  if (rate < 1) {
    throw LayoutError(std::string(what) + " of host " + std::to_string(host) + " is " + std::to_string(rate) +
                      " bytes/s, it must be positive");
  }
}

}  // namespace

void validate(const Topology& topology) {
  if (topology.hosts.empty()) throw LayoutError("the topology has no host");
  if (topology.latency_ns < 0 || topology.latency_ns > kMaxLatency) {
    throw LayoutError("latency of " + std::to_string(topology.latency_ns) + " ns: it must be in 0.." +
                      std::to_string(kMaxLatency));
  }
  std::unordered_set<int32_t> seen;
  for (size_t h = 0; h < topology.hosts.size(); ++h) {
    const Host& host = topology.hosts[h];
    if (host.ranks.empty()) throw LayoutError("host " + std::to_string(h) + " has no rank");
    if (host.nics.empty()) throw LayoutError("host " + std::to_string(h) + " has no NIC");
    for (const Nic& nic : host.nics) {
      check_rate(nic.out_rate, "outgoing NIC rate", h);
      check_rate(nic.in_rate, "incoming NIC rate", h);
    }
    check_rate(host.local_rate, "internal rate", h);
    for (const int32_t rank : host.ranks) {
      if (rank < 0)
        throw LayoutError("host " + std::to_string(h) + " has the negative rank " + std::to_string(rank));
      if (!seen.insert(rank).second) throw LayoutError("rank " + std::to_string(rank) + " is on two hosts");
    }
  }
}

Topology uniform_topology(int64_t max_rank, int64_t ranks_per_host, int64_t nic_rate, int64_t nics_per_host,
                          int64_t local_rate, int64_t latency_ns) {
  if (max_rank < 0 || max_rank >= kMaxRanks) {
    throw LayoutError("a uniform topology up to rank " + std::to_string(max_rank) + ": it must be in 0.." +
                      std::to_string(kMaxRanks - 1));
  }
  if (ranks_per_host < 1) throw LayoutError(std::to_string(ranks_per_host) + " ranks per host: at least 1");
  if (nics_per_host < 1 || nics_per_host > 1024) {
    throw LayoutError(std::to_string(nics_per_host) + " NICs per host: it must be in 1..1024");
  }
  Topology out;
  out.latency_ns = latency_ns;
  for (int64_t first = 0; first <= max_rank; first += ranks_per_host) {
    Host host;
    // The last host is as full as the others: ranks beyond max_rank do no harm, but a shorter host would
    // differ.
    for (int64_t r = first; r < first + std::min(ranks_per_host, kMaxRanks - first); ++r) {
      host.ranks.push_back(static_cast<int32_t>(r));
    }
    host.nics.assign(static_cast<size_t>(nics_per_host), Nic{nic_rate, nic_rate});
    host.local_rate = local_rate;
    out.hosts.push_back(std::move(host));
    if (ranks_per_host >= kMaxRanks) break;
  }
  validate(out);
  return out;
}

std::unordered_map<int32_t, int32_t> host_index(const Topology& topology, const std::vector<int32_t>& ranks) {
  std::unordered_map<int32_t, int32_t> out;
  for (size_t h = 0; h < topology.hosts.size(); ++h) {
    for (const int32_t rank : topology.hosts[h].ranks) out.emplace(rank, static_cast<int32_t>(h));
  }
  for (const int32_t rank : ranks) {
    if (out.find(rank) == out.end()) {
      throw LayoutError("rank " + std::to_string(rank) + " is on no host of the topology");
    }
  }
  return out;
}

}  // namespace meshcast
