#pragma once

#include <cstdint>
#include <vector>

#include "plan/plan.h"

namespace meshcast {

// Messages between two ranks, in one direction, that are posted at a time; both ends keep to it. With the sizes
// of messages it bounds the memory that a plan takes while it runs.
inline constexpr int64_t kMessageWindow = 4;

// Where the chunk size is the planner's to choose, it aims to keep the staging of every rank below this.
inline constexpr int64_t kStagingGoal = int64_t{64} << 20;

// Most bytes of staging that each of plan.ranks, in that order, may have at a time: buffers of messages that
// are packed, because their boxes are not one contiguous range of the local tensor (taken as row-major) or
// because they are reduced. For every peer and direction a window of the largest such messages; receiving takes
// one more, which is unpacked while the next is on its way. Outcomes of reductions that a rank only passes on
// are kept from when their receive is posted until they have left: a window more of them than it would hold if
// all hops were done in plan order (run/carries.h). What travels through shared memory or over UCX
// needs less.
std::vector<int64_t> peak_staging(const Plan& plan);

// For each hop, whether its receiver only passes the outcome on: true of all reductions but those that end
// where the result is needed.
std::vector<char> carried_hops(const std::vector<Task>& tasks, const std::vector<ChunkPiece>& pieces,
                               const std::vector<Chunk>& chunks, const std::vector<Hop>& hops);

}  // namespace meshcast
