#include "binding/plan_figures.h"

#include <algorithm>
#include <unordered_map>

namespace meshcast {
namespace {

using Traffic = std::vector<std::pair<int64_t, int64_t>>;

bool contiguous(const Box& box, const std::vector<int64_t>& local_shape) {
  int d = 0;
  while (d < box.ndim && box.extent(d) == 1) ++d;
  for (++d; d < box.ndim; ++d) {
    if (box.extent(d) != local_shape[static_cast<size_t>(d)]) return false;
  }
  return true;
}

// The shards of one rank under one side of every problem; a rank outside a mesh has an empty one there.
std::vector<Shard> shards_of(const Plan& plan, int32_t rank, Layout Problem::*side) {
  std::vector<Shard> found(plan.problems.size());
  for (size_t i = 0; i < plan.problems.size(); ++i) {
    const Problem& problem = plan.problems[i];
    const std::vector<int32_t>& ranks = (problem.*side).mesh.ranks;
    if (std::find(ranks.begin(), ranks.end(), rank) == ranks.end()) continue;
    for (Shard& shard : shards(problem.*side, problem.shape)) {
      if (shard.rank == rank) found[i] = std::move(shard);
    }
  }
  return found;
}

bool packed(const Plan& plan, const Chunk& chunk, const std::vector<Shard>& local) {
  if (chunk.piece_end - chunk.piece_begin != 1) return true;
  const ChunkPiece& piece = plan.pieces[static_cast<size_t>(chunk.piece_begin)];
  const Shard& shard = local[static_cast<size_t>(piece.tensor)];
  for (const ShardPiece& place : shard.pieces) {
    if (place.box.contains(piece.box)) return !contiguous(piece.box, shard.local_shape);
  }
  return true;  // spread over several places of a strided shard
}

}  // namespace

Traffic rank_traffic(const Plan& plan) {
  std::unordered_map<int32_t, size_t> position;
  for (size_t i = 0; i < plan.ranks.size(); ++i) position[plan.ranks[i]] = i;
  Traffic traffic(plan.ranks.size());
  for (const Hop& hop : plan.hops) {
    const int64_t nbytes = plan.chunks[static_cast<size_t>(hop.chunk)].nbytes;
    traffic[position.at(hop.src)].first += nbytes;
    traffic[position.at(hop.dst)].second += nbytes;
  }
  return traffic;
}

Traffic nic_traffic(const Plan& plan) {
  const std::unordered_map<int32_t, int32_t> host = host_index(plan.topology, plan.ranks);
  Traffic traffic(plan.topology.hosts.size());
  for (const Hop& hop : plan.hops) {
    const int32_t from = host.at(hop.src);
    const int32_t to = host.at(hop.dst);
    if (from == to) continue;
    const int64_t nbytes = plan.chunks[static_cast<size_t>(hop.chunk)].nbytes;
    traffic[static_cast<size_t>(from)].first += nbytes;
    traffic[static_cast<size_t>(to)].second += nbytes;
  }
  return traffic;
}

int64_t peak_staging_bytes(const Plan& plan, int32_t rank) {
  const std::vector<Shard> source = shards_of(plan, rank, &Problem::src);
  const std::vector<Shard> destination = shards_of(plan, rank, &Problem::dst);
  std::vector<std::pair<int64_t, int64_t>> changes;  // (time, bytes); at equal times releases sort first
  for (size_t i = 0; i < plan.hops.size(); ++i) {
    const Hop& hop = plan.hops[i];
    if (hop.src != rank && hop.dst != rank) continue;
    const Chunk& chunk = plan.chunks[static_cast<size_t>(hop.chunk)];
    const bool from_source = hop.src == rank && hop.after < 0;
    if (hop.reduce == ReduceOp::None && !packed(plan, chunk, from_source ? source : destination)) continue;
    changes.emplace_back(plan.times[i].start_ns, chunk.nbytes);
    changes.emplace_back(plan.times[i].finish_ns, -chunk.nbytes);
  }
  std::sort(changes.begin(), changes.end());
  int64_t now = 0;
  int64_t peak = 0;
  for (const auto& [time, bytes] : changes) {
    now += bytes;
    peak = std::max(peak, now);
  }
  return peak;
}

}  // namespace meshcast
