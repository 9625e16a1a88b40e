#pragma once

#include <algorithm>
#include <vector>

#include "plan/cases.h"
#include "plan/draft.h"
#include "plan/network.h"
#include "plan/strategies/paper_model.h"
#include "plan/tasks.h"

namespace meshcast::testing {

// Seconds that the whole tensor takes over one 10 Gbit/s NIC: the unit of the paper's tables.
inline double tensor_seconds(const Problem& problem) {
  double bytes = static_cast<double>(problem.element_bytes);
  for (const int64_t n : problem.shape) bytes *= static_cast<double>(n);
  return bytes / static_cast<double>(kTenGbit);
}

// Busiest NIC port of a strategy's plan, in that unit: what the paper's host-NIC model says of strategies
// that send without holding hosts exclusively.
inline double nic_bound(const NamedCase& c, Strategy strategy) {
  const Plan plan = make_plan({c.problem}, c.topology, {strategy});
  const Network network(c.topology, plan.ranks);
  std::vector<int64_t> busy(static_cast<size_t>(network.port_count()), 0);
  int64_t most = 0;
  for (const Hop& hop : plan.hops) {
    const Network::Link link = network.link(network.index(hop.src), network.index(hop.dst));
    for (const int32_t port : {link.out, link.in}) {
      if (port >= 2 * network.nic_count()) continue;
      busy[static_cast<size_t>(port)] += plan.chunks[static_cast<size_t>(hop.chunk)].nbytes;
      most = std::max(most, busy[static_cast<size_t>(port)]);
    }
  }
  return static_cast<double>(most) / static_cast<double>(kTenGbit) / tensor_seconds(c.problem);
}

// The paper's own model of its broadcast strategy, same unit: whole tasks, hosts held exclusively.
inline double paper_time(const NamedCase& c, Balance balance) {
  const Demand demand = intersect_layouts({c.problem});
  const Plan plan = make_plan({c.problem}, c.topology, {Strategy::SendRecv});
  const Network network(c.topology, plan.ranks);
  const std::vector<PaperWork> works =
      paper_works(demand.tasks, bundle_tasks(demand.tasks, {c.problem}), network);
  const PaperOrder order = solve_paper_order(works, network.host_count(), balance, 0);
  const auto bytes = static_cast<double>(paper_makespan(works, network.host_count(), order));
  return bytes / static_cast<double>(kTenGbit) / tensor_seconds(c.problem);
}

}  // namespace meshcast::testing
