#pragma once

#include <cstdint>
#include <map>
#include <set>
#include <vector>

#include "plan/draft.h"
#include "plan/network.h"
#include "plan/plan.h"

namespace meshcast {

// Routes for Partial sources. A host that needs the result and has every partial value reduces them inside. For
// the other receivers a chunk visits one holder of every value on a chain that adds as it goes, host by host;
// the rank at its end has the result and starts a chain through them. Which replica of a value is used and
// where the reduction ends is tried out for every chunk, and what adds least to the sum of squared lane loads
// is taken; on one mesh this comes to a ring all-reduce.
class ReduceRouter {
 public:
  explicit ReduceRouter(const Network& network)
      : network_(network), load_(static_cast<size_t>(network.lane_count()), 0) {}

  const Route& route(const Task& task, int64_t nbytes);

 private:
  using Values = std::map<int32_t, std::vector<int32_t>>;  // partial value -> ranks that have it
  struct Stop {  // a rank that has the chunk, and the edge that brought it
    int32_t rank = -1;
    int32_t edge = -1;
  };

  int64_t load_at(int32_t lane) const { return load_[static_cast<size_t>(lane)]; }
  int64_t rank_load(int32_t rank) const;  // ns on the lanes of a rank
  Stop go(Stop from, int32_t to, ReduceOp reduce);
  std::vector<int32_t> pick_ranks(const std::map<int32_t, Values>& hosts, bool few_hosts) const;
  Stop reduce_along(const std::vector<int32_t>& values, int32_t root, ReduceOp op);
  Stop reduce_best(const std::map<int32_t, Values>& hosts, const std::vector<int32_t>& others, ReduceOp op);
  Stop serve(const std::vector<int32_t>& values, int32_t root, const std::vector<int32_t>& others, ReduceOp op);
  void undo(size_t edges);
  Stop spread_inside(Stop from, int32_t first);
  void spread_outside(Stop root, std::vector<int32_t> hosts);

  const Network& network_;
  std::vector<int64_t> load_;  // by lane, ns
  int64_t turn_ = 0;
  // Of the current chunk.
  int64_t nbytes_ = 0;
  std::map<int32_t, std::vector<int32_t>> receivers_;  // by host, ascending
  Route route_;
  __int128 cost_ = 0;  // what the route adds to the sum of squared loads
};

// Adds the chunks and hops of every bundle that is to be reduced; the strategies route the others.
void draft_reductions(const std::vector<Task>& tasks, const std::vector<Bundle>& bundles,
                      const Network& network, int64_t chunk_bytes, Drafter* drafter);

}  // namespace meshcast
