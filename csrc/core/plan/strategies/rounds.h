#pragma once

#include <cstdint>

#include "plan/draft.h"
#include "plan/strategies/strategies.h"

namespace meshcast {

// Broadcast pipelines in as few rounds as there can be (round_optimal.h). In each round every stop takes in one
// chunk and passes one on. All hops have their place in time, so nothing is searched for.
//
// Inside a stop of m ranks chunks enter at its ranks in turn. Once each rank has got one, these chunks go round
// together in m - 1 steps: no rank sends or takes in two at a time. Where ranks of a host copy slower than its
// NIC takes in, this keeps them busy all the time.
struct RoundsStyle {
  bool by_rank = false;  // stops are ranks, not hosts
  // Chunks take so many broadcasts in turn. A hop waits for the latency of the one before it; hops of the other
  // broadcasts fill that wait. But each takes its own rounds until it is full.
  int32_t lanes = 1;
};

// What the pipeline should take, so that sizes of chunks and styles can be compared. `chunks`: of each bundle,
// 0 where the style is of no use.
struct RoundsCost {
  RoundsStyle style;
  int64_t chunks = 0;
  int64_t time_ns = 0;
  size_t stops = 0;  // of the bundle with most
};

// The best of the styles, and how many chunks it takes, each of at least
// kSmallestChunk. `given`: so many chunks, whatever is best; 0 where that is to be found.
RoundsCost rounds_cost(const Inputs& in, bool by_rank, int64_t given);

// Chunks of at most in.chunk_bytes. Hops are in the order that their ports should keep. Bundles to be reduced
// are not allowed. No hops at all where there would be more than kMaxHops.
Draft draft_rounds(const Inputs& in, RoundsStyle style);

}  // namespace meshcast
