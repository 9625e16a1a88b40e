#pragma once

#include "plan/draft.h"
#include "plan/strategies/strategies.h"

namespace meshcast {

// Multicast trees of one shape for all chunks of a bundle, so that chunks follow each other like through a
// pipeline. Trees that differ from chunk to chunk, as those of draft_multicast, spread the load better where
// ports differ. These are cheap to make, so chunks may be fine enough for many hosts.
//
// A stop is what a chunk enters over a NIC: a host, inside which it goes round from rank to rank, or a single
// rank where ranks of a host copy too slowly among themselves. Chunks enter a host at its ranks in turn.
struct PipelineStyle {
  bool by_rank = false;    // stops are ranks, not hosts
  bool two_trees = false;  // else a chain from every host that holds the chunk
};

// How many hops the pipeline takes for one chunk of every bundle, and how many steps until the first chunk is
// everywhere, counted in chunks of every bundle.
struct PipelineCost {
  int64_t hops = 0;
  int64_t fill = 0;
};
PipelineCost pipeline_cost(const Inputs& in, PipelineStyle style);

// Chunks of at most in.chunk_bytes. Bundles to be reduced are not allowed. No hops at all where there would be
// more than half of kMaxHops.
Draft draft_pipeline(const Inputs& in, PipelineStyle style);

}  // namespace meshcast
