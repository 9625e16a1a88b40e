#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan/bound/bound.h"
#include "plan/draft.h"
#include "plan/network.h"
#include "plan/plan.h"
#include "plan/strategies/reductions.h"

namespace meshcast {

// Within 1.5 per cent of the bound: further attempts are not worth it.
inline int64_t good_ns(int64_t bound_ns) { return bound_ns + bound_ns / 200 * 3; }

// The inputs of all strategies.
struct Inputs {
  const std::vector<Problem>& problems;
  const std::vector<Task>& tasks;
  const std::vector<Bundle>& bundles;
  const Network& network;
  int64_t bound_ns;
  int64_t chunk_bytes;
  Balance balance;
  uint64_t seed;
  const std::vector<std::vector<WayPart>>& ways;  // by bundle; only for those to be reduced
  ReductionRoutes* reductions;                    // not owned: what strategies found so far

  const Task& lead(const Bundle& bundle) const { return tasks[static_cast<size_t>(bundle.tasks.front())]; }
  // Whether any bundle has to be reduced.
  bool reduces() const {
    return std::any_of(bundles.begin(), bundles.end(),
                       [this](const Bundle& bundle) { return lead(bundle).reduce != ReduceOp::None; });
  }
};

#define MESHCAST_STRATEGY(name, text, draft, ...) Draft draft(const Inputs& in);
#include "plan/strategies.def"

// A kind of trees, one for every chunk, see TreeBuilder for `fan`. `steady` makes the scheduler advance all
// tasks at the same rate; without it the busiest ports always come first.
struct TreeStyle {
  int64_t fan = 1;
  bool steady = true;
  bool uneven = false;         // chunks of different size from bundle to bundle, so that NICs fall out of step
  bool timed = false;          // chunks in proportion to their rate, so that hops take equally long
  int32_t patience = 0;        // as in Draft
  int64_t finer = 1;           // factor of finer chunks for bundles without a slow, limiting port
  bool second_routes = false;  // for chunks to be reduced: as in draft_reductions
};

// Whether `finer` has an effect: some bundle holds a limiting port for longer than the port at its other end,
// as if a fast NIC sends to a slow one.
bool has_slow_ports(const PortDemand& demand, const Network& network);

// Whether `timed` has an effect: NICs that carry a share differ in rate.
bool has_unlike_nics(const PortDemand& demand, const Network& network);

Draft draft_multicast(const Inputs& in, const PortDemand& demand, TreeStyle style);

}  // namespace meshcast
