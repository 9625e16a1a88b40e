#pragma once

#include <cstdint>
#include <vector>

#include "plan/draft.h"
#include "plan/network.h"
#include "plan/plan.h"

namespace meshcast {

// The ordering problem of the cross-mesh resharding paper (Zhuang et al., "On Optimizing the Communication of
// Model Parallelism", MLSys 2023): each task is broadcast by one of its holder hosts and occupies that host
// and all its receiver hosts until it is done, uncut. Choose senders and an order; hosts have one clock each.
struct PaperWork {
  int32_t bundle = -1;
  std::vector<int32_t> senders;    // holder hosts, in order of their first holder
  std::vector<int32_t> receivers;  // receiver hosts
  int64_t nbytes = 0;              // duration
};

struct PaperOrder {
  std::vector<int32_t> work;    // indices in order of submission
  std::vector<int32_t> sender;  // host, parallel to `work`
};

// One work for each bundle that is not to be reduced.
std::vector<PaperWork> paper_works(const std::vector<Task>& tasks, const std::vector<Bundle>& bundles,
                                   const Network& network);

// none: first holder, natural order. size: least loaded sender host, natural order. greedy: 100 rounds per
// step, each draws a maximal set of works that share no host, with senders of lower load more likely; the
// largest set is appended, among equals the one with the most even loads. search: depth-first over (next work,
// sender), starting from greedy's result, pruned by remaining loads, bounded by a node budget.
PaperOrder solve_paper_order(const std::vector<PaperWork>& works, int32_t hosts, Balance balance,
                             uint64_t seed);

// The end of the last work, in bytes over one NIC.
int64_t paper_makespan(const std::vector<PaperWork>& works, int32_t hosts, const PaperOrder& order);

}  // namespace meshcast
