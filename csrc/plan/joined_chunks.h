#pragma once

#include "plan/network.h"
#include "plan/plan.h"

namespace meshcast {

// Joins chunks that nobody passes on, which buy nothing by being small: every message costs CPU time of its
// own. A joined one leaves when its first chunk would have. What is passed on keeps its place on all lanes, and
// the plan its time, to a thousandth. No message turns into one that has to be packed.
void join_chunks(Plan* plan, const Network& network);

}  // namespace meshcast
