#include "run/program.h"

#include <algorithm>
#include <array>
#include <map>
#include <tuple>
#include <unordered_map>
#include <utility>

#include <fmt/format.h>

#include "common/error.h"
#include "plan/staging.h"
#include "run/plan_order.h"

namespace meshcast {
namespace {

// A NIC that sends this much longer than the mean ignores its rank's plan order (docs/decisions.md).
constexpr double kClearlyLonger = 1.3;

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

int64_t volume_of(const Shard& shard) {
  int64_t out = 0;
  for (const ShardPiece& piece : shard.pieces) out += piece.box.volume();
  return out;
}

// Finds `box` in a shard. A planner never cuts a box across two pieces of a shard.
Part locate(const Shard& shard, const Box& box, int32_t tensor, Side side, int64_t element_bytes,
            const std::array<int64_t, kMaxDims>& step, std::vector<BoxPlace>* places) {
  for (size_t i = 0; i < shard.pieces.size(); ++i) {
    const ShardPiece& piece = shard.pieces[i];
    if (!piece.box.contains(box)) continue;
    Part part{tensor, side, static_cast<int8_t>(box.ndim), element_bytes, piece.local, {}};
    for (int d = 0; d < box.ndim; ++d) {
      const int axis = shard.places.empty() ? d : shard.places[i].axis[d];
      const int64_t local_step = shard.places.empty() ? 1 : shard.places[i].step[d];
      part.at[axis] += (box.lo[d] - piece.box.lo[d]) * local_step;
      part.first += box.lo[d] * step[d];
      part.extent[d] = box.extent(d);
    }
    if (!shard.places.empty()) {
      if (places->empty() || !(places->back() == shard.places[i])) places->push_back(shard.places[i]);
      part.place = static_cast<int32_t>(places->size()) - 1;
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
  ReduceOp reduce = ReduceOp::None;  // as in Hop; such a message has one receiver
  bool last_reduce = false;
  int32_t hop = -1;  // its first one
};

// Hops between ranks that share memory join the message by which their sender got the chunk; hops of one chunk
// that leave one rank join each other. A message takes the place of its first hop, so every rank sees the
// messages in the same order, and a sender has the chunk by then. Receiving earlier than planned does no harm:
// nothing is sent before the message that it waits for. Hops that reduce are unchanged. Returns the messages
// that may involve `rank`.
//
// Example. A is on another host; B, C and D share memory. The plan has hop 0: A -> B, hop 1: B -> C after 0,
// and hop 2: C -> D after 1, of one chunk.
//   hop 0   over the network: a message of its own
//   hop 1   local: begins the message B -> {C}
//   hop 2   its `after` is hop 1, which is in that message: D joins it, B -> {C, D}
// So C forwards nothing: D reads what B has copied in once.
std::vector<Message> join_hops(const Plan& plan, int32_t rank, const std::vector<int32_t>& local) {
  const auto is_local = [&](int32_t rank) {
    return std::find(local.begin(), local.end(), rank) != local.end();
  };
  std::vector<Message> messages;
  std::vector<int32_t> message_of_hop(local.empty() ? 0 : plan.hops.size(), -1);  // local messages only
  // (rank, chunk, hop that brought it) -> message that leaves it
  std::map<std::tuple<int32_t, int32_t, int32_t>, int32_t> started;
  for (size_t i = 0; i < plan.hops.size(); ++i) {
    const Hop& hop = plan.hops[i];
    const auto index = static_cast<int32_t>(i);
    const bool inside = !local.empty() && is_local(hop.src) && is_local(hop.dst);
    // Only those that involve `rank`: over the network no rank counts the messages of others.
    if (!inside || hop.reduce != ReduceOp::None) {
      if (hop.src == rank || hop.dst == rank) {
        messages.push_back(
            {hop.src, hop.chunk, hop.after, inside, {hop.dst}, hop.reduce, hop.last_reduce, index});
      }
      continue;
    }
    int32_t message = hop.after >= 0 ? message_of_hop[hop.after] : -1;
    if (message < 0) {
      const auto [it, fresh] =
          started.try_emplace({hop.src, hop.chunk, hop.after}, static_cast<int32_t>(messages.size()));
      if (fresh) messages.push_back({hop.src, hop.chunk, hop.after, true, {}, ReduceOp::None, false, index});
      message = it->second;
    }
    messages[message].receivers.push_back(hop.dst);
    message_of_hop[i] = message;
  }
  return messages;
}

// Whether any chunk passes between hosts twice. Its hops inside its first and last host do not count: no rank
// waits for the network there.
bool relays(const Plan& plan) {
  const auto host = host_index(plan.topology, plan.ranks);
  std::vector<char> came_far(plan.hops.size(), 0);
  for (size_t i = 0; i < plan.hops.size(); ++i) {
    const Hop& hop = plan.hops[i];
    const bool far = host.at(hop.src) != host.at(hop.dst);
    const bool before = hop.after >= 0 && came_far[static_cast<size_t>(hop.after)];
    if (far && before) return true;
    came_far[i] = far || before;
  }
  return false;
}

// Whether the NIC of `rank` has to send for about as long as the busiest NIC is busy, and clearly longer than
// the mean of all NICs that send. If it waited for a busy receiver, the run would end later by as much.
bool sends_longest(const Plan& plan, int32_t rank) {
  const auto host = host_index(plan.topology, plan.ranks);
  using Port = std::pair<const Host*, size_t>;
  const auto port = [&](int32_t of) {
    const Host& its = plan.topology.hosts[static_cast<size_t>(host.at(of))];
    const auto at = std::find(its.ranks.begin(), its.ranks.end(), of) - its.ranks.begin();
    return Port(&its, its.nic_of(static_cast<size_t>(at)));
  };
  std::map<Port, double> out;  // seconds
  std::map<Port, double> in;
  for (const Hop& hop : plan.hops) {
    if (host.at(hop.src) == host.at(hop.dst)) continue;
    const auto nbytes = static_cast<double>(plan.chunks[hop.chunk].nbytes);
    const Port from = port(hop.src);
    const Port to = port(hop.dst);
    out[from] += nbytes / static_cast<double>(from.first->nics[from.second].out_rate);
    in[to] += nbytes / static_cast<double>(to.first->nics[to.second].in_rate);
  }
  const auto own = out.find(port(rank));
  if (own == out.end()) return false;
  double all = 0;
  double longest = 0;
  for (const auto& [_, seconds] : out) {
    all += seconds;
    longest = std::max(longest, seconds);
  }
  for (const auto& [_, seconds] : in) longest = std::max(longest, seconds);
  const double mean = all / static_cast<double>(out.size());
  return own->second > 0.95 * longest && own->second > kClearlyLonger * mean;
}

class Projection {
 public:
  Projection(const Plan& plan, int32_t rank, const std::vector<int32_t>& group,
             const std::vector<int32_t>& local)
      : plan_(plan), rank_(rank), group_(group), messages_(join_hops(plan, rank, local)) {
    for (const Problem& problem : plan.problems) {
      locals_.push_back(
          {shard_of(problem.src, problem.shape, rank), shard_of(problem.dst, problem.shape, rank)});
      Digestible digests;
      int64_t step = 1;
      for (size_t d = problem.shape.size(); d-- > 0; step *= problem.shape[d]) digests.step[d] = step;
      program_.digests.push_back(digests);
    }
    program_.rank = local_rank(rank);
    program_.relayed = relays(plan);
    for (const Message& message : messages_) {
      if (message.src == rank && message.after >= 0) ++forwards_[message.after];
    }
  }

  Program run() {
    counted_.resize(plan_.problems.size());
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
    // With fewer messages than may be in flight, this need not look at all hops.
    program_.sends_longest =
        !program_.relayed && program_.network_sends > kDirectSendsAhead && sends_longest(plan_, rank_);
    for (const auto& [peer, count] : local_out_) program_.local_sends.push_back({peer, count});
    if (!program_.carried_sends.empty())
      program_.most_carried = most_held_ + static_cast<int32_t>(kMessageWindow);
    sort_by_peer();
    for (size_t i = 0; i < locals_.size(); ++i) {
      program_.digests[i].whole = counted_[i] == volume_of(locals_[i].destination);
    }
    return std::move(program_);
  }

 private:
  void sort_by_peer() {
    std::map<int32_t, std::vector<int32_t>> recvs;
    std::map<int32_t, std::vector<int32_t>> local_recvs;
    std::map<int32_t, std::vector<int32_t>> sends;
    for (size_t i = 0; i < program_.recvs.size(); ++i) {
      const RecvOp& op = program_.recvs[i];
      (op.local ? local_recvs : recvs)[op.peer].push_back(static_cast<int32_t>(i));
    }
    for (size_t i = 0; i < program_.sends.size(); ++i) {
      const SendOp& op = program_.sends[i];
      if (!op.local) sends[op.targets.front().peer].push_back(static_cast<int32_t>(i));
    }
    const auto listed = [](auto&& found) {
      std::vector<PeerOps> out;
      for (auto& [peer, ops] : found) out.push_back({peer, std::move(ops)});
      return out;
    };
    program_.network_recvs_of = listed(recvs);
    program_.network_sends_of = listed(sends);
    program_.local_recvs_of = listed(local_recvs);

    int64_t copied = 0;
    for (const CopyOp& op : program_.copies) {
      int64_t here = op.to.element_bytes;
      for (int d = 0; d < op.to.ndim; ++d) here *= op.to.extent[static_cast<size_t>(d)];
      copied += here;
    }
    program_.copies_are_small = copied <= kInlineBytes;
  }
  int32_t local_rank(int32_t rank) const {
    const auto it = std::lower_bound(group_.begin(), group_.end(), rank);
    if (it == group_.end() || *it != rank) {
      throw Error(ErrorKind::Layout, fmt::format("rank {} of the plan is not in its group", rank));
    }
    return static_cast<int32_t>(it - group_.begin());
  }

  CopyOp local_copy(const LocalCopy& copy) {
    const LocalShards& local = locals_[copy.tensor];
    const int64_t bytes = plan_.problems[copy.tensor].element_bytes;
    const auto& step = program_.digests[copy.tensor].step;
    CopyOp op{
        locate(local.source, copy.box, copy.tensor, Side::Source, bytes, step, &program_.places),
        locate(local.destination, copy.box, copy.tensor, Side::Destination, bytes, step, &program_.places)};
    count(&op.to, copy.box);
    return op;
  }

  void count(Part* part, const Box& box) {
    part->counts = true;
    counted_[part->tensor] += box.volume();
  }

  // counts: for the digests of what arrives.
  PartRange chunk_parts(const Chunk& chunk, Side side, bool counts = false) {
    PartRange range{static_cast<int32_t>(program_.parts.size()), 0};
    for (int32_t p = chunk.piece_begin; p < chunk.piece_end; ++p) {
      const ChunkPiece& piece = plan_.pieces[p];
      const LocalShards& local = locals_[piece.tensor];
      const Shard& shard = side == Side::Source ? local.source : local.destination;
      program_.parts.push_back(locate(shard, piece.box, piece.tensor, side,
                                      plan_.problems[piece.tensor].element_bytes,
                                      program_.digests[piece.tensor].step, &program_.places));
      Part& part = program_.parts.back();
      if (counts) count(&part, piece.box);
    }
    range.end = static_cast<int32_t>(program_.parts.size());
    return range;
  }

  void add_recv(const Message& message) {
    const Chunk& chunk = plan_.chunks[message.chunk];
    const auto index = static_cast<int32_t>(program_.recvs.size());
    // Reductions of one chunk may pass through a rank more than once; its value arrives once.
    if (message.reduce == ReduceOp::None)
      recv_of_chunk_[message.chunk] = index;
    else
      reduction_of_hop_[message.hop] = index;
    RecvOp op;
    op.peer = local_rank(message.src);
    op.nbytes = chunk.nbytes;
    op.local = message.local;
    op.number = message.local ? -1 : program_.network_recvs++;
    op.reduce = message.reduce;
    // Three cases: a value that is kept as it arrives; the end of a reduction, which is kept too; a partial
    // value that is only passed on, which needs its own buffer (carry).
    const bool belongs_here = message.reduce == ReduceOp::None || (message.last_reduce && needs(chunk));
    if (belongs_here)
      op.parts = chunk_parts(chunk, Side::Destination, message.local && message.reduce == ReduceOp::None);
    if (message.reduce != ReduceOp::None) {
      op.own = chunk_parts(chunk, Side::Source);
      if (message.last_reduce && message.reduce == ReduceOp::Avg) op.divisor = contributions(chunk);
      if (!belongs_here) {
        // A value that no send takes would fill a buffer for ever: two chains meet, or one ends at the wrong
        // rank.
        if (forwards_[message.hop] == 0)
          throw Error(ErrorKind::Generic,
                      fmt::format("plan ends a reduction at rank {}, which does not need it", rank_));
        op.carry = static_cast<int32_t>(program_.carried_sends.size());
        program_.carried_sends.push_back(0);
        to_leave_.push_back(forwards_[message.hop]);
        most_held_ = std::max(most_held_, ++held_);
      }
    }
    program_.recvs.push_back(std::move(op));
    program_.bytes_received += chunk.nbytes;
  }

  // Whether the chunk belongs to this rank's destination shard.
  bool needs(const Chunk& chunk) const {
    const ChunkPiece& piece = plan_.pieces[chunk.piece_begin];
    const auto& receivers = plan_.tasks[piece.task].receivers;
    return std::binary_search(receivers.begin(), receivers.end(), rank_);
  }

  int32_t contributions(const Chunk& chunk) const {
    const auto& numbers = plan_.tasks[plan_.pieces[chunk.piece_begin].task].contribution;
    return 1 + *std::max_element(numbers.begin(), numbers.end());
  }

  void add_send(const Message& message) {
    const Chunk& chunk = plan_.chunks[message.chunk];
    const bool forward = message.after >= 0;
    SendOp op;
    op.nbytes = chunk.nbytes;
    op.local = message.local;
    op.number = message.local ? -1 : program_.network_sends++;
    op.forward = forward;
    if (forward) {
      // The source of the data: the reduction that ended with that hop, else the one receive of the chunk.
      const auto reduction = reduction_of_hop_.find(message.after);
      RecvOp& source = program_.recvs[reduction == reduction_of_hop_.end() ? recv_of_chunk_.at(message.chunk)
                                                                           : reduction->second];
      source.forwards.push_back(static_cast<int32_t>(program_.sends.size()));
      op.carry = source.carry;
      if (op.carry >= 0) {
        ++program_.carried_sends[op.carry];
        if (--to_leave_[op.carry] == 0) --held_;
      }
    }
    for (const int32_t receiver : message.receivers) {
      const int32_t peer = local_rank(receiver);
      op.targets.push_back({peer, next_out_[peer]++});
      if (message.local) ++local_out_[peer];
    }
    if (op.carry < 0) op.parts = chunk_parts(chunk, forward ? Side::Destination : Side::Source);
    program_.sends.push_back(std::move(op));
    program_.bytes_sent += chunk.nbytes * static_cast<int64_t>(message.receivers.size());
  }

  const Plan& plan_;
  int32_t rank_;
  const std::vector<int32_t>& group_;
  std::vector<LocalShards> locals_;
  Program program_;
  const std::vector<Message> messages_;
  std::unordered_map<int32_t, int32_t> recv_of_chunk_;     // a rank receives a chunk once
  std::unordered_map<int32_t, int32_t> reduction_of_hop_;  // hops that reduce
  std::unordered_map<int32_t, int32_t> forwards_;          // hop -> messages of this rank that wait for it
  std::vector<int32_t> to_leave_;                          // by carry: sends that are not added yet
  int32_t held_ = 0;                                       // carries, if all hops are done in this order
  int32_t most_held_ = 0;
  std::vector<int64_t> counted_;  // elements by tensor, for digests of what arrives
  std::unordered_map<int32_t, int32_t> next_out_;
  std::map<int32_t, int32_t>
      local_out_;  // messages by peer; all that pass between two ranks of a host are local
};

}  // namespace

StridedView part_view(const Part& part, const std::vector<BoxPlace>& places,
                      const std::array<int64_t, kMaxDims>& stride, int64_t element_bytes, std::byte* base) {
  StridedView view{base, part.ndim, element_bytes, part.extent, stride};
  if (part.place >= 0) {
    const BoxPlace& place = places[static_cast<size_t>(part.place)];
    for (int d = 0; d < part.ndim; ++d) view.stride[d] = place.step[d] * stride[place.axis[d]];
  }
  if (base == nullptr) return view;
  // Beyond its dimensions a local tensor has strides of 0.
  const int dims = part.place >= 0 ? kMaxDims : part.ndim;
  for (int d = 0; d < dims; ++d) view.data += part.at[d] * stride[d];
  return view;
}

Program project(const Plan& plan, int32_t rank, const std::vector<int32_t>& group,
                const std::vector<int32_t>& local) {
  return Projection(plan, rank, group, local).run();
}

}  // namespace meshcast
