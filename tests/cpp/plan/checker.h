#pragma once

#include <map>
#include <set>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace meshcast::testing {

// Executes a plan on sets of element numbers, knowing only the contract of plan.h. Returns "" or the first
// thing that is wrong: an element written twice or never, a hop that sends what its sender does not have, a
// hop before the one it comes after, a partial value counted twice or left out.
class PlanChecker {
 public:
  explicit PlanChecker(const Plan& plan) : plan_(plan) {}

  std::string check() {
    for (size_t t = 0; t < plan_.problems.size(); ++t) load(static_cast<int32_t>(t));
    for (const LocalCopy& copy : plan_.local_copies) {
      for (const int64_t e : elements(copy.tensor, copy.box)) {
        if (source_[{copy.rank, copy.tensor}].count(e) == 0)
          return "a local copy reads what its rank does not hold";
        ++written_[{copy.rank, copy.tensor}][e];
      }
    }
    for (size_t i = 0; i < plan_.hops.size(); ++i) {
      const std::string problem = run(i);
      if (!problem.empty()) return "hop " + std::to_string(i) + ": " + problem;
    }
    return finish();
  }

 private:
  using Key = std::pair<int32_t, int32_t>;  // rank, tensor

  std::vector<int64_t> elements(int32_t tensor, const Box& box) const {
    std::vector<int64_t> out{0};
    const std::vector<int64_t>& shape = plan_.problems[static_cast<size_t>(tensor)].shape;
    for (int d = 0; d < box.ndim; ++d) {
      std::vector<int64_t> next;
      for (const int64_t e : out) {
        for (int64_t i = box.lo[d]; i < box.hi[d]; ++i) next.push_back(e * shape[static_cast<size_t>(d)] + i);
      }
      out = std::move(next);
    }
    return out;
  }

  void load(int32_t tensor) {
    const Problem& problem = plan_.problems[static_cast<size_t>(tensor)];
    for (const Shard& shard : shards(problem.src, problem.shape)) {
      for (const ShardPiece& piece : shard.pieces) {
        for (const int64_t e : elements(tensor, piece.box)) source_[{shard.rank, tensor}].insert(e);
      }
    }
    for (const Shard& shard : shards(problem.dst, problem.shape)) {
      for (const ShardPiece& piece : shard.pieces) {
        for (const int64_t e : elements(tensor, piece.box)) needed_[{shard.rank, tensor}].insert(e);
      }
    }
  }

  const Task& task(const Chunk& chunk) const {
    const ChunkPiece& piece = plan_.pieces[static_cast<size_t>(chunk.piece_begin)];
    return plan_.tasks[static_cast<size_t>(piece.task)];
  }

  std::string write(const Chunk& chunk, int32_t rank) {
    for (int32_t p = chunk.piece_begin; p < chunk.piece_end; ++p) {
      const ChunkPiece& piece = plan_.pieces[static_cast<size_t>(p)];
      if (!plan_.tasks[static_cast<size_t>(piece.task)].box.contains(piece.box))
        return "a piece leaves its task's box";
      for (const int64_t e : elements(piece.tensor, piece.box)) ++written_[{rank, piece.tensor}][e];
    }
    return "";
  }

  bool holds(const Chunk& chunk, int32_t rank) {
    for (int32_t p = chunk.piece_begin; p < chunk.piece_end; ++p) {
      const ChunkPiece& piece = plan_.pieces[static_cast<size_t>(p)];
      const std::set<int64_t>& held = source_[{rank, piece.tensor}];
      for (const int64_t e : elements(piece.tensor, piece.box)) {
        if (held.count(e) == 0) return false;
      }
    }
    return true;
  }

  // The numbered partial values that a rank's carried value of a chunk is made of.
  std::set<int32_t>& carried(int32_t chunk, int32_t rank) {
    auto [it, fresh] = carried_.try_emplace({chunk, rank});
    if (fresh) {
      const Task& t = task(plan_.chunks[static_cast<size_t>(chunk)]);
      for (size_t i = 0; i < t.holders.size(); ++i) {
        if (t.holders[i] == rank) it->second.insert(t.contribution[i]);
      }
    }
    return it->second;
  }

  std::string run(size_t i) {
    const Hop& hop = plan_.hops[i];
    const Chunk& chunk = plan_.chunks[static_cast<size_t>(hop.chunk)];
    int64_t nbytes = 0;
    for (int32_t p = chunk.piece_begin; p < chunk.piece_end; ++p) {
      const ChunkPiece& piece = plan_.pieces[static_cast<size_t>(p)];
      nbytes += piece.box.volume() * plan_.problems[static_cast<size_t>(piece.tensor)].element_bytes;
    }
    if (nbytes != chunk.nbytes) return "its chunk has another size than its pieces";
    if (hop.src == hop.dst) return "it goes from a rank to itself";
    if (hop.after >= static_cast<int32_t>(i)) return "it comes before the hop it depends on";
    const Hop* before = hop.after < 0 ? nullptr : &plan_.hops[static_cast<size_t>(hop.after)];
    if (before != nullptr && (before->dst != hop.src || before->chunk != hop.chunk))
      return "its chunk was never there";
    const Task& t = task(chunk);
    if (t.reduce == ReduceOp::None) {
      if (hop.reduce != ReduceOp::None) return "it reduces what is not partial";
      if (before == nullptr && !holds(chunk, hop.src)) return "its sender does not hold the chunk";
      return write(chunk, hop.dst);
    }
    std::set<int32_t>& sent = carried(hop.chunk, hop.src);
    const std::set<int32_t> all(t.contribution.begin(), t.contribution.end());
    if (hop.reduce == ReduceOp::None) {
      if (sent != all) return "it hands on a value that is not fully reduced";
      if (before == nullptr) return "it hands on a partial value as the result";
      if (before->reduce != ReduceOp::None && !before->last_reduce)
        return "it follows a reduction that is not over";
      carried(hop.chunk, hop.dst) = all;
      return write(chunk, hop.dst);
    }
    if (hop.reduce != t.reduce) return "it reduces with another operation";
    if (sent.empty() || !holds(chunk, hop.src)) return "its sender has no partial value";
    std::set<int32_t>& kept = carried(hop.chunk, hop.dst);
    if (kept.empty()) return "its receiver has no partial value to reduce with";
    for (const int32_t c : sent) {
      if (!kept.insert(c).second) return "a partial value is counted twice";
    }
    if (hop.last_reduce != (kept == all)) return "last_reduce does not mark the end of the reduction";
    const std::vector<int32_t>& need = t.receivers;
    if (hop.last_reduce && std::find(need.begin(), need.end(), hop.dst) != need.end())
      return write(chunk, hop.dst);
    return "";
  }

  std::string finish() {
    for (const auto& [key, need] : needed_) {
      const auto& got = written_[key];
      if (got.size() > need.size()) return where(key) + " gets elements it does not need";
      for (const int64_t e : need) {
        const auto it = got.find(e);
        if (it == got.end()) return where(key) + " never gets element " + std::to_string(e);
        if (it->second != 1) return where(key) + " gets element " + std::to_string(e) + " more than once";
      }
    }
    for (const auto& [key, got] : written_) {
      if (needed_.find(key) == needed_.end() && !got.empty())
        return where(key) + " needs nothing and gets something";
    }
    return "";
  }

  static std::string where(const Key& key) {
    return "rank " + std::to_string(key.first) + ", tensor " + std::to_string(key.second);
  }

  const Plan& plan_;
  std::map<Key, std::set<int64_t>> source_, needed_;
  std::map<Key, std::map<int64_t, int>> written_;
  std::map<std::pair<int32_t, int32_t>, std::set<int32_t>> carried_;  // chunk, rank
};

inline std::string check_plan(const Plan& plan) { return PlanChecker(plan).check(); }

}  // namespace meshcast::testing
