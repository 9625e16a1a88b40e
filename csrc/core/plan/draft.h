#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan/network.h"
#include "plan/plan.h"

namespace meshcast {

// Tasks with equal holders and receivers, planned as one: a plan for one is valid for all, and their small
// boxes share chunks.
struct Bundle {
  std::vector<int32_t> tasks;  // indices into the plan's tasks; the first one names holders and receivers
  int64_t nbytes = 0;
};

std::vector<Bundle> bundle_tasks(const std::vector<Task>& tasks, const std::vector<Problem>& problems);

// One edge of a route. Ranks are dense indices of the Network; `parent` is the edge of the same route that
// brings the data to `src`, or -1 if src holds it. Parents come first.
struct Edge {
  int32_t src = -1;
  int32_t dst = -1;
  int32_t parent = -1;
  ReduceOp reduce = ReduceOp::None;
  bool last_reduce = false;
};
using Route = std::vector<Edge>;

// Chunks and the hops that carry them, before the hops are put in time order.
struct Draft {
  std::vector<ChunkPiece> pieces;
  std::vector<Chunk> chunks;
  std::vector<Hop> hops;  // global ranks; after < own index
  // Parallel to hops or empty. Lower order always goes first; due_ns is when the chunk of the hop would leave
  // its holder in a steady stream.
  std::vector<int64_t> order;
  std::vector<int64_t> due_ns;
  // How long a port may idle to wait for another one with more work left, in units of hop time / kPatience.
  int32_t patience = 0;
};
inline constexpr int32_t kPatience = 16;

// The most staging of any rank (see staging.h) if the hops of a draft are executed.
int64_t peak_staging(const std::vector<Problem>& problems, const std::vector<Task>& tasks, const Draft& draft);

// The most hops of any plan.
inline constexpr int64_t kMaxHops = int64_t{1} << 22;

// Cuts bundles into chunks and routes into hops.
class Drafter {
 public:
  Drafter(const std::vector<Task>& tasks, const std::vector<Problem>& problems, const Network& network)
      : tasks_(tasks), problems_(problems), network_(network) {}

  // Adds the chunks of `bundle`, of nearly equal size, none above `chunk_bytes` unless a single element is.
  // Returns the range [first, last) of their indices.
  struct Range {
    int32_t first = 0;
    int32_t last = 0;
  };
  Range cut(const Bundle& bundle, int64_t chunk_bytes);

  // Adds a chunk of the given pieces (UnitCutter).
  int32_t add_chunk(const ChunkPiece* begin, const ChunkPiece* end, int64_t nbytes);

  // Adds one hop for each edge of the route. Throws LayoutError beyond the largest number of hops. `order` and
  // `due_ns` as in Draft; -1 for none, which counts as zero if other routes have one.
  void send(int32_t chunk, const Route& route, int64_t order = -1, int64_t due_ns = -1);

  // Adds one hop between dense ranks. after: the hop that brings the chunk to src; -1 if src holds it.
  void pass_on(int32_t chunk, int32_t src, int32_t dst, int32_t after);
  // Makes room for so many hops.
  void reserve(int64_t hops) { draft_.hops.reserve(static_cast<size_t>(std::min(hops, kMaxHops))); }
  int32_t hop_count() const { return static_cast<int32_t>(draft_.hops.size()); }

  Draft take() {
    if (!draft_.order.empty()) draft_.order.resize(draft_.hops.size(), 0);
    if (!draft_.due_ns.empty()) draft_.due_ns.resize(draft_.hops.size(), 0);
    return std::move(draft_);
  }
  int64_t chunk_bytes(int32_t chunk) const { return draft_.chunks[static_cast<size_t>(chunk)].nbytes; }

 private:
  void close_chunk(int32_t first_piece, int64_t nbytes);
  void check_room(size_t hops) const;

  const std::vector<Task>& tasks_;
  const std::vector<Problem>& problems_;
  const Network& network_;
  Draft draft_;
};

// Cuts a box along its outermost dimensions into boxes of at most max_elements (at least one) each.
std::vector<Box> cut_box(const Box& box, int64_t max_elements);

// Adds `next` to `box` if it follows along one dimension and is equal in all others; else returns false.
bool join_boxes(const Box& next, Box* box);

// Cuts a bundle into chunks whose sizes are requested one by one. Chunks are whole units of about `unit_bytes`,
// joined if they are neighbours, so that most chunks are one box.
class UnitCutter {
 public:
  UnitCutter(const Bundle& bundle, const std::vector<Task>& tasks, const std::vector<Problem>& problems,
             int64_t unit_bytes);

  bool done() const { return at_ == units_.size(); }

  // Adds a chunk of about `nbytes`, at least one unit, and returns its index.
  int32_t next(int64_t nbytes, Drafter* drafter);

 private:
  std::vector<ChunkPiece> units_;
  std::vector<int64_t> unit_bytes_;  // parallel to units_
  size_t at_ = 0;
  std::vector<ChunkPiece> joined_;
};

}  // namespace meshcast
