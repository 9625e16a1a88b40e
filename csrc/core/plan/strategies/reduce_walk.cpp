#include <algorithm>
#include <tuple>

#include "plan/strategies/reduce_router.h"

// Builds a route once its participants are chosen: chains that reduce, trees that spread.
namespace meshcast {

// Every edge counts at once: its increase of the weight in cost_, the time on both its ports in load_. So later
// edges of the same route include the earlier ones, and a route that crosses one NIC twice pays for it.
ReduceRouter::Stop ReduceRouter::go(Stop from, int32_t to, ReduceOp reduce) {
  route_.push_back({from.rank, to, from.edge, reduce, false});
  const Network::Link link = network_.link(from.rank, to);
  for (const int32_t port : {link.out, link.in}) {
    cost_ += cost_of(port);
    load_[static_cast<size_t>(port)] += hop_ns(port);
  }
  return {to, static_cast<int32_t>(route_.size()) - 1};
}

// Undoes the edges of the route from the given number on. Loads only: the caller saves cost_ and restores it.
void ReduceRouter::undo(size_t edges) {
  while (route_.size() > edges) {
    const Network::Link link = network_.link(route_.back().src, route_.back().dst);
    for (const int32_t port : {link.out, link.in}) {
      load_[static_cast<size_t>(port)] -= hop_ns(port);
    }
    route_.pop_back();
  }
}

// A chain through the given ranks that ends at `root`. It begins on the host that is most costly to enter; the
// others follow each other in ring order up to the root's. Each host is entered and left over its least loaded
// NICs. With several rounds, each through a part of every host's ranks, NICs carry more and local ports less.
//
// Worked example. Values lie on host 0 (ranks 0 and 1), host 1 (ranks 2 and 3) and host 2 (rank 4, the root);
// each host has one NIC, and all loads are equal.
//   hosts    all cost the same to enter, so the chain begins on host 0, the first; 1 is next, 2 is home
//   host 0   left over rank 0, so rank 1 begins: 1 -> 0
//   host 1   entered at rank 2, left over rank 3: 0 -> 2 -> 3
//   host 2   3 -> 4
// Five values take the four hops 1 -> 0 -> 2 -> 3 -> 4, two of them between hosts. The last one is marked: the
// result arrives there.
ReduceRouter::Stop ReduceRouter::reduce_along(const std::vector<int32_t>& values, int32_t root, size_t rounds,
                                              ReduceOp op) {
  // Phase 1: the order of the hosts. The first one is not entered at all, which saves most where entering
  // costs most.
  const int32_t home = network_.host(root);
  std::map<int32_t, std::vector<int32_t>> by_host;
  for (const int32_t r : values) by_host[network_.host(r)].push_back(r);
  int32_t first = home;
  __int128 most = -1;
  std::vector<std::pair<int32_t, int32_t>> ring;  // position, host
  for (auto& [host, ranks] : by_host) {
    std::sort(ranks.begin(), ranks.end());
    if (host == home) continue;
    ring.emplace_back(host > home ? host - home : host - home + network_.host_count(), host);
    const __int128 cost = entry_cost(cheapest(ranks, -1, true));
    if (cost > most) {
      most = cost;
      first = host;
    }
  }
  for (auto& [position, host] : ring) position = host == first ? -1 : position;
  ring.emplace_back(INT32_MAX, home);
  std::sort(ring.begin(), ring.end());
  // Phase 2: the visits. In round k of K a host gives the k-th part of its ranks; a host that has nothing in a
  // round is skipped, and the root's part comes last of all.
  std::vector<std::vector<int32_t>> visits;  // ranks, the same host
  for (size_t round = 0; round < rounds; ++round) {
    for (const auto& [position, host] : ring) {
      std::vector<int32_t> ranks = by_host[host];
      if (rounds > 1) {                                                        // the root comes last of all
        const auto turn = static_cast<int64_t>((turn_ >> 40) % ranks.size());  // not always the same parts
        std::rotate(ranks.begin(), ranks.begin() + turn, ranks.end());
        const auto at = std::find(ranks.begin(), ranks.end(), root);
        if (at != ranks.end()) std::rotate(at, at + 1, ranks.end());
        const auto cut = [&](size_t k) {
          return ranks.begin() + static_cast<int64_t>(ranks.size() * k / rounds);
        };
        ranks = {cut(round), cut(round + 1)};
        std::sort(ranks.begin(), ranks.end());
      }
      if (!ranks.empty()) visits.push_back(std::move(ranks));
    }
  }
  // Phase 3: through the ranks of every visit. A chain passes each rank once, so a host of several ranks is
  // entered at one of them and left from another.
  Stop at;
  for (size_t v = 0; v < visits.size(); ++v) {
    const std::vector<int32_t>& ranks = visits[v];
    // The cheapest rank to enter at is reserved for that; the exit is the cheapest of the others.
    const int32_t last =
        v + 1 == visits.size()
            ? root
            : cheapest(ranks, ranks.size() > 1 && v > 0 ? cheapest(ranks, -1, true) : -1, false);
    // On a single host, ranks follow each other after the root: the ring of an all-reduce.
    const int32_t enter = visits.size() == 1 ? -1 : cheapest(ranks, last, true);
    std::vector<int32_t> order;
    if (enter >= 0) order.push_back(enter);
    const auto behind = static_cast<size_t>(std::upper_bound(ranks.begin(), ranks.end(), last) - ranks.begin());
    for (size_t i = 0; i < ranks.size(); ++i) {
      const int32_t r = ranks[(behind + i) % ranks.size()];
      if (r != enter && r != last) order.push_back(r);
    }
    // The first rank receives nothing: use the one that receives most otherwise.
    if (enter < 0 && !order.empty()) {
      std::rotate(order.begin(),
                  std::max_element(order.begin(), order.end(),
                                   [&](int32_t a, int32_t b) {
                                     return cost_of(network_.local_in(a)) < cost_of(network_.local_in(b));
                                   }),
                  order.end());
    }
    if (last != enter) order.push_back(last);
    for (const int32_t r : order) at = at.rank < 0 ? Stop{r, -1} : go(at, r, op);
  }
  // A chain of one rank has no edge: that rank alone has every value, and its own is the result.
  if (at.edge >= 0) route_[static_cast<size_t>(at.edge)].last_reduce = true;
  return at;
}

// Spreads the result to the receivers of the host of `first`, from there on: as a chain, or, if local ports
// limit the plan, each from the rank that has least to send so far.
ReduceRouter::Stop ReduceRouter::spread_inside(Stop from, int32_t first) {
  // Phase 1: the receivers in ring order after `first`, without the one that already has the result.
  const auto it = receivers_.find(network_.host(first));
  if (it == receivers_.end()) return from;
  const std::vector<int32_t>& ranks = it->second;
  const auto begin = static_cast<size_t>(std::lower_bound(ranks.begin(), ranks.end(), first) - ranks.begin());
  std::vector<int32_t> order;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[(begin + i) % ranks.size()] != from.rank) order.push_back(ranks[(begin + i) % ranks.size()]);
  }
  if (order.empty()) return from;
  if (inside_limits_) {
    std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      const __int128 first_cost = cost_of(network_.local_out(a)), second_cost = cost_of(network_.local_out(b));
      return first_cost != second_cost ? first_cost < second_cost : a < b;
    });
  }
  // Phase 2: the end of the chain, whose port out stays unused: the rank that sends most otherwise.
  const auto most = std::max_element(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return cost_of(network_.local_out(a)) < cost_of(network_.local_out(b));
  });
  std::rotate(most, most + 1, order.end());
  // Phase 3: the edges. In a chain each sender sends once. In a tree the port out with the cheapest next hop
  // sends, so ranks whose ports inside are busy get no children.
  std::vector<Stop> senders{from};
  for (const int32_t next : order) {
    const auto sender = std::min_element(senders.begin(), senders.end(), [&](const Stop& a, const Stop& b) {
      return cost_of(network_.local_out(a.rank)) < cost_of(network_.local_out(b.rank));
    });
    from = go(inside_limits_ ? *sender : senders.back(), next, ReduceOp::None);
    senders.push_back(from);
    visited_.push_back(from);
  }
  return from;
}

// A tree through hosts: each is served over the least loaded NIC of all ranks that have the result by then;
// hosts that can best pass it on come first.
void ReduceRouter::spread_outside(std::vector<Stop> having, const std::vector<int32_t>& hosts) {
  // Phase 1: a heap of NICs that can send, keyed by the cost of the next hop out of them.
  std::vector<int32_t> used;
  std::vector<std::pair<__int128, int32_t>> heap;  // (-cost, -number of the stop)
  std::vector<Stop> senders;
  const auto open = [&](const std::vector<Stop>& stops) {
    for (const Stop& stop : stops) {  // one for each NIC: the first that has the chunk
      const int32_t nic = network_.nic(stop.rank);
      if (nic_edge_[static_cast<size_t>(nic)] != kUnseen) continue;
      nic_edge_[static_cast<size_t>(nic)] = stop.edge;
      used.push_back(nic);
      senders.push_back(stop);
      heap.emplace_back(-exit_cost(stop.rank), -static_cast<int32_t>(senders.size() - 1));
      std::push_heap(heap.begin(), heap.end());
    }
  };
  open(having);
  // Phase 2: the hosts to be served, those first that will be cheap senders themselves.
  const int32_t home = network_.host(having.front().rank);
  std::vector<std::tuple<__int128, int32_t, int32_t>> waiting;  // cost to pass on, ring, host
  for (const int32_t host : hosts) {
    waiting.emplace_back(exit_cost(cheapest(receivers_.at(host), -1, false)),
                         host > home ? host - home : host - home + network_.host_count(), host);
  }
  std::sort(waiting.begin(), waiting.end());
  // Phase 3: each from the cheapest NIC. Costs only grow, so a top of the heap that is still current is the
  // cheapest of all.
  for (const auto& [cost, ring, host] : waiting) {
    while (true) {  // costs only grow: a stale entry sinks to its place
      std::pop_heap(heap.begin(), heap.end());
      const Stop sender = senders[static_cast<size_t>(-heap.back().second)];
      const __int128 now = -exit_cost(sender.rank);
      const bool fresh = now == heap.back().first;
      if (fresh) {
        visited_.clear();
        const Stop at = go(sender, cheapest(receivers_.at(host), -1, true), ReduceOp::None);
        visited_.push_back(at);
        spread_inside(at, at.rank);
        heap.back().first = -exit_cost(sender.rank);
      } else {
        heap.back().first = now;
      }
      std::push_heap(heap.begin(), heap.end());
      if (fresh) break;
    }
    const std::vector<Stop> reached = visited_;
    open(reached);
  }
  // Resets only the marks of the used NICs for the next chunk.
  for (const int32_t nic : used) nic_edge_[static_cast<size_t>(nic)] = kUnseen;
}

// Reduces at `root` and passes the result to the receivers on its host and on `others`.
void ReduceRouter::serve(const std::vector<int32_t>& values, int32_t root, size_t rounds,
                         const std::vector<int32_t>& others, ReduceOp op) {
  const Stop at = reduce_along(values, root, rounds, op);
  visited_.assign(1, at);
  spread_inside(at, root);
  std::vector<int32_t> hosts = others;
  hosts.erase(std::remove(hosts.begin(), hosts.end(), network_.host(root)), hosts.end());
  if (hosts.empty()) return;
  std::vector<Stop> from = visited_;
  from.insert(from.end(), having_.begin(), having_.end());
  spread_outside(std::move(from), hosts);
}

}  // namespace meshcast
