#include "plan/reduce_router.h"

#include <algorithm>
#include <map>
#include <tuple>

namespace meshcast {

int64_t ReduceRouter::rank_load(int32_t rank) const {
  const int32_t nic = network_.nic(rank);
  return load_at(network_.nic_out(nic)) + load_at(network_.nic_in(nic)) + load_at(network_.local_out(rank)) +
         load_at(network_.local_in(rank));
}

void ReduceRouter::add_edge(int32_t src, int32_t dst, Route* route, int64_t nbytes) {
  route->push_back({src, dst, static_cast<int32_t>(route->size()) - 1});
  const Network::Link link = network_.link(src, dst);
  load_[static_cast<size_t>(link.out)] += transfer_ns(nbytes, network_.lane_rate(link.out));
  load_[static_cast<size_t>(link.in)] += transfer_ns(nbytes, network_.lane_rate(link.in));
}

// One rank for each partial value. Values with few replicas choose first; hosts that are in use already come
// before idle ones, since every further host is a further hop between hosts.
std::vector<int32_t> ReduceRouter::choose_values(const Task& task) const {
  std::map<int32_t, std::vector<int32_t>> replicas;
  for (size_t i = 0; i < task.holders.size(); ++i) {
    replicas[task.contribution[i]].push_back(network_.index(task.holders[i]));
  }
  std::vector<std::pair<size_t, int32_t>> values;
  for (const auto& [value, ranks] : replicas) values.emplace_back(ranks.size(), value);
  std::sort(values.begin(), values.end());
  std::vector<char> used(static_cast<size_t>(network_.host_count()), 0);
  std::vector<int32_t> out;
  for (const auto& [count, value] : values) {
    int32_t best = -1;
    std::tuple<bool, int64_t> best_key;
    for (const int32_t r : replicas[value]) {
      const std::tuple<bool, int64_t> key{!used[static_cast<size_t>(network_.host(r))], rank_load(r)};
      if (best < 0 || key < best_key) {
        best = r;
        best_key = key;
      }
    }
    used[static_cast<size_t>(network_.host(best))] = 1;
    out.push_back(best);
  }
  return out;
}

Route ReduceRouter::route(const Task& task, int64_t nbytes) {
  const std::vector<int32_t> values = choose_values(task);
  std::map<int32_t, std::vector<int32_t>> receivers;  // by host
  for (const int32_t rank : task.receivers) {
    const int32_t r = network_.index(rank);
    receivers[network_.host(r)].push_back(r);
  }
  const auto needs = [&](int32_t r) {
    const auto it = receivers.find(network_.host(r));
    return it != receivers.end() && std::find(it->second.begin(), it->second.end(), r) != it->second.end();
  };
  // The end of the chain: a rank that needs the result saves a hop, a host that does saves one between hosts.
  int32_t root = values.front();
  const auto root_key = [&](int32_t r) {
    return std::tuple<bool, bool, int64_t, int32_t>{receivers.count(network_.host(r)) == 0, !needs(r), rank_load(r), r};
  };
  for (const int32_t r : values) {
    if (root_key(r) < root_key(root)) root = r;
  }
  const int32_t home = network_.host(root);
  // Hosts in ring order behind the root's, which comes last; inside a host the first rank changes with every
  // chunk, so that all its NICs are used, but the root is at the very end.
  const auto ring = [&](int32_t host) {
    return host > home ? host - home : host - home + network_.host_count();
  };
  std::map<int32_t, std::vector<int32_t>> stops;  // ring position -> ranks
  for (const int32_t r : values) stops[ring(network_.host(r))].push_back(r);
  std::vector<int32_t> chain;
  for (auto& [position, ranks] : stops) {
    std::sort(ranks.begin(), ranks.end());
    size_t shift = static_cast<size_t>(turn_) % ranks.size();
    if (position == network_.host_count()) {
      shift = static_cast<size_t>(std::find(ranks.begin(), ranks.end(), root) - ranks.begin() + 1) % ranks.size();
    }
    for (size_t i = 0; i < ranks.size(); ++i) chain.push_back(ranks[(i + shift) % ranks.size()]);
  }
  ++turn_;
  Route out;
  for (size_t i = 1; i < chain.size(); ++i) {
    add_edge(chain[i - 1], chain[i], &out, nbytes);
    out.back().reduce = task.reduce;
    out.back().last_reduce = i + 1 == chain.size();
  }
  // From the root on: its own host, then the others in ring order, the one that sends most already at the end.
  std::vector<int32_t> order;
  for (const auto& [host, ranks] : receivers) {
    if (host != home) order.push_back(host);
  }
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) { return ring(a) < ring(b); });
  const auto sends = [&](int32_t host) { return load_at(network_.nic_out(network_.nic(receivers.at(host).front()))); };
  if (!order.empty()) {
    const auto most = std::max_element(order.begin(), order.end(),
                                       [&](int32_t a, int32_t b) { return sends(a) < sends(b); });
    std::rotate(most, most + 1, order.end());
  }
  if (receivers.count(home) != 0) order.insert(order.begin(), home);
  int32_t at = root;
  for (const int32_t host : order) {
    std::vector<int32_t>& ranks = receivers.at(host);
    size_t first = 0;
    if (host == home) {  // behind the root, as the reduction came
      first = static_cast<size_t>(std::upper_bound(ranks.begin(), ranks.end(), root) - ranks.begin());
    } else {
      for (size_t i = 1; i < ranks.size(); ++i) {
        if (load_at(network_.nic_in(network_.nic(ranks[i]))) < load_at(network_.nic_in(network_.nic(ranks[first])))) {
          first = i;
        }
      }
    }
    for (size_t i = 0; i < ranks.size(); ++i) {
      const int32_t next = ranks[(first + i) % ranks.size()];
      if (next == root) continue;
      add_edge(at, next, &out, nbytes);
      at = next;
    }
  }
  return out;
}

void draft_reductions(const std::vector<Task>& tasks, const std::vector<Bundle>& bundles, const Network& network,
                      int64_t chunk_bytes, Drafter* drafter) {
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
