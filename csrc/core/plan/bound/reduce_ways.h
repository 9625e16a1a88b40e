#pragma once

#include <cstdint>
#include <vector>

#include "plan/bound/value_cover.h"
#include "plan/network.h"
#include "plan/plan.h"

namespace meshcast {

// A way to reduce a box and send the result on, as hosts and ports of NICs.
struct ReduceWay {
  struct Visit {
    int32_t host = -1;
    int32_t in = -1, out = -1;
  };
  std::vector<Visit> chain;  // in order; no port into the first, none out of the last, where the box is reduced
  std::vector<Visit>
      results;  // to further hosts: the port into each, and the port out of a host that has it by then

  std::vector<int32_t> ports() const;  // with repeats
};

// The ways in which a box can be reduced and sent on, and the cheapest of them if every port of a NIC has a
// price. A way is a chain of hosts that together have every value, then a tree from its end, the root, through
// every further host that needs the result. Transfers inside hosts are free here.
class ReduceWays {
 public:
  // `price` is by port, per byte.
  using Prices = std::vector<__int128>;

  ReduceWays(const Task& task, const Network& network);

  int64_t size() const { return static_cast<int64_t>(sites_.size() * sites_.size()); }  // pairs of ends

  // Returns the cost of the cheapest way, or a lower bound; zero, and no way, if nothing is known.
  __int128 cheapest(const Prices& price, ReduceWay* way);

 private:
  struct Site {
    int32_t host = -1;
    uint64_t values = 0;
    bool needs = false;
    std::vector<int32_t> out, in;            // ports of ranks that have values
    std::vector<int32_t> need_out, need_in;  // ports of ranks that need the result
    std::vector<int32_t> root_out;           // ports of all of these
    bool complete = false;                   // has every value
    bool makes_it() const { return needs && complete; }
    // At the current prices.
    int32_t cheapest_out = -1, cheapest_in = -1, cheapest_root_out = -1, cheapest_need_in = -1;
  };

  std::vector<Site> sites_;
  uint64_t all_ = 0;
  bool countable_ = true;  // false: too many values to determine which hosts have all of them
  bool travels_ = false;   // false: every host that needs the result makes it alone
  ValueCover cover_;
};

}  // namespace meshcast
