#pragma once

#include <cstdint>

#include "plan/draft.h"
#include "plan/strategies/strategies.h"

namespace meshcast {

// Broadcast pipelines in the fewest possible rounds (round_optimal.h). In each round every stop receives one
// chunk and passes one on. The times of all hops are given, so there is no search.
//
// Chunks enter a stop of m ranks at its ranks in turn. Once each rank has one, these chunks go round together
// in m - 1 steps: no rank sends or receives two at a time. If ranks of a host copy slower than its NIC
// receives, this keeps them always busy.
struct RoundsStyle {
  bool by_rank = false;  // stops are ranks, not hosts
  // Chunks take so many broadcasts in turn. A hop waits for the latency of the one before it; hops of the other
  // broadcasts fill that wait. But each needs its own rounds to fill.
  int32_t lanes = 1;
};

// The expected time of the pipeline, to compare chunk sizes and styles. `chunks`: of each bundle, 0 if the
// style is of no use.
struct RoundsCost {
  RoundsStyle style;
  int64_t chunks = 0;
  int64_t time_ns = 0;
  size_t stops = 0;  // of the bundle with most
};

// The best of the styles, and its number of chunks, each of at least kSmallestChunk. `given`: the number of
// chunks; 0 to search for the best.
RoundsCost rounds_cost(const Inputs& in, bool by_rank, int64_t given);

// Chunks of at most in.chunk_bytes. Hops are in the order that their ports should keep. Bundles to be reduced
// are not allowed. Returns no hops if there would be more than kMaxHops.
Draft draft_rounds(const Inputs& in, RoundsStyle style);

}  // namespace meshcast
