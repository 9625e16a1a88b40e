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

// The division of boxes to be reduced among ways, so that the NICs are done as early as possible.
struct ReduceMix {
  std::vector<std::vector<WayPart>> ways;  // by box; none if nothing is known
  int64_t bound_ns = 0;  // for all plans that reduce every box at one place and send the result on
};

// `items`: what the ports have to carry in addition.
ReduceMix find_reduce_mix(const std::vector<const Task*>& tasks, const std::vector<int64_t>& nbytes,
                          const std::vector<PortItem>& items, const Network& network);

}  // namespace meshcast
