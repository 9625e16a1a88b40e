#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "group/board_store.h"

namespace meshcast {

// The ranks of a group that have reached some point, as bits of numbers in the store: one request returns
// whether all have, and one for each 64 ranks which ones have not. Ranks are given by position in the group.
// Throws what the store throws.
class Roll {
 public:
  Roll(std::shared_ptr<BoardStore> store, std::string key, size_t ranks)
      : store_(std::move(store)), key_(std::move(key)), ranks_(ranks), seen_((ranks + kBits - 1) / kBits) {}

  void sign(size_t at);    // adds this rank; once
  void unsign(size_t at);  // removes it again
  // Signs, for rolls that are asked whether all have signed; returns whether they have by now.
  bool answer(size_t at);
  bool all_answered();

  bool is_one_question() const { return seen_.size() == 1; }
  // As of the last request, if that covers all ranks (is_one_question()); else of the last refresh().
  bool has(size_t at) const { return (seen_[at / kBits] & bit(at)) != 0; }
  std::vector<size_t> missing() const;
  void refresh();

  void erase();
  void disown();  // another rank erases it

 private:
  static constexpr size_t kBits = 64;
  static uint64_t bit(size_t at) { return uint64_t{1} << at % kBits; }

  std::string word(size_t at) const { return key_ + "/" + std::to_string(at / kBits); }
  std::string full() const { return key_ + "/full"; }  // how many words are full, if there are several
  bool is_full(size_t at) const;
  std::vector<std::string> keys() const;

  const std::shared_ptr<BoardStore> store_;
  const std::string key_;
  const size_t ranks_;
  std::vector<uint64_t> seen_;
};

}  // namespace meshcast
