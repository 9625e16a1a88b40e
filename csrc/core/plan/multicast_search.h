#pragma once

#include "plan/best_plan.h"
#include "plan/bound/bound.h"
#include "plan/plan.h"
#include "plan/strategies/strategies.h"

namespace meshcast {

// Whether a plan of trees takes enough less time than the best of the paper's strategies: its chunks take many
// routes, which meet at ports in orders that the network does not keep.
bool is_well_ahead(int64_t multicast_ns, int64_t others_ns);

// Tries the search among trees. If others have been tried before, it has to be well ahead of the best of them.
// `fixed_chunk`: the chunk size is the caller's, so no other is tried. `large`: a plan that is too large to be
// made many times. `plan`: that of `best`.
void add_multicast(Inputs in, const PortDemand& ports, bool fixed_chunk, bool large, BestPlan* best,
                   Plan* plan);

// Tries pipelines if the best plan so far is not good, as with hundreds of hosts. They have to be well ahead,
// too.
void add_pipelines(Inputs in, bool fixed_chunk, BestPlan* best, Plan* plan);

}  // namespace meshcast
