#pragma once

#include <cstdint>
#include <vector>

#include "plan/bound/port_items.h"
#include "plan/network.h"

namespace meshcast {

inline constexpr size_t kMaxFlowEntries = 2'000'000;  // ports of all items of one flow problem

// Least T, ns, for which the items fit on their ports, each of which carries rate * T: a flow problem, solved
// by Newton's method on its minimum cut. Starts at `floor`, which must not exceed T, and returns that if the
// problem would be too large: still a bound, but a looser one.
int64_t least_time(const std::vector<const PortItem*>& items, const Network& network, int64_t floor);

}  // namespace meshcast
