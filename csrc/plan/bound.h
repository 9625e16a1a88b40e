#pragma once

#include <cstdint>
#include <vector>

#include "plan/draft.h"
#include "plan/network.h"
#include "plan/plan.h"

namespace meshcast {

// Nanoseconds that no plan can beat in which only holders and receivers of a box carry it. 0 without tasks.
int64_t lower_bound_ns(const std::vector<Task>& tasks, const std::vector<Bundle>& bundles, const Network& network);

}  // namespace meshcast
