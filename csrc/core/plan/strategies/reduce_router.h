#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <vector>

#include "plan/bound/reduce_mix.h"
#include "plan/draft.h"
#include "plan/network.h"
#include "plan/plan.h"

namespace meshcast {

// Routes for Partial sources. A host that needs the result and has every partial value reduces them inside. For
// the other receivers a chunk visits one holder of every value on a chain that reduces as it goes, host by
// host; the rank at its end has the result, from where a tree reaches all receivers. The replicas, the ends of
// the chain, and the NICs over which each host is entered and left are chosen for every chunk, with the least
// increase of the sum of squared port loads (see mind_the_busiest for the end of the search).
class ReduceRouter {
 public:
  explicit ReduceRouter(const Network& network)
      : network_(network),
        load_(static_cast<size_t>(network.port_count()), 0),
        nic_edge_(static_cast<size_t>(network.nic_count()), kUnseen) {}

  // The route of a chunk; its load counts for the routes after it. `ways` are tried in addition to the rules;
  // with `only` >= 0, only that one.
  using Ways = std::vector<WayPart>;
  const Route& route(const Task& task, int64_t nbytes, const Ways& ways, int32_t only = -1);

  // From now on the sum of the eighth powers of the loads counts instead of their squares: it follows the most
  // loaded ports even if sparing them takes more hops.
  void mind_the_busiest();

  // The load of the busiest port, over all routes so far.
  int64_t busiest_ns() const { return load_.empty() ? 0 : *std::max_element(load_.begin(), load_.end()); }

  // Chooses the route of a chunk again, now that the load of all others is known. Returns false if the old one
  // is kept.
  bool improve(const Task& task, int64_t nbytes, const Ways& ways, Route* route);

 private:
  static constexpr int32_t kUnseen = -2;
  using Values = std::map<int32_t, std::vector<int32_t>>;  // partial value -> ranks that have it
  struct Stop {  // a rank that has the chunk, and the edge that brought it
    int32_t rank = -1;
    int32_t edge = -1;
  };
  enum class Cover : uint8_t { FewHosts, LittleLoad, BestOfBoth, Cheapest };

  void measure(int64_t nbytes);
  int64_t hop_ns(int32_t port) const { return (*hop_ns_)[static_cast<size_t>(port)]; }
  __int128 weigh(int64_t load_ns) const;
  __int128 cost_of(int32_t port) const;  // the increase of the weight of all loads by a hop on the port
  __int128 entry_cost(int32_t rank) const { return cost_of(network_.nic_in(network_.nic(rank))); }
  __int128 exit_cost(int32_t rank) const { return cost_of(network_.nic_out(network_.nic(rank))); }
  int32_t cheapest(const std::vector<int32_t>& ranks, int32_t but, bool entry) const;
  void load(const Route& route, int64_t times);
  Stop go(Stop from, int32_t to, ReduceOp reduce);
  void undo(size_t edges);
  std::vector<int32_t> cheapest_hosts(const std::map<int32_t, Values>& hosts) const;
  std::vector<int32_t> pick_ranks(const std::map<int32_t, Values>& hosts, Cover cover) const;
  void spread_or_reduce(const std::vector<int32_t>& others, ReduceOp op);
  Stop reduce_along(const std::vector<int32_t>& values, int32_t root, size_t rounds, ReduceOp op);
  Stop reduce_along(const ReduceWay& way, ReduceOp op);
  bool follow(const ReduceWay& way, ReduceOp op);
  void reduce_best(const std::map<int32_t, Values>& hosts, const std::vector<int32_t>& others, ReduceOp op);
  void serve(const std::vector<int32_t>& values, int32_t root, size_t rounds,
             const std::vector<int32_t>& others, ReduceOp op);
  Stop spread_inside(Stop from, int32_t first);
  void spread_outside(std::vector<Stop> having, const std::vector<int32_t>& hosts);

  const Network& network_;
  std::vector<int64_t> load_;  // by port, ns
  std::vector<int32_t> nic_edge_;
  uint64_t turn_ = 0;                                  // state of the generator that chooses the ends to try
  int64_t unit_ns_ = 0;                                // unit of loads whose eighth powers count; 0: squares
  bool inside_limits_ = false;                         // a local port is busiest
  std::map<int64_t, std::vector<int64_t>> hop_ns_of_;  // chunk bytes -> time by port
  // Of the current chunk.
  const std::vector<int64_t>* hop_ns_ = nullptr;
  std::map<int32_t, Values> hosts_;                    // hosts that have values
  size_t values_ = 0;                                  // the number of values
  std::map<int32_t, std::vector<int32_t>> receivers_;  // by host, ascending
  std::vector<Stop> visited_;                          // ranks that have the result, by the last step
  std::vector<Stop> having_;                           // ranks on hosts that reduced for themselves
  Route route_;
  __int128 cost_ = 0;  // the increase of the weight of all loads by the route
};

}  // namespace meshcast
