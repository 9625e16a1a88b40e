#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

namespace meshcast {

// Weighted set cover: finds the sets, each with a price, that contain all of up to 64 values at the least
// price.
class ValueCover {
 public:
  void clear() { all_.clear(); }
  void add(uint64_t values, __int128 price, int32_t id) { all_.push_back({values, price, id}); }

  // The least price at which `wanted` can be covered; exact unless the search exceeds its budget of nodes, then
  // a lower bound. `chosen` gets the ids of a cover that was found, the cheapest one if the price is exact.
  __int128 solve(uint64_t wanted, std::vector<int32_t>* chosen);

 private:
  struct Set {
    uint64_t values = 0;
    __int128 price = 0;
    int32_t id = -1;
  };
  void choose_useful(uint64_t wanted);
  __int128 floor_of(uint64_t wanted) const;
  void search(uint64_t wanted, __int128 price);

  std::vector<Set> all_, sets_;      // all sets; those that are useful for `wanted`
  std::vector<size_t> open_, best_;  // numbers of sets
  __int128 best_price_ = 0;
  bool found_ = false;
  int32_t nodes_ = 0;
};

}  // namespace meshcast
