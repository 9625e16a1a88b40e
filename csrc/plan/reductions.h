#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "plan/draft.h"

namespace meshcast {

struct Inputs;

// Routes of all chunks to be reduced, by chunk size: the same for all strategies, so they are chosen once.
using ReductionRoutes = std::map<int64_t, std::vector<Route>>;

// Adds the chunks and hops of every bundle that is to be reduced; the strategies route the others. With
// `bound_ns` >= 0 each hop gets the time at which its chunk is due in a stream that takes as long.
void draft_reductions(const Inputs& in, int64_t bound_ns, Drafter* drafter);

}  // namespace meshcast
