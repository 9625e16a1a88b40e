#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "plan/network.h"

namespace meshcast {

// Divides boxes that can take several ways among these, so that the busiest port is done as early as possible.
// It is a game: one player puts prices on ports, each box is another player that takes cheap ways. Both play
// regret matching with regrets cut at zero, in turns, and their average play is close to optimal (Tammelin et
// al., "Solving Heads-up Limit Texas Hold'em", IJCAI 2015). Integer arithmetic throughout.
class PortGame {
 public:
  // Times are rounded to 1 / 2^35 of `most_ns`, which is above the sum over boxes of the time of any way.
  PortGame(size_t boxes, const Network& network, int64_t most_ns);

  // The use of a way: bytes by port, ports ascending. add() returns its number, and whether it is new to the
  // box.
  using Use = std::vector<std::pair<int32_t, int64_t>>;
  std::pair<size_t, bool> add(size_t box, Use use);

  // Plays so many more rounds. Rounds before the last forget() do not count in the averages.
  void play(int64_t rounds);
  void forget();

  // Average prices of ports; any scale.
  const std::vector<int64_t>& prices() const { return price_sum_; }

  // Parts of a box, in the order in which its ways were added; any scale.
  std::vector<int64_t> parts(size_t box) const;

  // Time of the busiest port with this division, ns.
  int64_t busiest_ns() const;

  // Ports of all ways of all boxes: the cost of a round.
  int64_t size() const { return size_; }

 private:
  struct Way {
    Use use;                    // bytes
    std::vector<int64_t> time;  // units, parallel to use
    int64_t regret = 0;
    int64_t part = 0;  // of kWhole
    int64_t part_sum = 0;
  };
  void choose_ways(std::vector<Way>* ways);
  void price_ports();

  const Network& network_;
  const int64_t most_ns_;
  std::vector<std::vector<Way>> boxes_;
  std::vector<int64_t> load_, regret_, price_, price_sum_;  // by port
  int64_t size_ = 0;
  int64_t round_ = 0;  // since averages began
};

}  // namespace meshcast
