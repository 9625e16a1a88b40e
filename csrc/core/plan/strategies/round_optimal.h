#pragma once

#include <cstdint>
#include <vector>

namespace meshcast {

// Broadcast of n blocks from party 0 to parties 1 to p - 1 in n - 1 + ceil(log2 p) rounds, which is optimal if
// a party sends one block and receives one block at a time. In every round party r sends to party r + skip and
// receives from r - skip (mod p), and the skips repeat after ceil(log2 p) rounds.
//
// After J. L. Traeff, "Optimal Broadcast Schedules in Logarithmic Time with Applications to Broadcast,
// All-Broadcast, Reduction and All-Reduction", 2024.
class RoundOptimal {
 public:
  explicit RoundOptimal(int32_t parties);  // at least 2

  // Party `to` receives `block` from party `from` in `round`, counted from 0.
  struct Send {
    int32_t from = 0;
    int32_t to = 0;
    int32_t block = 0;
    int32_t round = 0;
  };

  // Ordered by round, in a round by `to`. Every party except 0 receives every block once.
  std::vector<Send> sends(int32_t blocks) const;

  // ceil(log2 p): rounds until the first block is everywhere.
  int32_t depth() const { return depth_; }

 private:
  int32_t base_block(int32_t party) const;
  void find_blocks(int32_t party);

  int32_t parties_;
  int32_t depth_ = 0;
  std::vector<int32_t> skip_;  // depth_ + 2 of them; skip_[depth_] is p
  // [party * depth + k]: the block that the party receives in round k of the first depth_ rounds; depth_ more
  // in every repetition. Negative: a block of the previous repetition, which does not exist in the first one.
  std::vector<int32_t> blocks_;
};

}  // namespace meshcast
