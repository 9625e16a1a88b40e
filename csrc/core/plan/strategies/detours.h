#pragma once

#include "plan/bound/bound.h"
#include "plan/network.h"

namespace meshcast {

// A box that a host holds, or has got once, is copied to its other receivers inside the host. Where the ports
// inside limit the plan and other hosts have the box too, some of these copies had better come from there, over
// NICs that have time to spare: detours. This finds the least T, to a thousandth of what can be gained, at
// which ports of either kind can do their part, and the fewest bytes of detours with which they can.
//
// Fills *out with the demand with detours, balanced, and returns true; false where nothing can be gained, or
// where the search would take too long.
bool find_detours(const PortDemand& plain, const Network& network, PortDemand* out);

}  // namespace meshcast
