#include "plan/tasks.h"

#include <algorithm>
#include <array>
#include <iterator>
#include <set>
#include <string>
#include <utility>

#include "common/checked.h"
#include "common/error.h"
#include "layout/box_tiles.h"
#include "layout/tiling.h"

namespace meshcast {
namespace {

// Stretch of one dimension with one source part and one destination part.
struct Cell {
  Interval range;
  int64_t src_part = 0;
  int64_t dst_part = 0;
};

struct Owned {
  Interval range;
  int64_t part = 0;
};

std::vector<Owned> by_position(const AxisTiling& axis) {
  std::vector<Owned> out;
  for (size_t p = 0; p < axis.parts.size(); ++p) {
    for (const Interval& i : axis.parts[p]) out.push_back({i, static_cast<int64_t>(p)});
  }
  std::sort(out.begin(), out.end(), [](const Owned& a, const Owned& b) { return a.range.lo < b.range.lo; });
  return out;
}

// Both sides partition the dimension, so one sweep finds every overlap.
std::vector<Cell> merge_axis(const AxisTiling& src, const AxisTiling& dst) {
  const std::vector<Owned> a = by_position(src);
  const std::vector<Owned> b = by_position(dst);
  std::vector<Cell> out;
  for (size_t i = 0, j = 0; i < a.size() && j < b.size();) {
    const int64_t lo = std::max(a[i].range.lo, b[j].range.lo);
    const int64_t hi = std::min(a[i].range.hi, b[j].range.hi);
    if (lo < hi) out.push_back({{lo, hi}, a[i].part, b[j].part});
    a[i].range.hi <= b[j].range.hi ? ++i : ++j;
  }
  return out;
}

class Intersection {
 public:
  explicit Intersection(Demand* out) : out_(out) {}

  void add(const Problem& problem, int32_t tensor) {
    if (!problem.src.by_boxes.empty() || !problem.dst.by_boxes.empty()) {
      add_boxes(problem, tensor);
      return;
    }
    const Tiling src = tile_layout(problem.src, problem.shape);
    const Tiling dst = tile_layout(problem.dst, problem.shape);
    // An unchanged layout keeps its pending reduction too: nothing is reduced, all is copied.
    const bool same = problem.src == problem.dst;
    const bool reduces = !same && src.contributions > 1;
    const size_t ndim = problem.shape.size();
    std::vector<std::vector<Cell>> axes(ndim);
    int64_t cells = 1;
    for (size_t d = 0; d < ndim; ++d) {
      axes[d] = merge_axis(src.axes[d], dst.axes[d]);
      cells = checked_mul(cells, static_cast<int64_t>(axes[d].size()), "number of tasks");
    }
    count(cells);
    std::vector<Holders> held;  // by tile
    for (size_t tile = 0; tile < src.holders.size(); ++tile) {
      const std::vector<int32_t>& ranks = src.holders[tile];
      std::vector<std::pair<int32_t, int32_t>> holders(ranks.size());
      for (size_t i = 0; i < ranks.size(); ++i) holders[i] = {ranks[i], src.contribution[tile][i]};
      std::sort(holders.begin(), holders.end());
      held.push_back(known(holders, reduces));
    }
    std::vector<RankList> wanted;
    for (std::vector<int32_t> ranks : dst.holders) {
      std::sort(ranks.begin(), ranks.end());
      wanted.push_back(lists_.make(std::move(ranks)));
    }
    std::vector<size_t> at(ndim, 0);
    std::vector<int64_t> src_part(ndim), dst_part(ndim);
    for (int64_t n = 0; n < cells; ++n) {
      Task task;
      task.tensor = tensor;
      task.box.ndim = static_cast<int>(ndim);
      for (size_t d = 0; d < ndim; ++d) {
        const Cell& cell = axes[d][at[d]];
        task.box.lo[d] = cell.range.lo;
        task.box.hi[d] = cell.range.hi;
        src_part[d] = cell.src_part;
        dst_part[d] = cell.dst_part;
      }
      task.nbytes = task.box.volume() * problem.element_bytes;
      emit(std::move(task), held[static_cast<size_t>(src.tile(src_part))],
           wanted[static_cast<size_t>(dst.tile(dst_part))], reduces, same);
      for (size_t d = ndim; d-- > 0;) {
        if (++at[d] < axes[d].size()) break;
        at[d] = 0;
      }
    }
  }

 private:
  struct Holders {
    RankList ranks;         // ascending
    RankList contribution;  // of bundles to be reduced
  };

  Holders known(const std::vector<std::pair<int32_t, int32_t>>& holders, bool reduces) {
    std::vector<int32_t> ranks, values;
    for (const auto& [rank, contribution] : holders) {
      ranks.push_back(rank);
      if (reduces) values.push_back(contribution);
    }
    return {lists_.make(std::move(ranks)), reduces ? lists_.make(std::move(values)) : RankList()};
  }

  // If one side lists its boxes, there are no axes to merge: the boxes of both sides are intersected in pairs.
  void add_boxes(const Problem& problem, int32_t tensor) {
    const std::vector<BoxTile> held = box_tiles(problem.src, problem.shape);
    const std::vector<BoxTile> wanted = box_tiles(problem.dst, problem.shape);
    const std::vector<TileMeeting> meetings = meet_tiles(held, wanted);
    const bool same = problem.src == problem.dst;
    const bool reduces = !same && has_partial(problem.src);
    count(static_cast<int64_t>(meetings.size()));
    for (const TileMeeting& meeting : meetings) {
      Task task;
      task.tensor = tensor;
      task.box = meeting.box;
      task.nbytes = task.box.volume() * problem.element_bytes;
      std::vector<int32_t> needed;
      for (const auto& holder : wanted[meeting.wanted].holders) needed.push_back(holder.first);
      emit(std::move(task), known(held[meeting.held].holders, reduces), lists_.make(std::move(needed)), reduces,
           same);
    }
  }

  // Called before tasks are made: a problem that is too large must be refused before it fills memory.
  void count(int64_t cells) {
    cells_ += cells;
    if (cells_ > kMaxTasks) {
      throw LayoutError("the layouts cut the tensors into " + std::to_string(cells_) +
                        " tasks or more, at most " + std::to_string(kMaxTasks) +
                        " are planned at once: move the tensor in several steps or "
                        "through a layout that shares more cuts");
    }
  }

  // needed: ascending.
  void emit(Task task, const Holders& held, const RankList& needed, bool reduces, bool same) {
    task.holders = held.ranks;
    if (reduces) {
      // A rank that holds a partial value and needs the box is also a receiver: its value is not the box.
      task.receivers = needed;
      task.contribution = held.contribution;
      for (const Placement& p : *src_placements_) {
        if (p.kind == PlacementKind::Partial) task.reduce = p.op;
      }
    } else {
      task.receivers = same ? RankList() : without(needed, held.ranks);
      if (same || task.receivers.size() < needed.size()) {
        for (const int32_t rank : needed) {
          if (std::binary_search(held.ranks.begin(), held.ranks.end(), rank))
            out_->local_copies.push_back({rank, task.tensor, task.box});
        }
      }
    }
    check_room(task);
    if (!task.receivers.empty()) out_->tasks.push_back(std::move(task));
  }

  // The ranks of `needed` that are not in `held`; `needed` itself if these are all, as between disjoint meshes.
  RankList without(const RankList& needed, const RankList& held) {
    if (needed.empty() || held.empty() || needed.list().back() < held.front() ||
        held.list().back() < needed.front())
      return needed;
    std::vector<int32_t> out;
    std::set_difference(needed.begin(), needed.end(), held.begin(), held.end(), std::back_inserter(out));
    return out.size() == needed.size() ? needed : lists_.make(std::move(out));
  }

  void check_room(const Task& task) {
    if (kinds_.insert({task.holders.identity(), task.receivers.identity(), task.contribution.identity()})
            .second)
      out_->deliveries += static_cast<int64_t>(task.receivers.size());
    if (out_->deliveries > kMaxDeliveries) {
      throw LayoutError("the layouts ask for more than " + std::to_string(kMaxDeliveries) +
                        " deliveries of a box to a rank, the most that is planned at once: move the tensor in "
                        "several steps");
    }
    if (lists_.entries() + static_cast<int64_t>(out_->local_copies.size()) > kMaxEntries) {
      throw LayoutError("the tasks name more than " + std::to_string(kMaxEntries) +
                        " holders, receivers and ranks that keep a box");
    }
  }

 public:
  const std::vector<Placement>* src_placements_ = nullptr;

 private:
  Demand* out_;
  int64_t cells_ = 0;
  RankLists lists_;
  std::set<std::array<const void*, 3>> kinds_;  // of tasks: holders, receivers, contributions
};

}  // namespace

void check_problem(const Problem& problem) {
  if (problem.element_bytes < 1 || problem.element_bytes > 1024) {
    throw LayoutError("elements of " + std::to_string(problem.element_bytes) + " bytes: it must be in 1..1024");
  }
  validate(problem.src, problem.shape);
  validate(problem.dst, problem.shape);
  int64_t nbytes = problem.element_bytes;
  for (const int64_t n : problem.shape) {
    if (n > 0) nbytes = checked_mul(nbytes, n, "size of the tensor in bytes");
  }
  if (problem.src == problem.dst) return;
  if (has_partial(problem.dst)) {
    throw LayoutError(
        "the destination " + describe(problem.dst) +
        " is Partial: a reshard ends in Shard or Replicate (only an unchanged layout may stay Partial)");
  }
  ReduceOp op = ReduceOp::None;
  for (const Placement& p : problem.src.placements) {
    if (p.kind != PlacementKind::Partial) continue;
    if (op != ReduceOp::None && op != p.op) {
      throw LayoutError("the source " + describe(problem.src) +
                        " mixes Partial operations: reduce all but one of them inside the source mesh first");
    }
    op = p.op;
  }
}

Demand intersect_layouts(const std::vector<Problem>& problems) {
  Demand out;
  Intersection intersection(&out);
  for (size_t i = 0; i < problems.size(); ++i) {
    check_problem(problems[i]);
    intersection.src_placements_ = &problems[i].src.placements;
    intersection.add(problems[i], static_cast<int32_t>(i));
  }
  return out;
}

}  // namespace meshcast
