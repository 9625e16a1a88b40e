#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace meshcast {

// Messages between two ranks, in one direction, that are posted at a time, at both ends. With the sizes of
// messages this bounds the memory of a running plan.
inline constexpr int64_t kMessageWindow = 4;

// If the planner chooses the chunk size, it aims to keep the staging of every rank below this.
inline constexpr int64_t kStagingGoal = int64_t{64} << 20;

// Most bytes of staging that each of plan.ranks, in that order, may have at a time: buffers of messages that
// are packed, because their boxes are not one contiguous range of the local tensor (taken as row-major) or
// because they are reduced. For every peer and direction a window of the largest such messages; receiving takes
// one more, which is unpacked while the next is in flight. Outcomes of reductions that a rank only passes on
// are kept from the posting of their receive until they have been sent: a window more of them than it would
// hold if all hops were done in plan order (run/carries.h). Messages through shared memory or over UCX need
// less.
std::vector<int64_t> peak_staging(const Plan& plan);

// For each hop, whether its receiver only passes the outcome on: true for all reductions except those that end
// at a rank that needs the result.
std::vector<char> carried_hops(const std::vector<Task>& tasks, const std::vector<ChunkPiece>& pieces,
                               const std::vector<Chunk>& chunks, const std::vector<Hop>& hops);

}  // namespace meshcast
