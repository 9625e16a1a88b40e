#include "plan/bound/port_flow.h"

#include <map>

#include "plan/bound/flow.h"

namespace meshcast {
namespace {

int64_t ceil_time(__int128 nbytes, __int128 rate) {
  return static_cast<int64_t>((nbytes * 1000000000 + rate - 1) / rate);
}

}  // namespace

// Newton's method (Dinkelbach, 1967): let a cut be too small for the demand at time T. Its ports together must
// carry `need` bytes at `rate` bytes/s, so no time below need / rate is enough; that is the next T. Each step
// is from a bound to a larger one and never passes the answer, and every cut occurs at most once.
//
// Example. 100 bytes over a port of 10 bytes/s or one of 30, and 100 over the first alone. From T = 0 the cut
// holds both ports: 200 / 40 = 5 s. At 5 s the second item finds only 50 bytes of room: its cut gives 100 /
// 10 = 10 s, at which everything fits.
int64_t least_time(const std::vector<const PortItem*>& items, const Network& network, int64_t floor) {
  // Phase 1: the network. Source -> item -> ports of emitters, item -> relays of it -> their ports, port ->
  // sink. The edge between the two nodes of an item lets through all but one copy, since one has to be
  // emitted.
  std::map<int32_t, int32_t> node_of;  // port -> node
  size_t entries = 0;
  for (const PortItem* item : items) entries += item->ports.size();
  if (entries > kMaxFlowEntries) return floor;  // still a bound, only a looser one
  for (const PortItem* item : items)
    for (const int32_t port : item->ports) node_of.emplace(port, 0);
  const int32_t source = 0;
  const int32_t sink = 1;
  int32_t nodes = 2;
  for (auto& [port, node] : node_of) node = nodes++;
  const int32_t first_item = nodes;
  FlowNetwork flow(nodes + 2 * static_cast<int32_t>(items.size()));
  __int128 demand = 0;
  for (size_t i = 0; i < items.size(); ++i) {
    const PortItem& item = *items[i];
    const int32_t node = first_item + 2 * static_cast<int32_t>(i);
    const int64_t all = item.total();
    demand += all;
    flow.add_edge(source, node, all);
    const auto emitters = static_cast<size_t>(item.emitters);
    for (size_t k = 0; k < item.ports.size(); ++k) {
      flow.add_edge(k < emitters ? node : node + 1, node_of[item.ports[k]], all);
    }
    if (emitters < item.ports.size()) flow.add_edge(node, node + 1, all - item.nbytes);
  }
  std::vector<int32_t> edge_of(static_cast<size_t>(nodes), -1);
  for (const auto& [port, node] : node_of) edge_of[static_cast<size_t>(node)] = flow.add_edge(node, sink, 0);

  // Phase 2: cuts, until everything fits. Capacities are rounded up, so a demand that does not fit then never
  // fits.
  int64_t time = floor;
  while (true) {
    const auto capacity = [&](int64_t rate) {
      return (static_cast<__int128>(rate) * time + 999999999) / 1000000000;
    };
    for (const auto& [port, node] : node_of) {
      const __int128 room = std::min<__int128>(capacity(network.port_rate(port)), demand);
      flow.set_capacity(edge_of[static_cast<size_t>(node)], static_cast<int64_t>(room));
    }
    if (flow.maximum(source, sink) >= demand) return time;
    // The ports on the source's side must carry the bytes that the items there cannot put elsewhere.
    __int128 need = 0;
    __int128 rate = 0;
    for (size_t i = 0; i < items.size(); ++i) {
      const int32_t node = first_item + 2 * static_cast<int32_t>(i);
      if (!flow.on_source_side(node)) continue;
      need += items[i]->total();
      const bool relays = static_cast<size_t>(items[i]->emitters) < items[i]->ports.size();
      if (relays && !flow.on_source_side(node + 1)) {
        need -= static_cast<__int128>(items[i]->nbytes) * (items[i]->copies - 1);
      }
    }
    for (const auto& [port, node] : node_of) {
      if (flow.on_source_side(node)) rate += network.port_rate(port);
    }
    const int64_t next = ceil_time(need, rate);
    if (next <= time) return time;  // rounding of capacities: nothing left to gain
    time = next;
  }
}

}  // namespace meshcast
