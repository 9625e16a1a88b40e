#include "plan/strategies/detours.h"

#include <algorithm>
#include <map>

#include "plan/bound/flow.h"
#include "plan/bound/port_flow.h"

namespace meshcast {
namespace {

constexpr size_t kMostEntries = 100'000;  // ports of all items: the flows are solved some ten times
constexpr int kHalvings = 10;
constexpr int64_t kLeastGain = 50;  // less than 1/50 of the bound is not worth the traffic between hosts

int64_t bytes_in(int64_t ns, int64_t rate) {
  return static_cast<int64_t>(static_cast<__int128>(ns) * rate / 1000000000);
}

// Worked example. Host H has ranks 0 to 3 and one NIC of 10 bytes/s; inside, every rank sends and takes in 10
// bytes/s. Rank 0 holds a box of 100 bytes that ranks 1 to 3 need; another host has it too, and a NIC like
// H's.
//   without     each of the three takes in 100 bytes from inside: done at 10 s
//   T = 7.5 s   each takes in 75 bytes from inside, so 25 are over. Three times 25 are the 75 bytes that
//               H's NIC takes in by then, and that the other host's NIC sends. Inside, 225 bytes are left
//               for four ports out, of 75 each. All fits.
//   T < 7.5 s   all ways in together (3 * 10 + 10 bytes/s) carry less than the 300 bytes that are needed
// The bisection ends within 1/1024 of 2.5 s above 7.5 s.
class DetourSearch {
 public:
  DetourSearch(const PortDemand& plain, const Network& network)
      : plain_(plain),
        network_(network),
        hosts_(static_cast<size_t>(network.host_count())),
        nic_host_(static_cast<size_t>(network.nic_count()), -1),
        everywhere_(plain.parties.size()) {
    for (int32_t r = 0; r < network.rank_count(); ++r)
      nic_host_[static_cast<size_t>(network.nic(r))] = network.host(r);
    for (size_t i = 0; i < plain.items.size(); ++i) {
      const PortItem& item = plain.items[i];
      if (item.kind == PortItem::Kind::NicOut) sending_.push_back(&item);
      if (item.party < 0) continue;
      Host& host = hosts_[static_cast<size_t>(party(item).host)];
      (item.inside() ? host.inside : host.entering).push_back(i);
    }
    for (Host& host : hosts_) measure(&host);
  }

  // The time at which the ports inside hosts are done without detours.
  int64_t level() const {
    int64_t out = 0;
    for (const Host& host : hosts_) out = std::max(out, host.level);
    return out;
  }

  // Finds detours with which all ports are done by `ns`. Appends them, and subtracts them from the copies
  // inside. Hosts are handled one by one, since they share no ports in or inside. Only ports out are shared, as
  // those of one host send the detours of another; they are checked once for all hosts at the end. DetourOut
  // items have no ports yet (fill_in).
  bool fit(int64_t ns, std::vector<PortItem>* items) {
    *items = plain_.items;
    std::vector<PortItem> detours;
    for (const Host& host : hosts_) {
      if (host.level > ns && !relieve(host, ns, items, &detours)) return false;
    }
    // All bytes that leave hosts, including detours, are one flow problem. least_time starts at `ns`, and
    // returns more if that is not enough.
    size_t entries = 0;
    for (const PortItem* item : sending_) entries += item->ports.size();
    for (const PortItem& item : detours)
      if (item.kind == PortItem::Kind::DetourOut) entries += elsewhere(item).size();
    if (entries <= kMaxFlowEntries) {  // else least_time returns `ns`
      std::vector<PortItem> filled;
      for (const PortItem& item : detours)
        if (item.kind == PortItem::Kind::DetourOut) filled.push_back(item);
      for (PortItem& item : filled) fill_in(&item);
      std::vector<const PortItem*> sending = sending_;
      for (const PortItem& item : filled) sending.push_back(&item);
      if (least_time(sending, network_, ns) > ns) return false;
    }
    items->insert(items->end(), std::make_move_iterator(detours.begin()),
                  std::make_move_iterator(detours.end()));
    return true;
  }

  // The ports of a DetourOut item: those out of all other hosts that have the box.
  void fill_in(PortItem* item) {
    const Elsewhere there = elsewhere(*item);
    item->ports.reserve(there.size());
    item->ports.assign(there.begin, there.own_begin);
    item->ports.insert(item->ports.end(), there.own_end, there.end);
    item->emitters = static_cast<int32_t>(item->ports.size());
  }

 private:
  struct Host {
    std::vector<size_t> inside, entering;  // items: copied inside, coming in over NICs
    std::map<int32_t, int64_t> local_in;   // by rank, bytes that it takes in from inside
    int64_t level = 0;                     // ns
  };

  // Ports of all hosts that have a box, without the range [own_begin, own_end) of one host.
  struct Elsewhere {
    std::vector<int32_t>::const_iterator begin, own_begin, own_end, end;
    size_t size() const { return static_cast<size_t>((own_begin - begin) + (end - own_end)); }
  };

  // Ports ascend, and so do their hosts.
  Elsewhere elsewhere(const PortItem& item) {
    std::vector<int32_t>& all = everywhere_[static_cast<size_t>(item.bundle)];
    if (all.empty()) all = ports_from_elsewhere(plain_.parties[static_cast<size_t>(item.bundle)], -1, network_);
    const int32_t own = party(item).host;
    const auto host = [&](int32_t port) { return nic_host_[static_cast<size_t>(port / 2)]; };
    const auto first =
        std::partition_point(all.begin(), all.end(), [&](int32_t port) { return host(port) < own; });
    const auto last = std::partition_point(first, all.end(), [&](int32_t port) { return host(port) <= own; });
    return {all.begin(), first, last, all.end()};
  }

  const Party& party(const PortItem& item) const {
    return plain_.parties[static_cast<size_t>(item.bundle)].receivers[static_cast<size_t>(item.party)];
  }
  bool may_detour(const PortItem& item) const {
    return !plain_.parties[static_cast<size_t>(item.bundle)].one_host;
  }

  void measure(Host* host) const {
    std::map<int32_t, int64_t> out;
    for (const size_t i : host->inside) {
      const PortItem& item = plain_.items[i];
      for (size_t k = 0; k < item.ports.size(); ++k) out[item.ports[k]] += item.share[k];
      // The box enters a remote host at each of its ranks about equally often.
      const std::vector<int32_t>& ranks = party(item).ranks;
      for (const int32_t r : ranks)
        host->local_in[r] += item.nbytes * item.copies / static_cast<int64_t>(ranks.size());
    }
    for (const auto& [port, nbytes] : out)
      host->level = std::max(host->level, transfer_ns(nbytes, network_.port_rate(port)));
    for (const auto& [rank, nbytes] : host->local_in)
      host->level = std::max(host->level, transfer_ns(nbytes, network_.port_rate(network_.local_in(rank))));
  }

  // Bytes that come by detours: by item of the host and NIC port in.
  using Moved = std::vector<std::map<int32_t, int64_t>>;

  // Bytes that each receiver cannot take in from inside by `ns`, spread over its boxes in proportion to their
  // size. Returns false if that is not possible. A receiver has one port in from inside. The bytes that it
  // cannot take in by `ns` have to come over the NIC, whatever the senders do; only the choice of boxes is
  // free.
  bool relieve_receivers(const Host& host, int64_t ns, Moved* moved) const {
    moved->assign(host.inside.size(), {});
    for (const auto& [rank, nbytes] : host.local_in) {
      const int64_t over = nbytes - bytes_in(ns, network_.port_rate(network_.local_in(rank)));
      if (over <= 0) continue;
      int64_t all = 0;
      // Twice over the same boxes: first their sum, then each one's part of `over`.
      for (const bool counting : {true, false}) {
        if (!counting && over > all) return false;
        for (size_t n = 0; n < host.inside.size(); ++n) {
          const PortItem& item = plain_.items[host.inside[n]];
          const std::vector<int32_t>& ranks = party(item).ranks;
          if (!may_detour(item) || !std::binary_search(ranks.begin(), ranks.end(), rank)) continue;
          const int64_t mine = item.total() / static_cast<int64_t>(ranks.size());
          if (counting)
            all += mine;
          else
            (*moved)[n][network_.nic_in(network_.nic(rank))] +=
                static_cast<int64_t>(static_cast<__int128>(mine) * over / all);
        }
      }
    }
    return true;
  }

  // As few bytes as possible leave the ports inside the host for its NICs, so that both are done by `ns`: the
  // flow over ports inside is made as large as it can be before NICs may take the rest.
  bool relieve(const Host& host, int64_t ns, std::vector<PortItem>* items,
               std::vector<PortItem>* detours) const {
    // Phase 1: bytes that have to come over NICs because receivers cannot take them in otherwise. They count as
    // existing load of the NICs, and are subtracted from the demand.
    Moved moved;
    if (!relieve_receivers(host, ns, &moved)) return false;
    std::map<int32_t, int64_t> taken;  // by port of a NIC
    std::vector<int64_t> left;         // by item
    for (size_t n = 0; n < host.inside.size(); ++n) {
      left.push_back(plain_.items[host.inside[n]].total());
      for (const auto& [port, nbytes] : moved[n]) {
        taken[port] += nbytes;
        left[n] = std::max<int64_t>(0, left[n] - nbytes);
      }
    }

    // Phase 2: the ports as nodes, each with an edge to the sink for the bytes that it can still carry by `ns`.
    std::map<int32_t, int32_t> node_of;  // port -> node
    for (const std::vector<size_t>* some : {&host.inside, &host.entering}) {
      for (const size_t i : *some)
        for (const int32_t port : plain_.items[i].ports) node_of.emplace(port, 0);
    }
    for (const size_t i : host.inside)
      for (const int32_t r : party(plain_.items[i]).ranks) node_of.emplace(network_.nic_in(network_.nic(r)), 0);
    const int32_t source = 0;
    const int32_t sink = 1;
    int32_t nodes = 2;
    for (auto& [port, node] : node_of) node = nodes++;
    FlowNetwork flow(nodes + static_cast<int32_t>(2 * host.inside.size() + host.entering.size()));
    for (const auto& [port, node] : node_of) {
      const auto used = taken.find(port);
      const int64_t room =
          bytes_in(ns, network_.port_rate(port)) - (used == taken.end() ? int64_t{0} : used->second);
      flow.add_edge(node, sink, std::max<int64_t>(0, room));
    }
    // Phase 3: boxes that must enter the host over NICs: one copy of each, over any NIC of its receivers.
    int64_t demand = 0;
    for (const size_t i : host.entering) {
      const PortItem& item = plain_.items[i];
      demand += item.nbytes;
      flow.add_edge(source, nodes, item.nbytes);
      for (const int32_t port : item.ports) flow.add_edge(nodes, node_of[port], item.nbytes);
      ++nodes;
    }
    // Phase 4: the copies made inside. One node for the box with edges to its emitters, one after it for
    // relays, with the capacity that emitters need not send. The edges to NICs exist from the start, with
    // capacity 0.
    struct Way {
      size_t item;  // of the host
      int32_t port, edge;
      int64_t most;  // bytes: once for each of the receivers on the NIC
    };
    std::vector<Way> ways;
    for (size_t n = 0; n < host.inside.size(); ++n) {
      const PortItem& item = plain_.items[host.inside[n]];
      demand += left[n];
      flow.add_edge(source, nodes, left[n]);
      const auto emitters = static_cast<size_t>(item.emitters);
      for (size_t k = 0; k < item.ports.size(); ++k)
        flow.add_edge(k < emitters ? nodes : nodes + 1, node_of[item.ports[k]], item.total());
      if (emitters < item.ports.size()) flow.add_edge(nodes, nodes + 1, item.total() - item.first());
      if (may_detour(item)) {
        std::map<int32_t, int64_t> on_port;
        for (const int32_t r : party(item).ranks) on_port[network_.nic_in(network_.nic(r))] += item.nbytes;
        for (const auto& [port, most] : on_port)
          ways.push_back({n, port, flow.add_edge(nodes, node_of[port], 0), most});
      }
      nodes += 2;
    }
    // Phase 5: the largest flow over ports inside, then the rest over NICs. Augmenting never reduces the flow
    // on edges into the sink, so the ports inside stay as full as they were: detours are as few as possible.
    int64_t placed = flow.maximum(source, sink);
    for (const Way& way : ways) flow.raise_capacity(way.edge, way.most);
    placed += flow.augment(source, sink);
    if (placed < demand) return false;
    for (const Way& way : ways)
      if (flow.flow(way.edge) > 0) moved[way.item][way.port] += flow.flow(way.edge);
    for (size_t n = 0; n < host.inside.size(); ++n) {
      if (!moved[n].empty()) append(moved[n], &(*items)[host.inside[n]], detours);
    }
    return true;
  }

  // Appends the detours that relieve an item: into NICs of its receivers, out of NICs of all other hosts that
  // have the box.
  void append(const std::map<int32_t, int64_t>& moved, PortItem* item, std::vector<PortItem>* out) const {
    // Bytes are counted twice on purpose: into a NIC of the host (DetourIn) and out of a NIC of another host
    // (DetourOut). The item inside gets as many fewer; the sum is still what the receivers need.
    PortItem in;
    in.kind = PortItem::Kind::DetourIn;
    in.bundle = item->bundle;
    in.party = item->party;
    in.nbytes = item->nbytes;
    for (const auto& [port, nbytes] : moved) {
      in.detour += nbytes;
      in.ports.push_back(port);
    }
    in.detour = std::min(in.detour, item->total());
    item->detour -= in.detour;
    PortItem away = in;
    away.kind = PortItem::Kind::DetourOut;
    away.ports.clear();
    in.emitters = static_cast<int32_t>(in.ports.size());
    out->push_back(std::move(in));
    out->push_back(std::move(away));
  }

  const PortDemand& plain_;
  const Network& network_;
  std::vector<Host> hosts_;
  std::vector<const PortItem*> sending_;
  std::vector<int32_t> nic_host_;  // by NIC
  std::vector<std::vector<int32_t>>
      everywhere_;  // by bundle: ports out of all hosts that have the box; empty until needed
};

}  // namespace

bool find_detours(const PortDemand& plain, const Network& network, PortDemand* out) {
  // Phase 1: give up if flows would be too large, or if reductions share the ports.
  size_t entries = 0;
  for (const PortItem& item : plain.items) entries += item.ports.size();
  for (size_t b = 0; b < plain.parties.size(); ++b)
    if (plain.parties[b].receivers.empty())
      return false;  // to be reduced: its shares of ports are not known yet
  if (entries > kMostEntries) return false;
  // Phase 2: the range of T. Below the bound nothing fits; at `level` everything fits without detours. The
  // bound includes the latency once, the load of ports does not.
  DetourSearch search(plain, network);
  int64_t low = plain.bound_ns - network.latency_ns();
  int64_t high = search.level();
  if (high <= low + low / kLeastGain) return false;
  // Phase 3: bisection. Whether T is enough is monotone in T, as all capacities grow with it.
  std::vector<PortItem> items, best;
  for (int i = 0; i < kHalvings; ++i) {
    const int64_t middle = low + (high - low) / 2;
    if (search.fit(middle, &items)) {
      high = middle;
      best = std::move(items);
    } else {
      low = middle;
    }
  }
  if (best.empty()) return false;
  for (PortItem& item : best)
    if (item.kind == PortItem::Kind::DetourOut) search.fill_in(&item);
  // Phase 4: balance the result. The flow shows that it fits, not how ports share it evenly. Items inside and
  // between hosts share no port, so each set is balanced separately.
  std::vector<PortItem> inside, between;
  for (PortItem& item : best) (item.inside() ? inside : between).push_back(std::move(item));
  balance_ports(network, &inside);
  balance_ports(network, &between);
  *out = PortDemand{plain.parties, plain.ways, plain.hot_hosts, std::move(between), plain.bound_ns};
  out->items.insert(out->items.end(), std::make_move_iterator(inside.begin()),
                    std::make_move_iterator(inside.end()));
  return true;
}

}  // namespace meshcast
