// libFuzzer target: bytes become layouts, a topology and options; the planner must either refuse them with
// LayoutError or return a plan that keeps its promises. Built by `make fuzz` with clang, ASan and UBSan.
//
//   build/fuzz/plan_fuzz -max_total_time=60 CORPUS_FOLDER

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <set>
#include <utility>
#include <vector>

#include "common/error.h"
#include "plan/plan.h"

namespace {

using namespace meshcast;

// Reads small numbers off the input, zeros once it is used up.
class Bytes {
 public:
  Bytes(const uint8_t* data, size_t size) : data_(data), size_(size) {}

  int64_t byte() { return at_ < size_ ? data_[at_++] : 0; }
  int64_t below(int64_t n) { return byte() % n; }

  // Mostly small, sometimes at the edges where arithmetic breaks.
  int64_t number() {
    static constexpr int64_t kEdges[] = {0,
                                         -1,
                                         1,
                                         INT32_MAX,
                                         int64_t{1} << 32,
                                         INT64_MAX,
                                         INT64_MIN,
                                         1 << 20,
                                         int64_t{1} << 40,
                                         1000000007,
                                         int64_t{1} << 62,
                                         4096,
                                         65536,
                                         3};
    const int64_t kind = byte();
    if (kind < 200) return kind % 17;
    return kEdges[kind % static_cast<int64_t>(std::size(kEdges))];
  }

 private:
  const uint8_t* data_;
  size_t size_;
  size_t at_ = 0;
};

Layout layout(Bytes& in) {
  Layout out;
  int64_t size = 1;
  const int64_t dims = 1 + in.below(3);
  for (int64_t d = 0; d < dims; ++d) {
    out.mesh.shape.push_back(1 + in.below(4));
    size *= out.mesh.shape.back();
  }
  if (in.below(32) == 0) out.mesh.shape.push_back(in.number());  // does not fit the ranks
  const int64_t first = in.below(20), step = 1 + in.below(3);
  for (int64_t i = 0; i < size; ++i) out.mesh.ranks.push_back(static_cast<int32_t>(first + i * step));
  if (in.below(32) == 0) out.mesh.ranks[0] = static_cast<int32_t>(in.number());
  const int64_t placements = in.below(32) == 0 ? in.below(7) : static_cast<int64_t>(out.mesh.shape.size());
  for (int64_t i = 0; i < placements; ++i) {
    Placement placement;
    placement.kind = static_cast<PlacementKind>(in.below(4));
    placement.dim = static_cast<int>(in.below(16) == 0 ? in.number() : in.below(3));
    if (placement.kind == PlacementKind::StridedShard) placement.split_factor = in.number();
    if (placement.kind == PlacementKind::Partial) placement.op = static_cast<ReduceOp>(1 + in.below(5));
    out.placements.push_back(placement);
  }
  return out;
}

Topology topology(Bytes& in) {
  Topology out;
  out.latency_ns = in.below(16) == 0 ? in.number() : in.below(100) * 1000;
  if (in.below(4) != 0) {
    const int64_t ranks = 1 + in.below(8), nic_rate = 1 + 125'000'000 * in.below(9);
    const int64_t nics = 1 + in.below(4), local_rate = 1 + 1'000'000'000 * in.below(9);
    return uniform_topology(255, ranks, nic_rate, nics, local_rate, out.latency_ns);
  }
  int32_t rank = 0;
  while (rank < 128) {
    Host host;
    const int64_t ranks = 1 + in.below(9);
    for (int64_t i = 0; i < ranks; ++i) host.ranks.push_back(rank++);
    if (in.below(64) == 0) host.ranks.push_back(static_cast<int32_t>(in.number()));
    const int64_t nics = in.below(64) == 0 ? 0 : 1 + in.below(4);
    for (int64_t i = 0; i < nics; ++i) {
      const int64_t rate = in.below(16) == 0 ? in.number() : 125'000'000 * (1 + in.below(40));
      host.nics.push_back({rate, in.below(2) == 0 ? rate : 125'000'000 * (1 + in.below(40))});
    }
    host.local_rate = in.below(32) == 0 ? in.number() : 10'000'000'000;
    out.hosts.push_back(host);
  }
  return out;
}

void require(bool holds, const char* what) {
  if (holds) return;
  std::cerr << "broken promise: " << what << '\n';
  std::abort();
}

void check(const Plan& plan) {
  require(plan.makespan_ns >= plan.lower_bound_ns || plan.hops.empty(), "makespan >= lower bound");
  require(plan.times.size() == plan.hops.size(), "one time per hop");
  std::set<std::pair<int32_t, int32_t>> delivered;
  for (size_t i = 0; i < plan.hops.size(); ++i) {
    const Hop& hop = plan.hops[i];
    require(hop.after < static_cast<int32_t>(i), "a hop follows the one that brings its chunk");
    require(hop.src != hop.dst, "a hop leaves its rank");
    if (hop.after >= 0) {
      const Hop& before = plan.hops[static_cast<size_t>(hop.after)];
      require(before.dst == hop.src && before.chunk == hop.chunk, "a rank forwards what it received");
      require(plan.times[static_cast<size_t>(hop.after)].finish_ns <= plan.times[i].start_ns,
              "a chunk is there before it is forwarded");
    }
    if (hop.reduce == ReduceOp::None)
      require(delivered.insert({hop.chunk, hop.dst}).second, "a chunk reaches a rank once");
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  Bytes in(data, size);
  std::vector<Problem> problems;
  const int64_t tensors = 1 + (in.below(4) == 0 ? in.below(4) : 0);
  for (int64_t t = 0; t < tensors; ++t) {
    Problem problem;
    const int64_t ndim = in.below(16) == 0 ? in.below(12) : in.below(4);
    for (int64_t d = 0; d < ndim; ++d) problem.shape.push_back(in.number());
    problem.element_bytes = in.below(8) == 0 ? in.number() : int64_t{1} << in.below(5);
    problem.src = layout(in);
    problem.dst = layout(in);
    problems.push_back(std::move(problem));
  }
  PlanOptions options;
  options.strategy = static_cast<Strategy>(in.below(6));
  options.balance = static_cast<Balance>(in.below(4));
  options.seed = static_cast<uint64_t>(in.byte());
  if (in.below(4) == 0) options.chunk_bytes = in.number();
  try {
    check(make_plan(problems, topology(in), options));
  } catch (const LayoutError&) {
    // Refused in words.
  }
  return 0;
}
