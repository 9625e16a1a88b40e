#include "exec/program.h"

#include <algorithm>
#include <unordered_map>

#include <fmt/format.h>

#include "common/error.h"

namespace meshcast {
namespace {

// The two local tensors of one rank in one problem.
struct LocalShards {
  Shard source;
  Shard destination;
};

Shard shard_of(const Layout& layout, const std::vector<int64_t>& shape, int32_t rank) {
  const auto& ranks = layout.mesh.ranks;
  const auto it = std::find(ranks.begin(), ranks.end(), rank);
  if (it == ranks.end()) return {};
  return shards(layout, shape)[static_cast<size_t>(it - ranks.begin())];
}

// Finds `box` in a shard. A planner never cuts a box across two pieces of a shard.
Part locate(const Shard& shard, const Box& box, int32_t tensor, Side side, int64_t element_bytes) {
  for (const ShardPiece& piece : shard.pieces) {
    if (!piece.box.contains(box)) continue;
    Part part{tensor, side, static_cast<int8_t>(box.ndim), element_bytes, {}, {}};
    for (int d = 0; d < box.ndim; ++d) {
      part.at[d] = piece.local[d] + box.lo[d] - piece.box.lo[d];
      part.extent[d] = box.extent(d);
    }
    return part;
  }
  throw Error(ErrorKind::Generic,
              fmt::format("plan names a box of tensor {} that rank {} does not hold on its {} side", tensor,
                          shard.rank, side == Side::Source ? "source" : "destination"));
}

class Projection {
 public:
  Projection(const Plan& plan, int32_t rank, const std::vector<int32_t>& group)
      : plan_(plan), rank_(rank), group_(group) {
    for (const Problem& problem : plan.problems) {
      locals_.push_back(
          {shard_of(problem.src, problem.shape, rank), shard_of(problem.dst, problem.shape, rank)});
    }
    program_.rank = local_rank(rank);
  }

  Program run() {
    for (const LocalCopy& copy : plan_.local_copies) {
      if (copy.rank == rank_) program_.copies.push_back(local_copy(copy));
    }
    for (size_t i = 0; i < plan_.hops.size(); ++i) {
      const Hop& hop = plan_.hops[i];
      if (hop.src != rank_ && hop.dst != rank_) continue;
      if (hop.reduce != ReduceOp::None) {
        throw Error(ErrorKind::Generic, "this build executes no reducing hops (Partial sources)");
      }
      if (hop.dst == rank_) {
        add_recv(hop);
        recv_of_hop_[static_cast<int32_t>(i)] = static_cast<int32_t>(program_.recvs.size()) - 1;
      } else {
        add_send(hop);
      }
    }
    return std::move(program_);
  }

 private:
  int32_t local_rank(int32_t rank) const {
    const auto it = std::lower_bound(group_.begin(), group_.end(), rank);
    if (it == group_.end() || *it != rank) {
      throw Error(ErrorKind::Layout, fmt::format("rank {} of the plan is not in its group", rank));
    }
    return static_cast<int32_t>(it - group_.begin());
  }

  CopyOp local_copy(const LocalCopy& copy) const {
    const LocalShards& local = locals_[copy.tensor];
    const int64_t bytes = plan_.problems[copy.tensor].element_bytes;
    return {locate(local.source, copy.box, copy.tensor, Side::Source, bytes),
            locate(local.destination, copy.box, copy.tensor, Side::Destination, bytes)};
  }

  PartRange chunk_parts(const Chunk& chunk, Side side) {
    PartRange range{static_cast<int32_t>(program_.parts.size()), 0};
    for (int32_t p = chunk.piece_begin; p < chunk.piece_end; ++p) {
      const ChunkPiece& piece = plan_.pieces[p];
      const LocalShards& local = locals_[piece.tensor];
      const Shard& shard = side == Side::Source ? local.source : local.destination;
      program_.parts.push_back(
          locate(shard, piece.box, piece.tensor, side, plan_.problems[piece.tensor].element_bytes));
    }
    range.end = static_cast<int32_t>(program_.parts.size());
    return range;
  }

  void add_recv(const Hop& hop) {
    const Chunk& chunk = plan_.chunks[hop.chunk];
    const int32_t peer = local_rank(hop.src);
    program_.recvs.push_back({peer, next_in_[peer]++, chunk.nbytes, chunk_parts(chunk, Side::Destination), {}});
    program_.bytes_received += chunk.nbytes;
  }

  void add_send(const Hop& hop) {
    const Chunk& chunk = plan_.chunks[hop.chunk];
    const int32_t peer = local_rank(hop.dst);
    const bool forward = hop.after >= 0;
    const Side side = forward ? Side::Destination : Side::Source;
    if (forward) {
      program_.recvs[recv_of_hop_.at(hop.after)].forwards.push_back(
          static_cast<int32_t>(program_.sends.size()));
    }
    program_.sends.push_back({peer, next_out_[peer]++, chunk.nbytes, chunk_parts(chunk, side), forward});
    program_.bytes_sent += chunk.nbytes;
  }

  const Plan& plan_;
  int32_t rank_;
  const std::vector<int32_t>& group_;
  std::vector<LocalShards> locals_;
  Program program_;
  std::unordered_map<int32_t, int32_t> recv_of_hop_;
  std::unordered_map<int32_t, int32_t> next_in_;
  std::unordered_map<int32_t, int32_t> next_out_;
};

}  // namespace

Program project(const Plan& plan, int32_t rank, const std::vector<int32_t>& group) {
  return Projection(plan, rank, group).run();
}

}  // namespace meshcast
