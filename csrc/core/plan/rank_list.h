#pragma once

#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

namespace meshcast {

// Ranks, or numbers that go with ranks, that do not change. Copies share them: tensors that are alike have the
// same holders and receivers, and there may be a million tasks.
class RankList {
 public:
  RankList() = default;
  RankList(std::vector<int32_t> ranks)  // NOLINT: a list of ranks is one
      : ranks_(std::make_shared<const std::vector<int32_t>>(std::move(ranks))) {}

  const std::vector<int32_t>& list() const {
    static const std::vector<int32_t> none;
    return ranks_ ? *ranks_ : none;
  }
  operator const std::vector<int32_t>&() const { return list(); }  // NOLINT

  auto begin() const { return list().begin(); }
  auto end() const { return list().end(); }
  size_t size() const { return list().size(); }
  bool empty() const { return list().empty(); }
  int32_t front() const { return list().front(); }
  int32_t operator[](size_t i) const { return list()[i]; }

  friend bool operator==(const RankList& a, const RankList& b) {
    return a.ranks_ == b.ranks_ || a.list() == b.list();
  }

 private:
  std::shared_ptr<const std::vector<int32_t>> ranks_;
};

}  // namespace meshcast
