#include "plan/network.h"

#include <algorithm>
#include <string>

#include "common/error.h"

namespace meshcast {

Network::Network(const Topology& topology, const std::vector<int32_t>& ranks)
    : ranks_(ranks), latency_ns_(topology.latency_ns) {
  host_.assign(ranks.size(), -1);
  nic_.assign(ranks.size(), -1);
  hosts_ = static_cast<int32_t>(topology.hosts.size());
  const int64_t span = ranks.empty() ? 0 : int64_t{ranks.back()} + 1;
  if (span <= 16 * static_cast<int64_t>(ranks.size()) + 1024) {
    dense_.assign(static_cast<size_t>(span), -1);
    for (size_t i = 0; i < ranks.size(); ++i) dense_[static_cast<size_t>(ranks[i])] = static_cast<int32_t>(i);
  }
  for (size_t h = 0; h < topology.hosts.size(); ++h) {
    const Host& host = topology.hosts[h];
    for (size_t p = 0; p < host.ranks.size(); ++p) {
      const auto it = std::lower_bound(ranks.begin(), ranks.end(), host.ranks[p]);
      if (it == ranks.end() || *it != host.ranks[p]) continue;
      const auto i = static_cast<size_t>(it - ranks.begin());
      host_[i] = static_cast<int32_t>(h);
      nic_[i] = nics_ + static_cast<int32_t>(host.nic_of(p));
    }
    for (const Nic& nic : host.nics) {
      port_rate_.push_back(nic.out_rate);
      port_rate_.push_back(nic.in_rate);
    }
    nics_ += static_cast<int32_t>(host.nics.size());
  }
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (host_[i] < 0) throw LayoutError("rank " + std::to_string(ranks[i]) + " is on no host of the topology");
    const int64_t rate = topology.hosts[static_cast<size_t>(host_[i])].local_rate;
    port_rate_.push_back(rate);
    port_rate_.push_back(rate);
  }
}

int32_t Network::index(int32_t rank) const {
  if (!dense_.empty()) return dense_[static_cast<size_t>(rank)];
  return static_cast<int32_t>(std::lower_bound(ranks_.begin(), ranks_.end(), rank) - ranks_.begin());
}

}  // namespace meshcast
