#include <algorithm>

#include "plan/strategies.h"

namespace meshcast {
namespace {

// The sender's own host first, then the others by number; inside a host by rank. Each host is entered once.
Route chain(const Network& network, int32_t sender, const Task& task) {
  std::vector<int32_t> stops;
  for (const int32_t receiver : task.receivers) stops.push_back(network.index(receiver));
  const int32_t home = network.host(sender);
  std::stable_sort(stops.begin(), stops.end(), [&](int32_t a, int32_t b) {
    const int32_t ha = network.host(a);
    const int32_t hb = network.host(b);
    return (ha == home ? -1 : ha) < (hb == home ? -1 : hb);
  });
  Route route;
  int32_t at = sender;
  for (const int32_t stop : stops) {
    route.push_back({at, stop, static_cast<int32_t>(route.size()) - 1});
    at = stop;
  }
  return route;
}

}  // namespace

Draft draft_broadcast(const Inputs& in) {
  Drafter drafter(in.tasks, in.problems, in.network);
  std::vector<int64_t> load(static_cast<size_t>(in.network.host_count()), 0);
  for (const Bundle& bundle : in.bundles) {
    const Task& task = in.lead(bundle);
    int32_t sender = in.network.index(task.holders.front());
    for (const int32_t holder : task.holders) {
      const int32_t h = in.network.index(holder);
      if (load[static_cast<size_t>(in.network.host(h))] < load[static_cast<size_t>(in.network.host(sender))]) {
        sender = h;
      }
    }
    load[static_cast<size_t>(in.network.host(sender))] += bundle.nbytes;
    const Route route = chain(in.network, sender, task);
    const Drafter::Range chunks = drafter.cut(bundle, in.chunk_bytes);
    for (int32_t c = chunks.first; c < chunks.last; ++c) drafter.send(c, route);
  }
  return drafter.take();
}

}  // namespace meshcast
