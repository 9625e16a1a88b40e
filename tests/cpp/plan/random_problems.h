#pragma once

#include <algorithm>
#include <cstdint>
#include <numeric>
#include <random>
#include <vector>

#include "plan/plan.h"

// Random problems that are the same on every platform: only the raw output of the generator is used.
namespace meshcast::testing {

class Random {
 public:
  explicit Random(uint64_t seed) : engine_(seed) {}
  int64_t below(int64_t n) { return static_cast<int64_t>(engine_() % static_cast<uint64_t>(n)); }
  int64_t between(int64_t lo, int64_t hi) { return lo + below(hi - lo + 1); }
  bool chance(int percent) { return below(100) < percent; }
  template <typename T>
  T one_of(std::initializer_list<T> values) {
    return *(values.begin() + below(static_cast<int64_t>(values.size())));
  }

 private:
  std::mt19937_64 engine_;
};

inline int64_t product(const std::vector<int64_t>& values) {
  return std::accumulate(values.begin(), values.end(), int64_t{1}, std::multiplies<>());
}

// 1 to 3 dimensions, at most max_ranks ranks (4x8 by default).
inline std::vector<int64_t> random_mesh_shape(Random& random, int64_t max_ranks) {
  while (true) {
    std::vector<int64_t> shape(static_cast<size_t>(random.one_of({1, 2, 2, 2, 3})));
    for (int64_t& n : shape) n = random.between(1, 8);
    if (product(shape) <= max_ranks) return shape;
  }
}

inline std::vector<Placement> random_placements(Random& random, size_t mesh_dims, int ndim, bool strided) {
  std::vector<Placement> out(mesh_dims);
  for (Placement& p : out) {
    if (ndim == 0 || random.chance(35)) continue;
    p.kind = PlacementKind::Shard;
    p.dim = static_cast<int>(random.below(ndim));
    if (strided && random.chance(15)) {
      p.kind = PlacementKind::StridedShard;
      p.split_factor = random.between(1, 4);
    }
  }
  return out;
}

struct RandomCase {
  Problem problem;
  Topology topology;
};

inline Topology random_topology(Random& random, int64_t ranks) {
  constexpr int64_t kGbit = 125'000'000;
  Topology out;
  out.latency_ns = 20'000;
  const bool unequal = random.chance(50);
  const int64_t host_size = random.one_of<int64_t>({1, 2, 4, 4, 8});
  const int64_t nics = random.between(1, 4);
  for (int64_t first = 0; first < ranks;) {
    Host host;
    const int64_t size = unequal ? random.between(1, 8) : host_size;
    for (int64_t r = first; r < std::min(ranks, first + size); ++r)
      host.ranks.push_back(static_cast<int32_t>(r));
    first += size;
    const int64_t count = unequal ? random.between(1, 4) : nics;
    const int64_t rate = (unequal ? random.one_of<int64_t>({10, 10, 25, 40}) : 10) * kGbit;
    host.nics.assign(static_cast<size_t>(count), Nic{rate, rate});
    host.local_rate = 80 * kGbit;
    out.hosts.push_back(std::move(host));
  }
  return out;
}

// `elements` is about how many the tensor has. Meshes are disjoint, overlapping, equal or nested.
inline RandomCase random_case(Random& random, int64_t elements, bool strided, bool partial = false) {
  RandomCase out;
  const int ndim = static_cast<int>(random.between(1, 4));
  Problem& problem = out.problem;
  problem.element_bytes = random.one_of<int64_t>({1, 2, 4, 8});
  double side = 1;
  while (true) {  // the integer root, without floating-point functions that differ between platforms
    double volume = 1;
    for (int d = 0; d < ndim; ++d) volume *= side + 1;
    if (volume > static_cast<double>(elements)) break;
    side += side < 64 ? 1 : side / 64;
  }
  for (int d = 0; d < ndim; ++d) {
    const auto base = static_cast<int64_t>(side);
    int64_t n = std::max<int64_t>(1, base - base / 3 + random.below(2 * (base / 3) + 1));
    if (random.chance(50) && n >= 32) n -= n % 32;  // half of the dimensions divide evenly, half do not
    problem.shape.push_back(n);
  }
  const std::vector<int64_t> src_shape = random_mesh_shape(random, 32);
  const std::vector<int64_t> dst_shape = random_mesh_shape(random, 32);
  const int64_t src_size = product(src_shape);
  const int64_t dst_size = product(dst_shape);
  const int64_t shift = random.one_of<int64_t>({src_size, src_size, 0, random.below(src_size + 1)});
  const int64_t ranks = std::max(src_size, shift + dst_size);
  std::vector<int32_t> names(static_cast<size_t>(ranks));
  std::iota(names.begin(), names.end(), 0);
  if (random.chance(15)) {
    for (size_t i = names.size(); i > 1; --i)
      std::swap(names[i - 1], names[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
  }
  problem.src.mesh = {src_shape, {names.begin(), names.begin() + src_size}};
  problem.dst.mesh = {dst_shape, {names.begin() + shift, names.begin() + shift + dst_size}};
  problem.src.placements = random_placements(random, src_shape.size(), ndim, strided);
  problem.dst.placements = random_placements(random, dst_shape.size(), ndim, strided);
  if (partial) {  // at least one mesh dimension of the source holds values to be reduced, all by one operation
    const ReduceOp op =
        random.one_of({ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product});
    const auto first = static_cast<size_t>(random.below(static_cast<int64_t>(src_shape.size())));
    for (size_t m = 0; m < src_shape.size(); ++m) {
      if (m == first || random.chance(25)) problem.src.placements[m] = {PlacementKind::Partial, 0, 1, op};
    }
  }
  out.topology = random_topology(random, ranks);
  return out;
}

}  // namespace meshcast::testing
