#pragma once

#include "plan/bound/bound.h"
#include "plan/network.h"

namespace meshcast {

// A box that a host holds, or has received once, is copied to its other receivers inside the host. If the ports
// inside limit the plan and other hosts have the box too, some of these copies should come from there, over
// NICs that have time to spare: detours. This finds the least T, to a thousandth of the possible gain, at which
// ports of both kinds can carry their parts, and the fewest bytes of detours for that.
//
// Fills *out with the demand with detours, balanced, and returns true; false if nothing can be gained, or if
// the search would take too long.
bool find_detours(const PortDemand& plain, const Network& network, PortDemand* out);

}  // namespace meshcast
