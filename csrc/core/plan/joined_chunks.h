#pragma once

#include "plan/network.h"
#include "plan/plan.h"

namespace meshcast {

// Joins chunks between two ranks, on ports where every chunk is one box that goes to one rank and stays there.
// Small chunks fill a chain sooner; without a chain they gain nothing, and every message costs CPU time. A
// joined message leaves when its first chunk would have; the plan's time grows by at most a thousandth. No
// message becomes one that has to be packed.
void join_chunks(Plan* plan, const Network& network);

}  // namespace meshcast
