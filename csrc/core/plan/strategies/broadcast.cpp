#include <algorithm>

#include "plan/strategies/paper_model.h"
#include "plan/strategies/reductions.h"
#include "plan/strategies/strategies.h"

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
  const std::vector<PaperWork> works = paper_works(in.tasks, in.bundles, in.network);
  const PaperOrder order = solve_paper_order(works, in.network.host_count(), in.balance, in.seed);
  for (size_t i = 0; i < order.work.size(); ++i) {
    const PaperWork& work = works[static_cast<size_t>(order.work[i])];
    const Bundle& bundle = in.bundles[static_cast<size_t>(work.bundle)];
    const Task& task = in.lead(bundle);
    // As in the paper, all works of a host leave through the first of its ranks that holds them.
    const auto sender = std::find_if(task.holders.begin(), task.holders.end(), [&](int32_t holder) {
      return in.network.host(in.network.index(holder)) == order.sender[i];
    });
    const Route route = chain(in.network, in.network.index(*sender), task);
    const Drafter::Range chunks = drafter.cut(bundle, in.chunk_bytes);
    for (int32_t c = chunks.first; c < chunks.last; ++c) drafter.send(c, route, static_cast<int64_t>(i));
  }
  draft_reductions(in, -1, false, &drafter);
  return drafter.take();
}

}  // namespace meshcast
