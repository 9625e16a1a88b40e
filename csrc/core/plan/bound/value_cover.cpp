#include "plan/bound/value_cover.h"

#include <algorithm>
#include <array>
#include <bit>

namespace meshcast {
namespace {

constexpr int32_t kMostNodes = 2'000;

}  // namespace

// A set that another one contains at no higher price is never needed.
void ValueCover::choose_useful(uint64_t wanted) {
  std::vector<Set> open;
  for (Set set : all_) {
    set.values &= wanted;
    if (set.values != 0) open.push_back(set);
  }
  std::sort(open.begin(), open.end(), [](const Set& a, const Set& b) {
    if (a.price != b.price) return a.price < b.price;
    const int more = std::popcount(a.values) - std::popcount(b.values);
    return more != 0 ? more > 0 : a.id < b.id;
  });
  sets_.clear();
  for (const Set& set : open) {
    const bool useless =
        std::any_of(sets_.begin(), sets_.end(), [&](const Set& k) { return (set.values & ~k.values) == 0; });
    if (!useless) sets_.push_back(set);
  }
}

// Dual ascent: every value in turn gets as much weight as the sets that contain it have left of their prices.
// The weights are a feasible dual of the linear program of set cover: no set's values weigh more than its
// price. By weak duality, their sum is a lower bound for every cover. Values in few sets come first, since only
// these sets lose the weight.
//
// Example. Sets {0, 1} at 3, {1, 2} at 3, {0, 2} at 3. Every value is in two sets. 0 gets 3, which uses up the
// first and the third set; 1 gets min(0, 3) = 0, and 2 gets 0, too. The floor is 3, the cheapest cover 6, and
// the best dual 4.5 (1.5 each).
__int128 ValueCover::floor_of(uint64_t wanted) const {
  std::vector<__int128> left(sets_.size());
  for (size_t i = 0; i < sets_.size(); ++i) left[i] = sets_[i].price;
  std::array<std::pair<int32_t, int32_t>, 64> rarest;  // (number of sets, value)
  size_t count = 0;
  for (uint64_t rest = wanted; rest != 0; rest &= rest - 1) {
    const uint64_t bit = rest & -rest;
    int32_t sets = 0;
    for (const Set& set : sets_) sets += (set.values & bit) != 0;
    rarest[count++] = {sets, std::countr_zero(rest)};
  }
  std::sort(rarest.begin(), rarest.begin() + static_cast<int64_t>(count));
  __int128 total = 0;
  for (size_t i = 0; i < count; ++i) {
    const uint64_t bit = uint64_t{1} << rarest[i].second;
    __int128 give = -1;
    for (size_t k = 0; k < sets_.size(); ++k)
      if ((sets_[k].values & bit) != 0 && (give < 0 || left[k] < give)) give = left[k];
    if (give <= 0) continue;
    for (size_t k = 0; k < sets_.size(); ++k)
      if ((sets_[k].values & bit) != 0) left[k] -= give;
    total += give;
  }
  return total;
}

void ValueCover::search(uint64_t wanted, __int128 price) {
  if (++nodes_ > kMostNodes) return;
  if (wanted == 0) {
    if (!found_ || price < best_price_) {
      found_ = true;
      best_price_ = price;
      best_ = open_;
    }
    return;
  }
  // Bound: nothing below this node can beat the best cover.
  if (found_ && price + floor_of(wanted) >= best_price_) return;
  // Branch on the value that is in the fewest sets: one of these must be taken, so the branches are few and
  // complete.
  uint64_t rarest = 0;
  size_t fewest = SIZE_MAX;
  for (uint64_t rest = wanted; rest != 0; rest &= rest - 1) {
    const uint64_t bit = rest & -rest;
    size_t sets = 0;
    for (const Set& set : sets_) sets += (set.values & bit) != 0;
    if (sets < fewest) {
      fewest = sets;
      rarest = bit;
    }
  }
  for (size_t i = 0; i < sets_.size(); ++i) {  // cheapest first
    if ((sets_[i].values & rarest) == 0) continue;
    open_.push_back(i);
    search(wanted & ~sets_[i].values, price + sets_[i].price);
    open_.pop_back();
  }
}

__int128 ValueCover::solve(uint64_t wanted, std::vector<int32_t>* chosen) {
  chosen->clear();
  if (wanted == 0) return 0;
  choose_useful(wanted);
  open_.clear();
  found_ = false;
  nodes_ = 0;
  search(wanted, 0);
  for (const size_t i : best_) chosen->push_back(sets_[i].id);
  // Out of budget the best cover may not be the cheapest, so its price is no lower bound; the dual always is.
  return nodes_ > kMostNodes ? floor_of(wanted) : best_price_;
}

}  // namespace meshcast
