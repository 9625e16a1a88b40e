#pragma once

#include "plan/best_plan.h"
#include "plan/bound/bound.h"
#include "plan/plan.h"
#include "plan/strategies/strategies.h"

namespace meshcast {

// Whether a plan of trees takes so much less time than the best of the paper's strategies that it is worth it:
// its chunks take many ways, which meet at ports in orders that the network does not keep to.
bool is_well_ahead(int64_t multicast_ns, int64_t others_ns);

// Tries the search among trees. Where others have been tried before, it has to be well ahead of the best of
// them.
// `fixed_chunk`: the chunk size comes from the caller, so no other is tried. `large`: a plan that is too large
// to be made many times. `plan` is that of `best`.
void add_multicast(Inputs in, const PortDemand& ports, bool fixed_chunk, bool large, BestPlan* best,
                   Plan* plan);

// Tries pipelines where the best plan so far is not good, as with hundreds of hosts. The same holds of what
// they have to gain.
void add_pipelines(Inputs in, bool fixed_chunk, BestPlan* best, Plan* plan);

}  // namespace meshcast
