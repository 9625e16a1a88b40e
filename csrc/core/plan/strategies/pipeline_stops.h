#pragma once

#include <cstdint>
#include <vector>

#include "plan/bound/parties.h"
#include "plan/draft.h"

namespace meshcast {

// Ranks of one host, which a chunk enters over a NIC and then goes round.
using Stop = std::vector<int32_t>;

// The stops of a bundle, in an order in which neighbours are on different hosts. With `by_rank` every rank is a
// stop: ranks at one position in their hosts follow each other, and each such row begins one host later, so
// that in trees most other neighbours are on different hosts, too.
std::vector<Stop> find_stops(const Parties& parties, bool by_rank);

// Adds edges to the route from `at`, which has the chunk, to all other ranks, in ring order.
void go_round(const std::vector<int32_t>& ranks, int32_t at, int32_t parent, Route* route);

inline int32_t pick(const std::vector<int32_t>& ranks, size_t turn) { return ranks[turn % ranks.size()]; }

}  // namespace meshcast
