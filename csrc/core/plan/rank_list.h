#pragma once

#include <cstdint>
#include <memory>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/hash.h"

namespace meshcast {

// An immutable list of ranks, or of numbers that belong to ranks. Copies share its memory: equal tensors have
// the same holders and receivers, and there may be a million tasks.
class RankList {
 public:
  RankList() = default;
  RankList(std::vector<int32_t> ranks)  // NOLINT: a list of ranks is one
      : known_(std::make_shared<const Known>(std::move(ranks))) {}

  const std::vector<int32_t>& list() const {
    static const std::vector<int32_t> none;
    return known_ ? known_->ranks : none;
  }
  operator const std::vector<int32_t>&() const { return list(); }  // NOLINT

  auto begin() const { return list().begin(); }
  auto end() const { return list().end(); }
  size_t size() const { return list().size(); }
  bool empty() const { return list().empty(); }
  int32_t front() const { return list().front(); }
  int32_t operator[](size_t i) const { return list()[i]; }

  // A hash: the same for equal lists, and hardly ever for others.
  uint64_t word() const { return known_ ? known_->word : Known({}).word; }
  // The same for copies of one list, and for no others.
  const void* identity() const { return known_.get(); }

  friend bool operator==(const RankList& a, const RankList& b) {
    return a.known_ == b.known_ || (a.word() == b.word() && a.list() == b.list());
  }

 private:
  struct Known {
    explicit Known(std::vector<int32_t> all) : ranks(std::move(all)) {
      Hasher hasher;
      hasher.add(ranks);
      word = hasher.word();
    }
    std::vector<int32_t> ranks;
    uint64_t word = 0;
  };
  std::shared_ptr<const Known> known_;
};

// Makes lists that share their memory if they are equal.
class RankLists {
 public:
  RankList make(std::vector<int32_t> ranks) {
    RankList list(std::move(ranks));
    std::vector<RankList>& alike = made_[list.word()];
    for (const RankList& before : alike)
      if (before == list) return before;
    entries_ += static_cast<int64_t>(list.size());
    alike.push_back(list);
    return list;
  }

  int64_t entries() const { return entries_; }  // of all distinct lists

 private:
  std::unordered_map<uint64_t, std::vector<RankList>> made_;
  int64_t entries_ = 0;
};

}  // namespace meshcast
