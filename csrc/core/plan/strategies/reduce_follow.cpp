#include <algorithm>

#include "plan/strategies/reduce_router.h"

namespace meshcast {

// Reduces along the chain of a way, over its ports as far as one rank for each value allows: a rank of the port
// out of every host gives a value first, then one of the port in, then the others. Returns no stop if a host
// would have nothing to add.
ReduceRouter::Stop ReduceRouter::reduce_along(const ReduceWay& way, ReduceOp op) {
  // The way has hosts and ports, the chain needs one rank for every value: ranks are chosen here so that the
  // ports of the way are used. Each value is taken once, from one rank of one host; values are numbered from 0.
  struct Host {
    std::vector<int32_t> ranks;
    int32_t enter = -1, leave = -1;
  };
  std::vector<Host> hosts(way.chain.size());
  std::vector<char> taken;
  const auto is_taken = [&](int32_t value) {
    return static_cast<size_t>(value) < taken.size() && taken[static_cast<size_t>(value)] != 0;
  };
  const auto take = [&](int32_t value, int32_t rank, Host* host) {
    if (static_cast<size_t>(value) >= taken.size()) taken.resize(static_cast<size_t>(value) + 1, 0);
    taken[static_cast<size_t>(value)] = 1;
    host->ranks.push_back(rank);
  };
  const auto elsewhere = [&](int32_t value, int32_t but) {  // other hosts of the chain with it
    int32_t out = 0;
    for (const ReduceWay::Visit& visit : way.chain)
      out += visit.host != but && hosts_.at(visit.host).count(value) != 0;
    return out;
  };
  // A value that few other hosts have comes first, since this host has to give it anyway.
  const auto take_behind = [&](size_t i, int32_t nic) {
    const int32_t here = way.chain[i].host;
    int32_t best = -1;
    int32_t best_rank = -1;
    int32_t fewest = 0;
    for (const auto& [value, ranks] : hosts_.at(here)) {
      if (is_taken(value)) continue;
      for (const int32_t r : ranks) {
        if (network_.nic(r) != nic) continue;
        const int32_t others = elsewhere(value, here);
        if (best < 0 || others < fewest) {
          best = value;
          best_rank = r;
          fewest = others;
        }
      }
    }
    if (best >= 0) take(best, best_rank, &hosts[i]);
    return best_rank;
  };
  // Phase 1: ranks of the ports of the way. The chain may pass a rank only if it gives a value, so a port whose
  // ranks have nothing left to give cannot be used, and the host is entered or left over another. Ports out
  // come first: leaving a host over another NIC than that of the way shifts load between NICs.
  for (size_t i = 0; i < hosts.size(); ++i)
    if (way.chain[i].out >= 0) hosts[i].leave = take_behind(i, way.chain[i].out / 2);
  for (size_t i = 0; i < hosts.size(); ++i) {
    if (i + 1 == hosts.size() && !way.results.empty() && hosts[i].leave < 0)
      hosts[i].leave = take_behind(i, way.results.front().out / 2);  // the end of the chain sends the result
    if (way.chain[i].in < 0) continue;
    hosts[i].enter = take_behind(i, way.chain[i].in / 2);
  }
  // Phase 2: the values that are left, from ranks whose ports inside carry least.
  for (int32_t pass = 0; pass < 2; ++pass) {  // first values that only one host has, then the rest
    for (size_t i = 0; i < hosts.size(); ++i) {
      for (const auto& [value, ranks] : hosts_.at(way.chain[i].host)) {
        if (is_taken(value) || (pass == 0 && elsewhere(value, way.chain[i].host) > 0)) continue;
        const auto cost = [&](int32_t r) {
          return cost_of(network_.local_out(r)) + cost_of(network_.local_in(r));
        };
        take(value,
             *std::min_element(ranks.begin(), ranks.end(),
                               [&](int32_t a, int32_t b) { return cost(a) < cost(b); }),
             &hosts[i]);
      }
    }
  }
  // Phase 3: draw the chain: in at `enter`, round the ranks, out at `leave`.
  Stop at;
  for (size_t i = 0; i < hosts.size(); ++i) {
    Host& host = hosts[i];
    // Each value is assigned to one host: if several have it, a host of the way may get none.
    if (host.ranks.empty()) return {};
    std::sort(host.ranks.begin(), host.ranks.end());
    if (host.leave < 0) host.leave = cheapest(host.ranks, host.ranks.size() > 1 ? host.enter : -1, false);
    if (host.enter < 0 || (host.enter == host.leave && host.ranks.size() > 1))
      host.enter = cheapest(host.ranks, host.leave, true);
    std::vector<int32_t> order{host.enter};
    const auto behind = static_cast<size_t>(std::upper_bound(host.ranks.begin(), host.ranks.end(), host.leave) -
                                            host.ranks.begin());
    for (size_t k = 0; k < host.ranks.size(); ++k) {
      const int32_t r = host.ranks[(behind + k) % host.ranks.size()];
      if (r != host.enter && r != host.leave) order.push_back(r);
    }
    if (host.leave != host.enter) order.push_back(host.leave);
    for (const int32_t r : order) at = at.rank < 0 ? Stop{r, -1} : go(at, r, op);
  }
  if (at.edge >= 0) route_[static_cast<size_t>(at.edge)].last_reduce = true;
  return at;
}

// Routes the chunk along `way`. Returns false if the ranks do not allow that.
bool ReduceRouter::follow(const ReduceWay& way, ReduceOp op) {
  std::vector<Stop> having = having_;
  const auto has_it = [&](int32_t host) {
    return std::any_of(having_.begin(), having_.end(),
                       [&](const Stop& s) { return network_.host(s.rank) == host; });
  };
  // In a way of one host, this host makes the result alone. If it has done so (phase 2 of route()), only the
  // spreading is left.
  const bool makes_it = way.chain.size() == 1 && has_it(way.chain.back().host);
  if (!makes_it) {  // hosts that reduced for themselves have nothing left to give
    if (std::any_of(way.chain.begin(), way.chain.end(),
                    [&](const ReduceWay::Visit& visit) { return has_it(visit.host); }))
      return false;
    const Stop root = reduce_along(way, op);
    if (root.rank < 0) return false;
    visited_.assign(1, root);
    spread_inside(root, root.rank);
    having.insert(having.end(), visited_.begin(), visited_.end());
  }
  // In the order of the way, which puts a host before those that it relays to. The sender is looked up by its
  // NIC. If no rank of that NIC has the result, since the chain ended at another one, the way cannot be
  // followed.
  for (const ReduceWay::Visit& result : way.results) {
    const auto sender = std::find_if(having.begin(), having.end(), [&](const Stop& s) {
      return network_.nic_out(network_.nic(s.rank)) == result.out;
    });
    std::vector<int32_t> entries;
    for (const int32_t r : receivers_.at(result.host))
      if (network_.nic_in(network_.nic(r)) == result.in) entries.push_back(r);
    if (sender == having.end() || entries.empty()) return false;
    const int32_t entry = *std::min_element(entries.begin(), entries.end(), [&](int32_t a, int32_t b) {
      return cost_of(network_.local_out(a)) < cost_of(network_.local_out(b));
    });
    visited_.clear();
    const Stop at = go(*sender, entry, ReduceOp::None);
    visited_.push_back(at);
    spread_inside(at, entry);
    having.insert(having.end(), visited_.begin(), visited_.end());
  }
  return true;
}

}  // namespace meshcast
