#pragma once

#include "plan/draft.h"
#include "plan/strategies/strategies.h"

namespace meshcast {

// Multicast trees of one shape for all chunks of a bundle, so that chunks follow each other as in a pipeline.
// Trees that differ from chunk to chunk (draft_multicast) spread the load better if ports differ. These are
// cheap to make, so chunks may be fine enough for many hosts.
//
// A chunk enters a stop over a NIC: a host, inside which it goes round from rank to rank, or a single rank if
// ranks of a host copy too slowly among themselves. Chunks enter a host at its ranks in turn.
struct PipelineStyle {
  bool by_rank = false;    // stops are ranks, not hosts
  bool two_trees = false;  // else a chain from every host that holds the chunk
};

// The hops of the pipeline for one chunk of every bundle, and the steps until the first chunk is everywhere,
// counted in chunks of every bundle.
struct PipelineCost {
  int64_t hops = 0;
  int64_t fill = 0;
};
PipelineCost pipeline_cost(const Inputs& in, PipelineStyle style);

// Chunks of at most in.chunk_bytes. Bundles to be reduced are not allowed. Returns no hops if there would be
// more than half of kMaxHops.
Draft draft_pipeline(const Inputs& in, PipelineStyle style);

}  // namespace meshcast
