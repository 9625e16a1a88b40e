#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"
#include "plan/staging.h"

namespace meshcast {

struct RoundOptions {
  // The cost of a round apart from its bytes: the launch of a group, and the wait of its ranks for one another.
  // Guessed, not measured. The latency of the topology comes on top.
  int64_t group_ns = 20'000;
  // The same as measured between these ranks, with the latency of a hop in it: replaces both. 0: not measured.
  int64_t measured_ns = 0;
  // Bytes/s that links inside a host really have, as far as known. A plan may count with less, such as the
  // default of 10 GB/s: then its rounds take less time than it says, and group_ns is more of that time.
  int64_t link_rate = 0;
  int64_t staging_bytes = kStagingGoal;  // a rank's buffers should stay below this
  int64_t round_ns = 0;                  // most time of a link in one round; 0: from the cost model
};

// The round of every hop of a plan. The messages of a rank in one round are one group of NCCL: all of them are
// in flight at the same time, and the next group begins when all are complete. Both ends of a hop have it in
// the same round, and a hop comes in a later round than the hop that brings its chunk; so, while one chunk is
// forwarded, the next is received. Ranks without a hop in a round leave it out.
//
// No deadlock: of all rounds that are not complete, take the first. Both ends of each of its hops have done
// their earlier rounds, so both are in it, and everything else that they wait for was part of an earlier round.
struct RoundTable {
  std::vector<int32_t> of_hop;
  int32_t count = 0;
  int64_t round_ns = 0;
};

// Pure: every rank derives the same table from the same plan. Linear in the hops, apart from a logarithm.
// Throws Error where the plan's hops cannot be done in their order.
RoundTable make_rounds(const Plan& plan, const RoundOptions& options = {});

}  // namespace meshcast
