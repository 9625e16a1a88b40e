#include "plan/bound/reduce_ways.h"

#include <algorithm>
#include <map>

#include "plan/bound/sort_unique.h"

namespace meshcast {
namespace {

int32_t cheapest_port(const std::vector<int32_t>& ports, const ReduceWays::Prices& price) {
  return *std::min_element(ports.begin(), ports.end(), [&](int32_t a, int32_t b) {
    return price[static_cast<size_t>(a)] < price[static_cast<size_t>(b)];
  });
}

}  // namespace

// Sites are the hosts that have values or need the result, ascending. Values are bits of a word, so a box can
// have at most 64.
ReduceWays::ReduceWays(const Task& task, const Network& network) {
  std::map<int32_t, Site> sites;
  for (size_t i = 0; i < task.holders.size(); ++i) {
    const int32_t r = network.index(task.holders[i]);
    Site& site = sites[network.host(r)];
    if (task.contribution[i] >= 64) {
      countable_ = false;
      return;
    }
    site.values |= uint64_t{1} << task.contribution[i];
    site.out.push_back(network.nic_out(network.nic(r)));
    site.in.push_back(network.nic_in(network.nic(r)));
    all_ |= site.values;
  }
  for (const int32_t rank : task.receivers) {
    const int32_t r = network.index(rank);
    Site& site = sites[network.host(r)];
    site.needs = true;
    site.need_out.push_back(network.nic_out(network.nic(r)));
    site.need_in.push_back(network.nic_in(network.nic(r)));
  }
  for (auto& [host, site] : sites) {
    site.host = host;
    site.root_out = site.out;
    site.root_out.insert(site.root_out.end(), site.need_out.begin(), site.need_out.end());
    for (std::vector<int32_t>* ports : {&site.out, &site.in, &site.need_out, &site.need_in, &site.root_out})
      sort_unique(ports);
    travels_ = travels_ || (site.needs && site.values != all_);
    site.complete = site.values == all_;
    sites_.push_back(std::move(site));
  }
}

std::vector<int32_t> ReduceWay::ports() const {
  std::vector<int32_t> out;
  for (const std::vector<Visit>* visits : {&chain, &results}) {
    for (const Visit& visit : *visits) {
      if (visit.in >= 0) out.push_back(visit.in);
      if (visit.out >= 0) out.push_back(visit.out);
    }
  }
  return out;
}

__int128 ReduceWays::cheapest(const Prices& price, ReduceWay* way) {
  way->chain.clear();
  way->results.clear();
  if (!travels_ || !countable_) return 0;
  const auto at = [&](int32_t port) { return price[static_cast<size_t>(port)]; };
  // Phase 1: at these prices, each site's cheapest ports; the price of a set of sites as a chain's middle; and
  // the cost of spreading the result, as if the root were on none of the hosts that need it.
  int32_t relay = -1;  // port out of any host that gets the result or makes it alone
  size_t relay_site = 0;
  int32_t alone = -1;  // port out of hosts that make it alone
  __int128 results = 0;
  int32_t results_count = 0;  // as if every host that needs the result took it in
  cover_.clear();
  for (size_t h = 0; h < sites_.size(); ++h) {
    Site& site = sites_[h];
    if (site.values != 0) {
      site.cheapest_out = cheapest_port(site.out, price);
      site.cheapest_in = cheapest_port(site.in, price);
      site.cheapest_root_out = cheapest_port(site.root_out, price);
      cover_.add(site.values, at(site.cheapest_out) + at(site.cheapest_in), static_cast<int32_t>(h));
    }
    if (!site.needs) continue;
    const int32_t out = site.makes_it() ? site.cheapest_root_out : cheapest_port(site.need_out, price);
    if (relay < 0 || at(out) < at(relay)) {
      relay = out;
      relay_site = h;
    }
    if (site.makes_it()) {
      if (alone < 0 || at(out) < at(alone)) alone = out;
      continue;
    }
    site.cheapest_need_in = cheapest_port(site.need_in, price);
    results += at(site.cheapest_need_in);
    ++results_count;
  }
  // The first copy of the result leaves the root, or a host that made it alone.
  const auto emit = [&](const Site& root) {
    const int32_t own = root.cheapest_root_out;
    return alone >= 0 && at(alone) < at(own) ? alone : own;
  };
  // Phase 2: all pairs of a root z and a first host f, since the chain does not leave the one and does not
  // enter the other. The rest of the chain is a set cover of the values that these two do not have. Its price
  // does not depend on the order of the chain: each host in the middle is entered once and left once.
  __int128 best = -1;
  size_t best_root = 0, best_first = 0;
  std::vector<int32_t> best_others;
  // Many pairs miss the same values, so covers are kept during the call.
  std::map<uint64_t, std::pair<__int128, std::vector<int32_t>>> covers;  // by the values missing at both ends
  for (size_t z = 0; z < sites_.size(); ++z) {
    const Site& root = sites_[z];
    if (root.values == 0) continue;
    __int128 sent = results;
    int32_t count = results_count;
    if (root.needs && !root.makes_it()) {
      sent -= at(root.cheapest_need_in);
      --count;
    }
    if (count > 0) {
      const __int128 first = at(emit(root));
      // One emission, then every further copy from the cheaper sender: the emitter, or a host that relays.
      sent += first + (count - 1) * std::min(first, at(relay));
    }
    // A chain of one host. Longer ones that end there would only cost more.
    if (root.values == all_) {
      if (best < 0 || sent < best) {
        best = sent;
        best_root = best_first = z;
        best_others.clear();
      }
      continue;
    }
    for (size_t f = 0; f < sites_.size(); ++f) {
      const Site& first = sites_[f];
      if (f == z || first.values == 0) continue;
      __int128 cost = sent + at(root.cheapest_in) + at(first.cheapest_out);
      if (best >= 0 && cost >= best) continue;
      const uint64_t missing = all_ & ~root.values & ~first.values;
      const auto [known, fresh] = covers.try_emplace(missing);
      if (fresh) known->second.first = cover_.solve(missing, &known->second.second);
      cost += known->second.first;
      if (best >= 0 && cost >= best) continue;
      best = cost;
      best_root = z;
      best_first = f;
      best_others = known->second.second;
    }
  }
  // Phase 3: the way in full: the chain, then the results with the relay's host first.
  const Site& root = sites_[best_root];
  if (best_first != best_root)
    way->chain.push_back({sites_[best_first].host, -1, sites_[best_first].cheapest_out});
  for (const int32_t h : best_others) {
    const Site& site = sites_[static_cast<size_t>(h)];
    way->chain.push_back({site.host, site.cheapest_in, site.cheapest_out});
  }
  way->chain.push_back({root.host, best_first == best_root ? -1 : root.cheapest_in, -1});
  // The relaying host is the first to get the result, if others relay cheaper than the root emits.
  const int32_t own = emit(root);
  const bool relays = at(relay) < at(own);
  for (size_t h = 0; h < sites_.size(); ++h) {
    const Site& site = sites_[h];
    if (!site.needs || site.makes_it() || h == best_root) continue;
    const bool first = relays && h == relay_site;
    way->results.push_back({site.host, site.cheapest_need_in, relays && !first ? relay : own});
    if (first) std::rotate(way->results.begin(), way->results.end() - 1, way->results.end());
  }
  return best;
}

}  // namespace meshcast
