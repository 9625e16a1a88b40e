#include "plan/figures.h"

#include <unordered_map>

namespace meshcast {
namespace {

using Traffic = std::vector<std::pair<int64_t, int64_t>>;

}  // namespace

Traffic rank_traffic(const Plan& plan) {
  std::unordered_map<int32_t, size_t> position;
  for (size_t i = 0; i < plan.ranks.size(); ++i) position[plan.ranks[i]] = i;
  Traffic traffic(plan.ranks.size());
  for (const Hop& hop : plan.hops) {
    const int64_t nbytes = plan.chunks[static_cast<size_t>(hop.chunk)].nbytes;
    traffic[position.at(hop.src)].first += nbytes;
    traffic[position.at(hop.dst)].second += nbytes;
  }
  return traffic;
}

Traffic nic_traffic(const Plan& plan) {
  const std::unordered_map<int32_t, int32_t> host = host_index(plan.topology, plan.ranks);
  Traffic traffic(plan.topology.hosts.size());
  for (const Hop& hop : plan.hops) {
    const int32_t from = host.at(hop.src);
    const int32_t to = host.at(hop.dst);
    if (from == to) continue;
    const int64_t nbytes = plan.chunks[static_cast<size_t>(hop.chunk)].nbytes;
    traffic[static_cast<size_t>(from)].first += nbytes;
    traffic[static_cast<size_t>(to)].second += nbytes;
  }
  return traffic;
}

}  // namespace meshcast
