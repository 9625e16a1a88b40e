#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "plan/plan.h"

// Figures of a finished plan, for users. Nothing here takes part in planning.
namespace meshcast {

// Bytes (sent, received) by each of plan.ranks, in that order.
std::vector<std::pair<int64_t, int64_t>> rank_traffic(const Plan& plan);

// Bytes (out, in) through the NICs of each host of plan.topology, in that order. Hops inside a host touch no
// NIC.
std::vector<std::pair<int64_t, int64_t>> nic_traffic(const Plan& plan);

}  // namespace meshcast
