#include <algorithm>
#include <string>

#include "common/error.h"
#include "plan/schedule.h"

namespace meshcast {

Schedule simulate(const std::vector<Hop>& hops, const std::vector<Chunk>& chunks, const Network& network) {
  Schedule out;
  out.hops = hops;
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

}  // namespace meshcast
