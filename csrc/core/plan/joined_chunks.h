#pragma once

#include "plan/network.h"
#include "plan/plan.h"

namespace meshcast {

// Joins chunks between two ranks, on ports where every chunk is one box that goes to one rank and stays there.
// Small chunks fill a chain sooner; there they buy nothing, and every message costs CPU time of its own. A
// joined one leaves when its first chunk would have; the plan keeps its time, to a thousandth. No message turns
// into one that has to be packed.
void join_chunks(Plan* plan, const Network& network);

}  // namespace meshcast
