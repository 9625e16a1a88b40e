#pragma once

#include <cstdint>
#include <vector>

#include "plan/bound/port_items.h"
#include "plan/bound/reduce_ways.h"
#include "plan/network.h"
#include "plan/plan.h"

namespace meshcast {

// A way that a part of a box takes.
struct WayPart {
  ReduceWay way;
  int64_t part = 0;  // of the sum over all ways of the box
};

// How boxes to be reduced divide themselves among ways, so that the NICs are done as early as possible.
struct ReduceMix {
  std::vector<std::vector<WayPart>> ways;  // by box; none where nothing is known
  int64_t bound_ns = 0;  // no plan can be faster that reduces every box at one place and sends the result on
};

// `items` are what the ports have to carry beside.
ReduceMix find_reduce_mix(const std::vector<const Task*>& tasks, const std::vector<int64_t>& nbytes,
                          const std::vector<PortItem>& items, const Network& network);

}  // namespace meshcast
