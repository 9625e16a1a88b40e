#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "layout/box.h"
#include "layout/layout.h"
#include "plan/rank_list.h"
#include "plan/topology.h"

namespace meshcast {

enum class Strategy : uint8_t {
#define MESHCAST_STRATEGY(name, ...) name,
#define MESHCAST_SEARCH(name, ...) name,
#include "plan/strategies.def"
};
enum class Balance : uint8_t { None, Size, Greedy, Search };

// One tensor to move. A plan moves one or many.
struct Problem {
  std::vector<int64_t> shape;
  int64_t element_bytes = 0;
  Layout src;
  Layout dst;
  bool stacked = false;  // during planning: the first dimension counts equal tensors, see stack.h

  friend bool operator==(const Problem&, const Problem&) = default;
};

struct PlanOptions {
  Strategy strategy = Strategy::Auto;
  Balance balance = Balance::Greedy;  // Broadcast only
  int64_t chunk_bytes = 0;            // 0: chosen by the cost model
  uint64_t seed = 0;

  friend bool operator==(const PlanOptions&, const PlanOptions&) = default;
};

// The paper's unit communication task: one box, the ranks that hold it and those that need it and do not
// hold it. Both lists ascend.
struct Task {
  int32_t tensor = 0;
  Box box;
  int64_t nbytes = 0;
  RankList holders;
  RankList receivers;
  // Partial sources only (else None and empty): holders have values still to be reduced. contribution[i] is the
  // number of the value of holders[i]; replicas of one value share a number. Receivers are then all ranks that
  // need the box, including holders: a partial value is not the box.
  ReduceOp reduce = ReduceOp::None;
  RankList contribution;
};

// Data that a rank holds and needs: copied locally, never sent.
struct LocalCopy {
  int32_t rank = -1;
  int32_t tensor = 0;
  Box box;
};

// Part of a chunk: a box of one tensor.
struct ChunkPiece {
  int32_t tensor = 0;
  int32_t task = 0;  // index into Plan::tasks
  Box box;
};

// One message on the wire: the pieces [piece_begin, piece_end) of Plan::pieces, each packed row-major,
// one after the other. Mostly one piece; small boxes with the same holders and receivers share a chunk.
struct Chunk {
  int32_t piece_begin = 0;
  int32_t piece_end = 0;
  int64_t nbytes = 0;
};

// One edge of a chain: `chunk` goes from rank `src` to rank `dst`. `after` is the index of the hop that brings
// the chunk to `src`, or -1 if src holds it. after < own index: the hops are in schedule order, which is also
// the order in which every rank issues its part. reduce != None: dst combines the arrived value with its own
// partial value of the box; later hops of the chain carry the result, and `last_reduce` marks the hop after
// which it is complete (Avg divides there). A receiver that ends a reduction keeps the result as its shard: no
// further hop brings it.
struct Hop {
  int32_t src = -1;
  int32_t dst = -1;
  int32_t chunk = -1;
  int32_t after = -1;
  ReduceOp reduce = ReduceOp::None;
  bool last_reduce = false;
};

// The times of a hop under the cost model, in nanoseconds from the start of the plan. It starts when both its
// ports are free, holds each for bytes / rate of that port, and arrives (finish) after the slower of the two
// and the latency, which delays but occupies no port.
struct HopTime {
  int64_t start_ns = 0;
  int64_t finish_ns = 0;
};

struct Plan {
  std::vector<Problem> problems;
  Topology topology;
  PlanOptions options;
  Strategy strategy = Strategy::Auto;  // the one chosen

  std::vector<Task> tasks;
  std::vector<LocalCopy> local_copies;
  std::vector<ChunkPiece> pieces;
  std::vector<Chunk> chunks;
  std::vector<Hop> hops;       // in schedule order
  std::vector<HopTime> times;  // simulated, parallel to hops
  std::vector<int32_t> ranks;  // all ranks of both meshes of all problems, ascending

  int64_t makespan_ns = 0;
  int64_t lower_bound_ns = 0;
  std::string hash;  // 32 hex digits over all of the above that the ranks must agree on
};

// Pure: the same arguments give the same plan, bit for bit, on every rank and platform. Throws LayoutError.
Plan make_plan(const std::vector<Problem>& problems, const Topology& topology, const PlanOptions& options);

const char* to_string(Strategy strategy);
const char* to_string(Balance balance);
std::vector<std::string> strategy_names();  // "auto" first
std::vector<std::string> balance_names();
Strategy parse_strategy(const std::string& name);  // throws LayoutError naming what is allowed
Balance parse_balance(const std::string& name);
ReduceOp parse_reduce_op(const std::string& name);

}  // namespace meshcast
