#include "plan/strategies/turns.h"

#include <algorithm>
#include <utility>

#include "plan/disjoint_sets.h"
#include "plan/strategies/senders.h"

namespace meshcast {
namespace {

// Ports in groups, numbered within each group in ascending order; -1 for a port that is in no group.
struct Numbers {
  std::vector<int32_t> number;  // by port
  std::vector<int32_t> count;   // by port: the numbers of its group
};

// `ports`: (group, value) of each port; group -1: none. Ports of equal values share a number.
Numbers number_ports(const std::vector<std::pair<int64_t, int32_t>>& ports) {
  Numbers out;
  out.number.assign(ports.size(), -1);
  out.count.assign(ports.size(), 0);
  std::vector<int32_t> order;
  for (size_t port = 0; port < ports.size(); ++port)
    if (ports[port].first >= 0) order.push_back(static_cast<int32_t>(port));
  const auto of = [&](size_t i) -> const std::pair<int64_t, int32_t>& {
    return ports[static_cast<size_t>(order[i])];
  };
  std::sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return ports[static_cast<size_t>(a)] < ports[static_cast<size_t>(b)];
  });
  for (size_t first = 0; first < order.size();) {
    size_t last = first;
    int32_t number = 0;
    for (; last < order.size() && of(last).first == of(first).first; ++last) {
      if (last > first && of(last).second != of(last - 1).second) ++number;
      out.number[static_cast<size_t>(order[last])] = number;
    }
    for (; first < last; ++first) out.count[static_cast<size_t>(order[first])] = number + 1;
  }
  return out;
}

}  // namespace

std::vector<Send> choose_sends(const Inputs& in, Drafter* drafter) {
  SenderLoads loads(in.network);
  std::vector<Send> out;
  for (size_t b = 0; b < in.bundles.size(); ++b) {
    const Bundle& bundle = in.bundles[b];
    const Task& task = in.lead(bundle);
    const Drafter::Range chunks = drafter != nullptr ? drafter->cut(bundle, in.chunk_bytes) : Drafter::Range{};
    for (const int32_t receiver : task.receivers) {
      Send send;
      send.bundle = static_cast<int32_t>(b);
      send.dst = in.network.index(receiver);
      send.src = loads.choose(task.holders, send.dst, bundle.nbytes);
      const Network::Link link = in.network.link(send.src, send.dst);
      send.out = link.out;
      send.in = link.in;
      send.chunks = chunks;
      out.push_back(send);
    }
  }
  return out;
}

void set_turns(const Network& network, std::vector<Send>* sends) {
  DisjointSets sets(network.port_count());  // ports that sends link with each other
  for (const Send& s : *sends) sets.link(s.out, s.in);
  // Turns depend only on the ports of a send, of which there are far fewer than sends. A port in belongs to one
  // host, which may have receivers in several sets.
  const std::pair<int64_t, int32_t> none{-1, -1};
  const auto ports = static_cast<size_t>(network.port_count());
  std::vector<std::pair<int64_t, int32_t>> senders(ports, none), hosts(ports, none), receivers(ports, none);
  for (const Send& s : *sends) {
    const auto out = static_cast<size_t>(s.out), in = static_cast<size_t>(s.in);
    if (senders[out] == none) senders[out] = {sets.find(s.out), s.out};
    if (hosts[in] != none) continue;
    const int32_t set = sets.find(s.in);
    const int32_t host = network.host(s.dst);
    hosts[in] = {set, host};
    receivers[in] = {static_cast<int64_t>(set) * network.host_count() + host, s.in};
  }
  const Numbers sender = number_ports(senders), host = number_ports(hosts), receiver = number_ports(receivers);
  for (Send& s : *sends) {
    const auto out = static_cast<size_t>(s.out), in = static_cast<size_t>(s.in);
    const int32_t many = host.count[in];
    s.turn = (host.number[in] + many - sender.number[out] % many) % many;
    const int32_t inside = receiver.count[in];
    s.turn_inside = (receiver.number[in] + inside - sender.number[out] / many % inside) % inside;
  }
}

}  // namespace meshcast
