#include <algorithm>
#include <array>
#include <string>
#include <utility>

#include "common/error.h"
#include "plan/schedule.h"

namespace meshcast {

Schedule simulate(std::vector<Hop> all, const std::vector<Chunk>& chunks, const Network& network) {
  Schedule out;
  out.hops = std::move(all);
  const std::vector<Hop>& hops = out.hops;
  out.times.resize(hops.size());
  std::vector<int64_t> free_at(static_cast<size_t>(network.port_count()), 0);
  for (size_t i = 0; i < hops.size(); ++i) {
    const Hop& hop = hops[i];
    int64_t start = 0;
    if (hop.after >= 0) {
      const auto before = static_cast<size_t>(hop.after);
      if (before >= i || hops[before].dst != hop.src || hops[before].chunk != hop.chunk) {
        throw LayoutError("hop " + std::to_string(i) + " comes after hop " + std::to_string(hop.after) +
                          ", which does not bring it its chunk earlier");
      }
      start = out.times[before].finish_ns;
    }
    const Network::Link link = network.link(network.index(hop.src), network.index(hop.dst));
    const int64_t nbytes = chunks[static_cast<size_t>(hop.chunk)].nbytes;
    int64_t& out_free = free_at[static_cast<size_t>(link.out)];
    int64_t& in_free = free_at[static_cast<size_t>(link.in)];
    start = std::max({start, out_free, in_free});
    const int64_t out_ns = transfer_ns(nbytes, network.port_rate(link.out));
    const int64_t in_ns = transfer_ns(nbytes, network.port_rate(link.in));
    out_free = start + out_ns;
    in_free = start + in_ns;
    out.times[i] = {start, start + std::max(out_ns, in_ns) + network.latency_ns()};
    out.makespan_ns = std::max(out.makespan_ns, out.times[i].finish_ns);
  }
  return out;
}

int64_t least_makespan_ns(const std::vector<Hop>& hops, const std::vector<Chunk>& chunks,
                          const Network& network) {
  struct Port {
    int64_t head_ns = INT64_MAX;  // until the first hop can start
    int64_t busy_ns = 0;
    int64_t tail_ns = INT64_MAX;  // from the end of the last hop at the port to the end of the plan
  };
  std::vector<Port> ports(static_cast<size_t>(network.port_count()));
  // Phase 1: forwards, the time before each hop. A parent has a lower index than its children.
  std::vector<int64_t> ns(hops.size(), 0);  // before the hop, then after it, if no port were ever busy
  const auto times = [&](const Hop& hop) {
    const Network::Link link = network.link(network.index(hop.src), network.index(hop.dst));
    const int64_t nbytes = chunks[static_cast<size_t>(hop.chunk)].nbytes;
    return std::array{std::pair{link.out, transfer_ns(nbytes, network.port_rate(link.out))},
                      std::pair{link.in, transfer_ns(nbytes, network.port_rate(link.in))}};
  };
  for (size_t i = 0; i < hops.size(); ++i) {
    const auto both = times(hops[i]);
    if (hops[i].after >= 0) ns[i] = ns[static_cast<size_t>(hops[i].after)];
    for (const auto& [port, port_ns] : both) {
      Port& at = ports[static_cast<size_t>(port)];
      at.head_ns = std::min(at.head_ns, ns[i]);
      at.busy_ns += port_ns;
    }
    ns[i] += std::max(both[0].second, both[1].second) + network.latency_ns();
  }
  // Phase 2: backwards, the time after each hop.
  ns.assign(hops.size(), 0);
  for (size_t i = hops.size(); i-- > 0;) {
    const auto both = times(hops[i]);
    const int64_t all_ns = std::max(both[0].second, both[1].second) + network.latency_ns() + ns[i];
    for (const auto& [port, port_ns] : both) {
      Port& at = ports[static_cast<size_t>(port)];
      at.tail_ns = std::min(at.tail_ns, all_ns - port_ns);
    }
    if (hops[i].after < 0) continue;
    int64_t& before = ns[static_cast<size_t>(hops[i].after)];
    before = std::max(before, all_ns);
  }
  int64_t out = 0;
  for (const Port& port : ports)
    if (port.busy_ns > 0) out = std::max(out, port.head_ns + port.busy_ns + port.tail_ns);
  return out;
}

}  // namespace meshcast
