#pragma once

#include <cstdint>
#include <vector>

#include "plan/bound/parties.h"
#include "plan/draft.h"

namespace meshcast {

// What a chunk enters over a NIC: ranks of one host, among which it goes round.
using Stop = std::vector<int32_t>;

// The stops of a bundle, in an order in which neighbours are on different hosts. With `by_rank` every rank is a
// stop of its own: ranks at one position in their hosts follow each other, each such row begins one host later,
// so that in trees most others are on different hosts as well.
std::vector<Stop> find_stops(const Parties& parties, bool by_rank);

// From `at`, which has the chunk, to all others of the ranks, in ring order. Edges are added to the route.
void go_round(const std::vector<int32_t>& ranks, int32_t at, int32_t parent, Route* route);

inline int32_t pick(const std::vector<int32_t>& ranks, size_t turn) { return ranks[turn % ranks.size()]; }

}  // namespace meshcast
