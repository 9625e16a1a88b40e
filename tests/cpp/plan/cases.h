#pragma once

#include <cstdint>
#include <numeric>
#include <string>
#include <vector>

#include "plan/plan.h"

namespace meshcast::testing {

inline constexpr Placement kReplicate{};
inline Placement shard(int dim) { return {PlacementKind::Shard, dim, 1, ReduceOp::None}; }
inline Placement strided(int dim, int64_t factor) {
  return {PlacementKind::StridedShard, dim, factor, ReduceOp::None};
}
inline Placement partial(ReduceOp op) { return {PlacementKind::Partial, 0, 1, op}; }

// Consecutive ranks from `first` on.
inline Layout layout(std::vector<int64_t> mesh, int32_t first, std::vector<Placement> placements) {
  Layout out;
  const int64_t size = std::accumulate(mesh.begin(), mesh.end(), int64_t{1}, std::multiplies<>());
  out.mesh.shape = std::move(mesh);
  out.mesh.ranks.resize(static_cast<size_t>(size));
  std::iota(out.mesh.ranks.begin(), out.mesh.ranks.end(), first);
  out.placements = std::move(placements);
  return out;
}

inline constexpr int64_t kTenGbit = 1'250'000'000;  // bytes/s

struct NamedCase {
  std::string name;
  Problem problem;
  Topology topology;
};

// The cross-mesh resharding paper's nine n-to-m and seven 1-to-m cases: int32, 4 ranks per host, 10 Gbit/s.
inline std::vector<NamedCase> paper_cases() {
  const Placement R = kReplicate;
  const Placement S0 = shard(0), S1 = shard(1), S2 = shard(2);
  const std::vector<int64_t> cube{1024, 1024, 512};
  std::vector<NamedCase> out;
  const auto add = [&](const std::string& name, std::vector<int64_t> shape, Layout src, Layout dst) {
    const int64_t last = std::max(src.mesh.ranks.back(), dst.mesh.ranks.back());
    out.push_back({name,
                   {std::move(shape), 4, std::move(src), std::move(dst)},
                   uniform_topology(last, 4, kTenGbit, 1, 8 * kTenGbit, 20'000)});
  };
  add("case 1", cube, layout({2, 4}, 0, {S0, R}), layout({2, 4}, 8, {S0, R}));
  add("case 2", cube, layout({2, 4}, 0, {R, R}), layout({2, 4}, 8, {S0, R}));
  add("case 3", cube, layout({2, 4}, 0, {S1, R}), layout({2, 4}, 8, {S0, R}));
  add("case 4", cube, layout({2, 4}, 0, {S1, S1}), layout({2, 4}, 8, {S0, S0}));
  add("case 5", cube, layout({2, 4}, 0, {R, S0}), layout({2, 4}, 8, {S0, R}));
  add("case 6", {3072, 1024, 170}, layout({2, 4}, 0, {S0, R}), layout({3, 4}, 8, {S0, R}));
  add("case 7", cube, layout({1, 4}, 0, {R, S0}), layout({2, 4}, 4, {R, R}));
  add("case 8", cube, layout({1, 4}, 0, {R, S0}), layout({2, 4}, 4, {R, R}));
  add("case 9", cube, layout({2, 4}, 0, {S1, R}), layout({2, 4}, 8, {S2, R}));
  for (const auto& [hosts, ranks] :
       std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {1, 2}, {1, 3}, {1, 4}, {2, 2}, {3, 2}, {4, 2}}) {
    // The sender has a host of its own; a receiving host is filled as far as the mesh says.
    NamedCase c;
    c.name = "1 to (" + std::to_string(hosts) + "," + std::to_string(ranks) + ")";
    c.problem = {{int64_t{1} << 28}, 4, layout({1, 1}, 0, {R, R}), layout({hosts, ranks}, 1, {R, R})};
    c.topology.latency_ns = 20'000;
    c.topology.hosts.push_back({{0}, {{kTenGbit, kTenGbit}}, 8 * kTenGbit});
    for (int64_t h = 0; h < hosts; ++h) {
      Host host{{}, {{kTenGbit, kTenGbit}}, 8 * kTenGbit};
      for (int64_t r = 0; r < ranks; ++r) host.ranks.push_back(static_cast<int32_t>(1 + h * ranks + r));
      c.topology.hosts.push_back(host);
    }
    out.push_back(std::move(c));
  }
  return out;
}

}  // namespace meshcast::testing
