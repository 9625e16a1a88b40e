#include "exec/program.h"

#include <algorithm>
#include <map>
#include <unordered_map>
#include <utility>

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

// One message on the wire: a hop of the plan, or all hops of a chunk inside a host.
struct Message {
  int32_t src = -1;
  int32_t chunk = -1;
  int32_t after = -1;  // as in Hop
  bool local = false;
  std::vector<int32_t> receivers;
};

// Hops between ranks that share memory join the message that their sender got the chunk by; hops of one chunk
// that leave one rank join each other. A message stands where its first hop stood, so every rank sees the
// messages in the same order, and the rank that sends one has the chunk by then. Receiving earlier than planned
// does no harm: nothing is sent before the message that it waits for.
// Returns those messages that `rank` may have a part in.
std::vector<Message> join_hops(const Plan& plan, int32_t rank, const std::vector<int32_t>& local) {
  const auto is_local = [&](int32_t rank) {
    return std::find(local.begin(), local.end(), rank) != local.end();
  };
  std::vector<Message> messages;
  std::vector<int32_t> message_of_hop(local.empty() ? 0 : plan.hops.size(), -1);  // local messages only
  std::map<std::pair<int32_t, int32_t>, int32_t> started;  // (rank, chunk) -> message that leaves it
  for (size_t i = 0; i < plan.hops.size(); ++i) {
    const Hop& hop = plan.hops[i];
    if (hop.reduce != ReduceOp::None) {
      throw Error(ErrorKind::Generic, "this build executes no reducing hops (Partial sources)");
    }
    if (local.empty() || !is_local(hop.src) || !is_local(hop.dst)) {
      if (hop.src == rank || hop.dst == rank) {
        messages.push_back({hop.src, hop.chunk, hop.after, false, {hop.dst}});
      }
      continue;
    }
    int32_t message = hop.after >= 0 ? message_of_hop[hop.after] : -1;
    if (message < 0) {
      const auto [it, fresh] = started.try_emplace({hop.src, hop.chunk}, static_cast<int32_t>(messages.size()));
      if (fresh) messages.push_back({hop.src, hop.chunk, hop.after, true, {}});
      message = it->second;
    }
    messages[message].receivers.push_back(hop.dst);
    message_of_hop[i] = message;
  }
  return messages;
}

class Projection {
 public:
  Projection(const Plan& plan, int32_t rank, const std::vector<int32_t>& group,
             const std::vector<int32_t>& local)
      : plan_(plan), rank_(rank), group_(group), messages_(join_hops(plan, rank, local)) {
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
    for (const Message& message : messages_) {
      const bool receives =
          std::find(message.receivers.begin(), message.receivers.end(), rank_) != message.receivers.end();
      if (receives) {
        add_recv(message);
      } else if (message.src == rank_) {
        add_send(message);
      }
    }
    for (const auto& [peer, count] : local_out_) program_.local_sends.push_back({peer, count});
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

  void add_recv(const Message& message) {
    const Chunk& chunk = plan_.chunks[message.chunk];
    const int32_t peer = local_rank(message.src);
    recv_of_chunk_[message.chunk] = static_cast<int32_t>(program_.recvs.size());
    const int32_t number = message.local ? -1 : program_.network_recvs++;
    program_.recvs.push_back(
        {peer, chunk.nbytes, message.local, number, chunk_parts(chunk, Side::Destination), {}});
    program_.bytes_received += chunk.nbytes;
  }

  void add_send(const Message& message) {
    const Chunk& chunk = plan_.chunks[message.chunk];
    const bool forward = message.after >= 0;
    if (forward) {
      program_.recvs[recv_of_chunk_.at(message.chunk)].forwards.push_back(
          static_cast<int32_t>(program_.sends.size()));
    }
    SendOp op{{}, chunk.nbytes, message.local, {}, forward};
    for (const int32_t receiver : message.receivers) {
      const int32_t peer = local_rank(receiver);
      op.targets.push_back({peer, next_out_[peer]++});
      if (message.local) ++local_out_[peer];
    }
    op.parts = chunk_parts(chunk, forward ? Side::Destination : Side::Source);
    program_.sends.push_back(std::move(op));
    program_.bytes_sent += chunk.nbytes * static_cast<int64_t>(message.receivers.size());
  }

  const Plan& plan_;
  int32_t rank_;
  const std::vector<int32_t>& group_;
  std::vector<LocalShards> locals_;
  Program program_;
  const std::vector<Message> messages_;
  std::unordered_map<int32_t, int32_t> recv_of_chunk_;  // a rank receives a chunk once
  std::unordered_map<int32_t, int32_t> next_out_;
  std::map<int32_t, int32_t>
      local_out_;  // messages by peer; all that pass between two ranks of a host are local
};

}  // namespace

Program project(const Plan& plan, int32_t rank, const std::vector<int32_t>& group,
                const std::vector<int32_t>& local) {
  return Projection(plan, rank, group, local).run();
}

}  // namespace meshcast
