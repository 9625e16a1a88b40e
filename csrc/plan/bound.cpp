#include "plan/bound.h"

#include <algorithm>
#include <set>

namespace meshcast {

int64_t lower_bound_ns(const std::vector<Task>& tasks, const std::vector<Bundle>& bundles, const Network& network) {
  if (bundles.empty()) return 0;
  std::vector<int64_t> demand(static_cast<size_t>(network.host_count()), 0);
  std::vector<int64_t> local(static_cast<size_t>(network.rank_count()), 0);
  for (const Bundle& bundle : bundles) {
    const Task& task = tasks[static_cast<size_t>(bundle.tasks.front())];
    if (task.reduce != ReduceOp::None) continue;
    std::set<int32_t> holding;
    for (const int32_t holder : task.holders) holding.insert(network.host(network.index(holder)));
    std::set<int32_t> needing;
    for (const int32_t receiver : task.receivers) {
      const int32_t r = network.index(receiver);
      if (holding.count(network.host(r)) == 0) {
        needing.insert(network.host(r));
      } else {
        local[static_cast<size_t>(r)] += bundle.nbytes;
      }
    }
    for (const int32_t h : needing) demand[static_cast<size_t>(h)] += bundle.nbytes;
  }
  std::vector<int64_t> rate(static_cast<size_t>(network.host_count()), 0);
  std::vector<char> seen(static_cast<size_t>(network.nic_count()), 0);
  for (int32_t r = 0; r < network.rank_count(); ++r) {
    if (seen[static_cast<size_t>(network.nic(r))]++) continue;
    rate[static_cast<size_t>(network.host(r))] += network.lane_rate(network.nic_in(network.nic(r)));
  }
  int64_t bound = 0;
  for (int32_t h = 0; h < network.host_count(); ++h) {
    if (demand[static_cast<size_t>(h)] > 0) {
      bound = std::max(bound, transfer_ns(demand[static_cast<size_t>(h)], rate[static_cast<size_t>(h)]));
    }
  }
  for (int32_t r = 0; r < network.rank_count(); ++r) {
    if (local[static_cast<size_t>(r)] > 0) {
      bound = std::max(bound, transfer_ns(local[static_cast<size_t>(r)],
                                         network.lane_rate(network.local_in(r)) +
                                             network.lane_rate(network.nic_in(network.nic(r)))));
    }
  }
  return bound + network.latency_ns();
}

}  // namespace meshcast
