#include "plan/bound/bound.h"

#include <algorithm>
#include <map>
#include <set>

#include "plan/bound/port_flow.h"
#include "plan/bound/reduce_mix.h"

namespace meshcast {
namespace {

// Highest level of any port of the items under their balanced shares: a sufficient time for them.
int64_t enough_time(const std::vector<const PortItem*>& items, const Network& network) {
  std::map<int32_t, int64_t> load;
  for (const PortItem* item : items) {
    for (size_t k = 0; k < item->ports.size(); ++k) load[item->ports[k]] += item->share[k];
  }
  int64_t out = 0;
  for (const auto& [port, bytes] : load) out = std::max(out, transfer_ns(bytes, network.port_rate(port)));
  return out;
}

// The least number of ports of the items of append_copy_items.
size_t least_copy_ports(const Parties& parties, const Network& network, const std::vector<char>& hot_hosts) {
  size_t hot = 0, most = 0;  // hosts, NICs of one of them
  for (const Party& party : parties.receivers) hot += hot_hosts[static_cast<size_t>(party.host)] != 0;
  if (hot == 0) return 0;
  std::map<int32_t, std::set<int32_t>> nics;  // by host
  for (const std::vector<Party>* some : {&parties.holders, &parties.receivers})
    for (const Party& party : *some)
      for (const int32_t r : party.ranks) nics[party.host].insert(network.nic(r));
  size_t all = 0;
  for (const auto& [_, its] : nics) {
    all += its.size();
    most = std::max(most, its.size());
  }
  return hot * (all - most);
}

struct HostInput {
  int64_t rate = 0;       // of all its NICs that ranks of the plan use
  int64_t mandatory = 0;  // bytes that must enter it
};

}  // namespace

PortDemand find_port_demand(const std::vector<Task>& tasks, const std::vector<Bundle>& bundles,
                            const Network& network) {
  PortDemand out;
  const auto hosts = static_cast<size_t>(network.host_count());
  out.parties.resize(bundles.size());
  out.ways.resize(bundles.size());
  out.hot_hosts.assign(hosts, 0);
  // Phase 1: the hosts that take part in each bundle, and the simple sums: bytes that must enter a host or
  // reach a rank.
  std::vector<HostInput> input(hosts);
  std::vector<int64_t> inside(hosts, 0);  // most bytes that one rank of a host could have to pass on
  std::vector<int64_t> local_only(static_cast<size_t>(network.rank_count()), 0);
  std::vector<int64_t> received(static_cast<size_t>(network.rank_count()), 0);
  std::vector<PortItem> reducing, whole;  // two ways to count, which differ in the ports in
  std::vector<PortItem> by_rank[2];       // the same by rank
  std::vector<const Task*> reduced;
  std::vector<int64_t> reduced_bytes;
  std::vector<size_t> reduced_bundles;
  std::vector<char> seen(static_cast<size_t>(network.nic_count()), 0);
  for (int32_t r = 0; r < network.rank_count(); ++r) {
    if (seen[static_cast<size_t>(network.nic(r))]++) continue;
    input[static_cast<size_t>(network.host(r))].rate += network.port_rate(network.nic_in(network.nic(r)));
  }
  for (size_t b = 0; b < bundles.size(); ++b) {
    const Task& task = tasks[static_cast<size_t>(bundles[b].tasks.front())];
    if (task.reduce != ReduceOp::None) {
      reduced.push_back(&task);
      reduced_bytes.push_back(bundles[b].nbytes);
      reduced_bundles.push_back(b);
      // Both ways of counting are valid for every plan, but not in one flow problem: their items would count
      // the same hop twice. So each is a separate problem, and the larger time counts.
      append_reduce_items(static_cast<int32_t>(b), bundles[b].nbytes, task, network, false, &reducing);
      append_reduce_items(static_cast<int32_t>(b), bundles[b].nbytes, task, network, true, &whole);
      for (const bool whole_results : {false, true})
        append_reduce_rank_items(static_cast<int32_t>(b), bundles[b].nbytes, task, network, whole_results,
                                 &by_rank[whole_results]);
      for (const int32_t rank : task.receivers)
        received[static_cast<size_t>(network.index(rank))] += bundles[b].nbytes;
      continue;
    }
    out.parties[b] = find_parties(task, network);
    const Parties& parties = out.parties[b];
    append_network_items(static_cast<int32_t>(b), bundles[b].nbytes, parties, network, &out.items);
    for (size_t p = 0; p < parties.receivers.size(); ++p) {
      const auto host = static_cast<size_t>(parties.receivers[p].host);
      if (parties.remote(p)) input[host].mandatory += bundles[b].nbytes;
      if (!parties.remote(p) || parties.receivers[p].ranks.size() > 1) inside[host] += bundles[b].nbytes;
      for (const int32_t r : parties.receivers[p].ranks) {
        received[static_cast<size_t>(r)] += bundles[b].nbytes;
        if (parties.one_host) local_only[static_cast<size_t>(r)] += bundles[b].nbytes;
      }
    }
  }
  // Phase 2: ports between hosts. `bound` only grows: least_time starts from it, and a problem whose balanced
  // shares fit into it needs no flow.
  balance_ports(network, &out.items);
  balance_ports(network, &reducing);

  int64_t bound = 0;
  // All emissions of all bundles are one problem, as hosts share what they relay. Bytes that enter a host are a
  // problem of that host alone.
  std::vector<const PortItem*> sending;
  std::map<int32_t, std::vector<const PortItem*>> entering;  // by host
  for (const PortItem& item : out.items) {
    if (item.kind == PortItem::Kind::NicOut) sending.push_back(&item);
    if (item.kind == PortItem::Kind::NicIn) {
      const Parties& parties = out.parties[static_cast<size_t>(item.bundle)];
      entering[parties.receivers[static_cast<size_t>(item.party)].host].push_back(&item);
    }
  }
  for (const std::vector<PortItem>* counted : {&reducing, &whole}) {
    std::vector<const PortItem*> reduced_input, reduced_inside;
    for (const PortItem& item : *counted) {
      if (item.kind == PortItem::Kind::NicOut && counted == &reducing) sending.push_back(&item);
      if (item.kind == PortItem::Kind::NicIn) reduced_input.push_back(&item);
      if (item.kind == PortItem::Kind::Local) reduced_inside.push_back(&item);
    }
    if (!reduced_input.empty()) {  // hops of a reduction may enter several hosts: one problem for all of them
      for (const auto& [host, items] : entering)
        reduced_input.insert(reduced_input.end(), items.begin(), items.end());
      bound = least_time(reduced_input, network, bound);
    }
    if (!reduced_inside.empty()) bound = least_time(reduced_inside, network, bound);
  }
  for (const std::vector<PortItem>& items : by_rank) {
    std::vector<const PortItem*> counted;
    for (const PortItem& item : items) counted.push_back(&item);
    if (!counted.empty()) bound = least_time(counted, network, bound);
  }
  // Phase 3: the linear program over ways (find_reduce_mix), which takes into account which hosts can be on one
  // chain.
  if (!reduced.empty()) {
    ReduceMix mix = find_reduce_mix(reduced, reduced_bytes, out.items, network);
    bound = std::max(bound, mix.bound_ns);
    for (size_t i = 0; i < reduced.size(); ++i) out.ways[reduced_bundles[i]] = std::move(mix.ways[i]);
  }
  for (const auto& [host, items] : entering) {
    const HostInput& in = input[static_cast<size_t>(host)];
    bound = std::max(bound, transfer_ns(in.mandatory, in.rate));
  }
  for (const auto& [host, items] : entering) {
    if (enough_time(items, network) > bound) bound = least_time(items, network, bound);
  }
  if (enough_time(sending, network) > bound) bound = least_time(sending, network, bound);

  // Phase 4: single ranks: bytes that can only come from inside, and all bytes received over both ports in.
  for (int32_t r = 0; r < network.rank_count(); ++r) {
    const int64_t local = network.port_rate(network.local_in(r));
    bound = std::max(bound, transfer_ns(local_only[static_cast<size_t>(r)], local));
    bound = std::max(bound, transfer_ns(received[static_cast<size_t>(r)],
                                        local + network.port_rate(network.nic_in(network.nic(r)))));
  }
  // Phase 5: ports inside hosts, if they might limit the plan. Items of all hosts would be many, and most hosts
  // have time to spare.
  std::vector<int64_t> local_rate(hosts, 0);
  for (int32_t r = 0; r < network.rank_count(); ++r) {
    local_rate[static_cast<size_t>(network.host(r))] = network.port_rate(network.local_out(r));
  }
  for (size_t h = 0; h < hosts; ++h) {
    // If half the time is enough for one rank to pass on everything, the order inside the host is free.
    out.hot_hosts[h] = inside[h] > 0 && transfer_ns(inside[h], local_rate[h]) > bound / 2;
  }
  std::vector<PortItem> local;
  for (size_t b = 0; b < bundles.size(); ++b) {  // bundles to be reduced have no parties and add none
    // The plan's shares; the bound counts arrivals and copies, below.
    append_local_items(static_cast<int32_t>(b), bundles[b].nbytes, out.parties[b], network, out.hot_hosts,
                       &local);
  }
  balance_ports(network, &local);
  for (const bool into : {false, true}) {
    std::vector<PortItem> arriving;
    for (size_t b = 0; b < bundles.size(); ++b) {
      append_arrival_items(static_cast<int32_t>(b), bundles[b].nbytes, out.parties[b], network, out.hot_hosts,
                           into, &arriving);
    }
    balance_ports(network, &arriving);
    std::map<int32_t, std::vector<const PortItem*>> by_host;
    for (const PortItem& item : arriving) {
      const Parties& parties = out.parties[static_cast<size_t>(item.bundle)];
      by_host[parties.receivers[static_cast<size_t>(item.party)].host].push_back(&item);
    }
    for (const auto& [host, items] : by_host) {
      if (enough_time(items, network) > bound) bound = least_time(items, network, bound);
    }
  }
  // Phase 6: as before, but in one flow problem. All hosts together, since bytes that enter one over NICs keep
  // those of others busy.
  size_t entries = 0;
  for (const Parties& parties : out.parties) entries += least_copy_ports(parties, network, out.hot_hosts);
  for (const bool into : {false, true}) {
    if (entries > kMaxFlowEntries) break;  // least_time would give up too, after much time and memory
    std::vector<PortItem> copied;
    for (size_t b = 0; b < bundles.size(); ++b)
      append_copy_items(static_cast<int32_t>(b), bundles[b].nbytes, out.parties[b], network, out.hot_hosts,
                        into, &copied);
    std::vector<const PortItem*> all = sending;
    for (const PortItem& item : copied) all.push_back(&item);
    if (!copied.empty()) bound = least_time(all, network, bound);
  }
  // Every plan has the latency of its last hop; a plan without hops takes no time.
  out.items.insert(out.items.end(), local.begin(), local.end());
  out.bound_ns = bundles.empty() ? 0 : bound + network.latency_ns();
  return out;
}

}  // namespace meshcast
