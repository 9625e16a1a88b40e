#include "plan/strategies/round_optimal.h"

#include <algorithm>

namespace meshcast {
namespace {

// Finds the blocks that one party receives, by visiting the parties before it from the nearest to the farthest.
// Each has its base block (below) first, so it can have passed that on. `target` is the party plus p, so that
// the parties before it are numbers between 0 and target. Numbers are visited as sums of falling skips, the
// larger ones first, and whole branches that are too near for the next round are skipped: it takes O(log p)
// steps.
class BlockSearch {
 public:
  BlockSearch(const std::vector<int32_t>& skip, int32_t depth, int32_t target, int32_t own, int32_t* found)
      : skip_(skip),
        depth_(depth),
        target_(target),
        used_(static_cast<size_t>(depth) + 1, false),
        found_(found) {
    used_[static_cast<size_t>(own)] = true;
  }

  void run() { visit(0, depth_, 2 * skip(depth_)); }

 private:
  int32_t skip(int32_t k) const { return skip_[static_cast<size_t>(k)]; }

  // Numbers above `base` and below `limit` that add to it skips up to number `top`.
  void visit(int32_t base, int32_t top, int32_t limit) {
    for (int32_t block = top; block >= 0 && round_ < depth_; --block) {
      if (used_[static_cast<size_t>(block)]) continue;
      // `base` has to be used now if it is too near for the next round.
      if (base > target_ - skip(round_ + 1)) return;
      const int32_t number = base + skip(block);
      if (number >= limit || number > target_ - skip(round_)) continue;
      visit(number, block - 1, std::min(limit, base + skip(block + 1)));
      if (round_ == depth_ || used_[static_cast<size_t>(block)] || number > target_ - skip(round_)) continue;
      used_[static_cast<size_t>(block)] = true;
      found_[round_++] = block;
    }
  }

  const std::vector<int32_t>& skip_;
  int32_t depth_;
  int32_t target_;
  int32_t round_ = 0;
  std::vector<bool> used_;
  int32_t* found_;
};

}  // namespace

RoundOptimal::RoundOptimal(int32_t parties) : parties_(parties) {
  while ((int64_t{1} << depth_) < parties) ++depth_;
  // Halves of p, rounded up: 13 has 1, 2, 4, 7 and 13.
  skip_.assign(static_cast<size_t>(depth_) + 2, 2 * parties);
  skip_[static_cast<size_t>(depth_)] = parties;
  for (auto k = static_cast<size_t>(depth_); k-- > 0;) skip_[k] = skip_[k + 1] - skip_[k + 1] / 2;
  blocks_.assign(static_cast<size_t>(parties) * static_cast<size_t>(depth_), 0);
  for (int32_t party = 0; party < parties; ++party) find_blocks(party);
}

// The first block of a party. Party 0 sends block k in round k to party skip[k], which forwards it in the next
// rounds. So the block is the least skip of the sum of falling skips that leads to the party.
int32_t RoundOptimal::base_block(int32_t party) const {
  int32_t at = 0;
  for (int32_t k = depth_ - 1; k >= 0; --k) {
    const int32_t next = at + skip_[static_cast<size_t>(k)];
    if (next == party) return k;
    if (next < party) at = next;
  }
  return depth_;
}

void RoundOptimal::find_blocks(int32_t party) {
  const int32_t own = base_block(party);
  int32_t* found = &blocks_[static_cast<size_t>(party) * static_cast<size_t>(depth_)];
  BlockSearch(skip_, depth_, parties_ + party, own, found).run();
  // Party 0 counts as a separate block: the block received from it is the base block. All others are those of
  // the previous repetition.
  for (int32_t k = 0; k < depth_; ++k) found[k] = found[k] == depth_ && party > 0 ? own : found[k] - depth_;
}

std::vector<RoundOptimal::Send> RoundOptimal::sends(int32_t blocks) const {
  std::vector<Send> out;
  out.reserve(static_cast<size_t>(blocks) * static_cast<size_t>(parties_ - 1));
  // The last repetition ends with the last round, so the first one may be incomplete.
  const int32_t rounds = blocks - 1 + depth_;
  const int32_t shift = (depth_ - rounds % depth_) % depth_;
  std::vector<bool> last(static_cast<size_t>(parties_), false);  // whether the party has the last block
  for (int32_t round = 0; round < rounds; ++round) {
    const int32_t k = (round + shift) % depth_;
    const int32_t past = (round + shift) / depth_ * depth_ - shift;
    for (int32_t to = 1; to < parties_; ++to) {
      int32_t block =
          past + blocks_[static_cast<size_t>(to) * static_cast<size_t>(depth_) + static_cast<size_t>(k)];
      if (block < 0) continue;
      // Blocks after the last one count as the last one.
      if (block >= blocks - 1) {
        block = blocks - 1;
        if (last[static_cast<size_t>(to)]) continue;
        last[static_cast<size_t>(to)] = true;
      }
      const int32_t from = to - skip_[static_cast<size_t>(k)];
      out.push_back({from < 0 ? from + parties_ : from, to, block, round});
    }
  }
  return out;
}

}  // namespace meshcast
