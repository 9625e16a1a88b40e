#include "plan/reduce_router.h"

#include <algorithm>
#include <tuple>

namespace meshcast {
namespace {

constexpr size_t kMostRoots = 6;  // ends of the chain tried for one chunk

}  // namespace

int64_t ReduceRouter::rank_load(int32_t rank) const {
  const int32_t nic = network_.nic(rank);
  return load_at(network_.nic_out(nic)) + load_at(network_.nic_in(nic)) + load_at(network_.local_out(rank)) +
         load_at(network_.local_in(rank));
}

ReduceRouter::Stop ReduceRouter::go(Stop from, int32_t to, ReduceOp reduce) {
  route_.push_back({from.rank, to, from.edge, reduce, false});
  const Network::Link link = network_.link(from.rank, to);
  for (const int32_t lane : {link.out, link.in}) {
    // Microseconds, so that squares of any load fit.
    const auto before = static_cast<__int128>(load_at(lane) / 1000);
    load_[static_cast<size_t>(lane)] += transfer_ns(nbytes_, network_.lane_rate(lane));
    const auto after = static_cast<__int128>(load_at(lane) / 1000);
    cost_ += after * after - before * before;
  }
  return {to, static_cast<int32_t>(route_.size()) - 1};
}

// Takes back the edges of the route from the given number on.
void ReduceRouter::undo(size_t edges) {
  while (route_.size() > edges) {
    const Network::Link link = network_.link(route_.back().src, route_.back().dst);
    for (const int32_t lane : {link.out, link.in}) {
      load_[static_cast<size_t>(lane)] -= transfer_ns(nbytes_, network_.lane_rate(lane));
    }
    route_.pop_back();
  }
}

// One rank for each partial value. `few_hosts`: from as few hosts as greedy covering finds, since every further
// host is a further hop between hosts; among hosts that add equally many values, those that need the result
// come first. Otherwise hosts with little load come first, so that replicas take turns.
std::vector<int32_t> ReduceRouter::pick_ranks(const std::map<int32_t, Values>& hosts, bool few_hosts) const {
  std::set<int32_t> missing;
  for (const auto& [host, values] : hosts) {
    for (const auto& [value, ranks] : values) missing.insert(value);
  }
  std::vector<int32_t> out;
  while (!missing.empty()) {
    int32_t best = -1;
    std::tuple<int64_t, bool, int64_t> best_key;
    for (const auto& [host, values] : hosts) {
      int64_t adds = 0;
      for (const auto& [value, ranks] : values) adds += static_cast<int64_t>(missing.count(value));
      if (adds == 0) continue;
      const int64_t load = rank_load(values.begin()->second.front());
      const bool foreign = receivers_.count(host) == 0;
      const std::tuple<int64_t, bool, int64_t> key =
          few_hosts ? std::tuple{-adds, foreign, load} : std::tuple{load, foreign, -adds};
      if (best < 0 || key < best_key) {
        best = host;
        best_key = key;
      }
    }
    for (const auto& [value, ranks] : hosts.at(best)) {
      if (missing.erase(value) == 0) continue;
      out.push_back(*std::min_element(ranks.begin(), ranks.end(),
                                      [&](int32_t a, int32_t b) { return rank_load(a) < rank_load(b); }));
    }
  }
  return out;
}

// A chain through the given ranks that ends at `root`; hosts follow each other in ring order up to that one;
// inside a host the first rank changes with every chunk, so that all its NICs are used.
ReduceRouter::Stop ReduceRouter::reduce_along(const std::vector<int32_t>& values, int32_t root, ReduceOp op) {
  const int32_t home = network_.host(root);
  std::map<int32_t, std::vector<int32_t>> stops;  // ring position -> ranks
  for (const int32_t r : values) {
    const int32_t host = network_.host(r);
    stops[host > home ? host - home : host - home + network_.host_count()].push_back(r);
  }
  std::vector<int32_t> chain;
  for (auto& [position, ranks] : stops) {
    std::sort(ranks.begin(), ranks.end());
    // The root keeps its place at the very end: only the ranks before it take turns.
    const auto end =
        position == network_.host_count()
            ? std::stable_partition(ranks.begin(), ranks.end(), [&](int32_t r) { return r != root; })
            : ranks.end();
    const auto turning = static_cast<size_t>(end - ranks.begin());
    if (turning > 0) {
      // On one host alone, ranks follow each other from behind the root: the ring of an all-reduce.
      const auto behind = static_cast<size_t>(std::upper_bound(ranks.begin(), end, root) - ranks.begin());
      const size_t shift = (stops.size() == 1 ? behind : static_cast<size_t>(turn_)) % turning;
      std::rotate(ranks.begin(), ranks.begin() + static_cast<std::ptrdiff_t>(shift), end);
    }
    chain.insert(chain.end(), ranks.begin(), ranks.end());
  }
  Stop at{chain.front(), -1};
  for (size_t i = 1; i < chain.size(); ++i) at = go(at, chain[i], op);
  route_.back().last_reduce = true;
  return at;
}

// Through the receivers of a host other than `from`, from position `first` on. Returns where the chain ends.
ReduceRouter::Stop ReduceRouter::spread_inside(Stop from, int32_t first) {
  const auto it = receivers_.find(network_.host(first));
  if (it == receivers_.end()) return from;
  const std::vector<int32_t>& ranks = it->second;
  const auto begin = static_cast<size_t>(std::lower_bound(ranks.begin(), ranks.end(), first) - ranks.begin());
  const int32_t skip = from.rank;
  for (size_t i = 0; i < ranks.size(); ++i) {
    const int32_t next = ranks[(begin + i) % ranks.size()];
    if (next != skip) from = go(from, next, ReduceOp::None);
  }
  return from;
}

// A chain through hosts, in ring order from the root's, the one that sends most already at the end.
void ReduceRouter::spread_outside(Stop root, std::vector<int32_t> hosts) {
  if (hosts.empty()) return;
  const int32_t home = network_.host(root.rank);
  const auto ring = [&](int32_t host) {
    return host > home ? host - home : host - home + network_.host_count();
  };
  std::sort(hosts.begin(), hosts.end(), [&](int32_t a, int32_t b) { return ring(a) < ring(b); });
  const auto sends = [&](int32_t host) {
    return load_at(network_.nic_out(network_.nic(receivers_.at(host).front())));
  };
  const auto most =
      std::max_element(hosts.begin(), hosts.end(), [&](int32_t a, int32_t b) { return sends(a) < sends(b); });
  std::rotate(most, most + 1, hosts.end());
  for (const int32_t host : hosts) {
    const std::vector<int32_t>& ranks = receivers_.at(host);
    const int32_t first = *std::min_element(ranks.begin(), ranks.end(), [&](int32_t a, int32_t b) {
      return load_at(network_.nic_in(network_.nic(a))) < load_at(network_.nic_in(network_.nic(b)));
    });
    root = spread_inside(root, first);
  }
}

// Reduces at `root` and passes the result to the receivers on its host and on `others`.
ReduceRouter::Stop ReduceRouter::serve(const std::vector<int32_t>& values, int32_t root,
                                       const std::vector<int32_t>& others, ReduceOp op) {
  const Stop at = reduce_along(values, root, op);
  spread_inside(at, root);
  std::vector<int32_t> hosts = others;
  hosts.erase(std::remove(hosts.begin(), hosts.end(), network_.host(root)), hosts.end());
  spread_outside(at, std::move(hosts));
  return at;
}

// Tries either choice of replicas with every end of the chain, and keeps the cheapest.
ReduceRouter::Stop ReduceRouter::reduce_best(const std::map<int32_t, Values>& hosts,
                                             const std::vector<int32_t>& others, ReduceOp op) {
  const size_t begin = route_.size();
  const __int128 cost = cost_;
  std::vector<int32_t> best_values;
  int32_t best_root = -1;
  __int128 best_cost = 0;
  for (const bool few_hosts : {true, false}) {
    const std::vector<int32_t> values = pick_ranks(hosts, few_hosts);
    const size_t step = values.size() / kMostRoots + 1;
    for (size_t i = static_cast<size_t>(turn_) % step; i < values.size(); i += step) {
      serve(values, values[i], others, op);
      if (best_root < 0 || cost_ < best_cost) {
        best_values = values;
        best_root = values[i];
        best_cost = cost_;
      }
      undo(begin);
      cost_ = cost;
    }
  }
  return serve(best_values, best_root, others, op);
}

const Route& ReduceRouter::route(const Task& task, int64_t nbytes) {
  nbytes_ = nbytes;
  route_.clear();
  cost_ = 0;
  receivers_.clear();
  ++turn_;
  for (const int32_t rank : task.receivers) {
    const int32_t r = network_.index(rank);
    receivers_[network_.host(r)].push_back(r);
  }
  std::map<int32_t, Values> hosts;
  std::set<int32_t> values;
  for (size_t i = 0; i < task.holders.size(); ++i) {
    const int32_t r = network_.index(task.holders[i]);
    hosts[network_.host(r)][task.contribution[i]].push_back(r);
    values.insert(task.contribution[i]);
  }
  std::vector<Stop> ends;  // on hosts that reduced for themselves: the last rank of their chains
  std::vector<int32_t> others;
  for (const auto& [host, ranks] : receivers_) {
    const auto here = hosts.find(host);
    if (here == hosts.end() || here->second.size() < values.size()) {
      others.push_back(host);
      continue;
    }
    const Stop root = reduce_best({*here}, {}, task.reduce);
    ends.push_back(root);
  }
  if (others.empty()) return route_;
  if (ends.empty()) {
    reduce_best(hosts, others, task.reduce);
    return route_;
  }
  const auto sends = [&](const Stop& s) { return load_at(network_.nic_out(network_.nic(s.rank))); };
  spread_outside(*std::min_element(ends.begin(), ends.end(),
                                   [&](const Stop& a, const Stop& b) { return sends(a) < sends(b); }),
                 std::move(others));
  return route_;
}

void draft_reductions(const std::vector<Task>& tasks, const std::vector<Bundle>& bundles,
                      const Network& network, int64_t chunk_bytes, Drafter* drafter) {
  ReduceRouter router(network);
  for (const Bundle& bundle : bundles) {
    const Task& task = tasks[static_cast<size_t>(bundle.tasks.front())];
    if (task.reduce == ReduceOp::None) continue;
    const Drafter::Range chunks = drafter->cut(bundle, chunk_bytes);
    for (int32_t c = chunks.first; c < chunks.last; ++c) {
      drafter->send(c, router.route(task, drafter->chunk_bytes(c)));
    }
  }
}

}  // namespace meshcast
