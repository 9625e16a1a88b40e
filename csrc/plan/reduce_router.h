#pragma once

#include <cstdint>
#include <vector>

#include "plan/draft.h"
#include "plan/network.h"
#include "plan/plan.h"

namespace meshcast {

// Routes for Partial sources. A chunk visits one holder of every partial value on a chain, which adds as it
// goes, host by host; the rank at the end of the chain has the result and starts the chain through the
// receivers. Which replica of a value is used, where the chain ends and which receiver does not forward
// follow the load that the lanes have so far, chunk by chunk; on one mesh this is a ring all-reduce.
class ReduceRouter {
 public:
  explicit ReduceRouter(const Network& network)
      : network_(network), load_(static_cast<size_t>(network.lane_count()), 0) {}

  Route route(const Task& task, int64_t nbytes);

 private:
  int64_t load_at(int32_t lane) const { return load_[static_cast<size_t>(lane)]; }
  int64_t rank_load(int32_t rank) const;  // ns on the lanes of a rank
  void add_edge(int32_t src, int32_t dst, Route* route, int64_t nbytes);
  std::vector<int32_t> choose_values(const Task& task) const;

  const Network& network_;
  std::vector<int64_t> load_;  // by lane, ns
  int64_t turn_ = 0;
};

// Adds the chunks and hops of every bundle that is to be reduced; the strategies route the others.
void draft_reductions(const std::vector<Task>& tasks, const std::vector<Bundle>& bundles, const Network& network,
                      int64_t chunk_bytes, Drafter* drafter);

}  // namespace meshcast
