#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"
#include "plan/staging.h"

namespace meshcast {

struct RoundOptions {
  // What a round costs beside its bytes: the launch of a group, and that its ranks wait for one another.
  // Guessed, not measured. The latency of the topology comes on top.
  int64_t group_ns = 20'000;
  int64_t staging_bytes = kStagingGoal;  // what a rank's buffers should stay below
  int64_t round_ns = 0;                  // most time of a link in one round; 0: from the cost model
};

// Every hop of a plan in a round. What a rank sends and receives in one round is one group of NCCL: all of it
// is under way at once, and the next begins when all of it is through. Both ends of a hop have it in the same
// round, and a hop comes in a later round than the hop that brings its chunk; so, while one chunk is forwarded,
// the next is received. Ranks without a hop in a round leave it out.
//
// No deadlock: of all rounds that are not complete, take the first. Both ends of each of its hops have done
// their earlier rounds, so both are in it, and everything that they wait for besides was part of an earlier
// round.
struct RoundTable {
  std::vector<int32_t> of_hop;
  int32_t count = 0;
  int64_t round_ns = 0;
};

// Pure: every rank derives the same table from the same plan. Linear in the hops but for a logarithm.
// Throws Error where the plan's hops cannot be done in their order.
RoundTable make_rounds(const Plan& plan, const RoundOptions& options = {});

}  // namespace meshcast
