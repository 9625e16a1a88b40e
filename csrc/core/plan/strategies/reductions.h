#pragma once

#include <cstdint>
#include <map>
#include <utility>
#include <vector>

#include "plan/draft.h"

namespace meshcast {

struct Inputs;

// Routes of all chunks to be reduced. They are the same for all strategies, so they are chosen once for every
// chunk size, starting from rules or from the mixture of ways (find_reduce_mix).
struct RoutedChunks {
  std::vector<Route> routes;
  int64_t busiest_ns = 0;  // port
};
using ReductionRoutes = std::map<std::pair<int64_t, bool>, RoutedChunks>;

// Adds the chunks and hops of every bundle that is to be reduced; the strategies route the others. With
// `bound_ns` >= 0 each hop gets the due time of its chunk in a stream that takes so long. `second`: takes the
// routes that seem second best.
void draft_reductions(const Inputs& in, int64_t bound_ns, bool second, Drafter* drafter);

}  // namespace meshcast
