#include "plan/strategies/pipeline_stops.h"

#include <algorithm>

namespace meshcast {

std::vector<Stop> find_stops(const Parties& parties, bool by_rank) {
  std::vector<Stop> out;
  std::vector<const Party*> remote;
  size_t longest = 0;
  for (size_t p = 0; p < parties.receivers.size(); ++p) {
    if (!parties.remote(p)) continue;
    remote.push_back(&parties.receivers[p]);
    longest = std::max(longest, remote.back()->ranks.size());
  }
  if (!by_rank) {
    for (const Party* party : remote) out.push_back(party->ranks);
    return out;
  }
  for (size_t row = 0; row < longest; ++row) {
    for (size_t h = 0; h < remote.size(); ++h) {
      const Party& party = *remote[(h + row) % remote.size()];
      if (row < party.ranks.size()) out.push_back({party.ranks[row]});
    }
  }
  return out;
}

void go_round(const std::vector<int32_t>& ranks, int32_t at, int32_t parent, Route* route) {
  const int32_t root = at;
  const auto begin = static_cast<size_t>(std::upper_bound(ranks.begin(), ranks.end(), at) - ranks.begin());
  for (size_t i = 0; i < ranks.size(); ++i) {
    const int32_t next = ranks[(begin + i) % ranks.size()];
    if (next == root) continue;
    route->push_back({at, next, parent});
    parent = static_cast<int32_t>(route->size()) - 1;
    at = next;
  }
}

}  // namespace meshcast
