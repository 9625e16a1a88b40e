#include "plan/joined_chunks.h"

#include <algorithm>
#include <unordered_map>
#include <utility>
#include <vector>

#include "plan/draft.h"
#include "plan/packing.h"
#include "plan/schedule.h"
#include "plan/staging.h"

namespace meshcast {
namespace {

// Beyond this a message over gloo costs little more than its bytes; this also bounds the staging.
constexpr int64_t kLargestJoined = int64_t{8} << 20;

// A rank packs while the message before is in flight, so a transfer waits only for the packing of the first
// message, which is at most this part of the bytes between the two ranks.
constexpr int64_t kFewestMessages = 8;

// A message of so many bytes is not cut for that: packing it takes no longer than sending two messages.
constexpr int64_t kLeastWhole = 256 * 1024;

// And at most this part of the bytes of a port that serves several others.
constexpr int64_t kFewestOfPort = 32;

// Messages that overtake others at their ports may make the plan longer by this part.
constexpr int64_t kTolerance = 1000;

uint64_t pair_of(const Hop& hop) {
  return (static_cast<uint64_t>(static_cast<uint32_t>(hop.src)) << 32) | static_cast<uint32_t>(hop.dst);
}

class Joiner {
 public:
  Joiner(const Plan& plan, const Network& network)
      : plan_(plan),
        network_(network),
        source_(plan.problems, &Problem::src),
        destination_(plan.problems, &Problem::dst),
        uses_(plan.chunks.size(), 0) {
    for (const Hop& hop : plan.hops) ++uses_[static_cast<size_t>(hop.chunk)];
    partner_.assign(static_cast<size_t>(network.port_count()), kNoPartner);
    port_bytes_.assign(static_cast<size_t>(network.port_count()), 0);
    for (const Hop& hop : plan.hops) {
      const Network::Link link = link_of(hop);
      const bool alone = stands_alone(hop);
      meet(link.out, alone ? link.in : kPassedOn);
      meet(link.in, alone ? link.out : kPassedOn);
      if (alone) pair_bytes_[pair_of(hop)] += chunk(hop).nbytes;
      for (const int32_t port : {link.out, link.in})
        port_bytes_[static_cast<size_t>(port)] += chunk(hop).nbytes;
    }
  }

  // The chunk that each chunk becomes part of: itself, or that of an earlier hop between the same ranks. Empty
  // if none is joined. Only neighbours in plan order between two ranks are joined, so the order of their own
  // messages stays; they may overtake messages of other ranks at a port (kTolerance). A message is open until a
  // hop comes that does not fit, which opens the next one.
  std::vector<int32_t> find(int64_t largest) {
    joined_.clear();
    heads_.clear();
    for (size_t c = 0; c < plan_.chunks.size(); ++c) heads_.push_back(static_cast<int32_t>(c));
    std::unordered_map<uint64_t, const Hop*> open;  // by pair: the first hop of the open message
    bool any = false;
    for (const Hop& hop : plan_.hops) {
      const int64_t most = std::min(largest, most_joined(hop));
      if (most == 0) continue;
      const Hop*& head = open[pair_of(hop)];
      if (head != nullptr && join(*head, hop, most)) {
        any = true;
      } else {
        head = &hop;
      }
    }
    return any ? std::exchange(heads_, {}) : std::vector<int32_t>{};
  }

  // The box of the joined chunk.
  const ChunkPiece& piece(int32_t head) const { return joined_.at(head).piece; }
  bool grown(int32_t head) const { return joined_.count(head) > 0; }
  int64_t nbytes(int32_t head) const { return joined_.at(head).nbytes; }

 private:
  struct Joined {
    ChunkPiece piece;
    int64_t nbytes = 0;
  };

  // The ports with which a port exchanges data: one other port, or these. The states only rise: none, one,
  // several, passed on. So the order of hops does not matter.
  static constexpr int32_t kNoPartner = -1;
  static constexpr int32_t kPartners = -2;  // several, but nothing is passed on
  static constexpr int32_t kPassedOn = -3;  // or a chunk goes to several, is reduced, or has several boxes

  void meet(int32_t port, int32_t other) {
    int32_t& partner = partner_[static_cast<size_t>(port)];
    if (other == kPassedOn || partner == kPassedOn) {
      partner = kPassedOn;
    } else if (partner != other) {
      partner = partner == kNoPartner ? other : kPartners;
    }
  }

  Network::Link link_of(const Hop& hop) const {
    return network_.link(network_.index(hop.src), network_.index(hop.dst));
  }

  // The most bytes of a message that this hop may be part of; 0 if it must not be joined. The network shares
  // its rate among messages in flight, and does not follow the plan's order: large messages must not disturb
  // that order where it matters.
  int64_t most_joined(const Hop& hop) const {
    const Network::Link link = link_of(hop);
    const int32_t out = partner_[static_cast<size_t>(link.out)], in = partner_[static_cast<size_t>(link.in)];
    if (out == kPassedOn || in == kPassedOn) return 0;
    const int64_t most = pair_bytes_.at(pair_of(hop)) / kFewestMessages;
    // The two ports serve no others, so there is no order to disturb.
    if (out == link.in && in == link.out) return std::max(most, kLeastWhole);
    const int64_t busier =
        std::max(port_bytes_[static_cast<size_t>(link.out)], port_bytes_[static_cast<size_t>(link.in)]);
    return std::min(most, busier / kFewestOfPort);
  }

  const Chunk& chunk(const Hop& hop) const { return plan_.chunks[static_cast<size_t>(hop.chunk)]; }

  // Whether the chunk is one box, which goes from one rank to one other and no further.
  bool stands_alone(const Hop& hop) const {
    const Chunk& c = chunk(hop);
    return hop.after < 0 && hop.reduce == ReduceOp::None && uses_[static_cast<size_t>(hop.chunk)] == 1 &&
           c.piece_end - c.piece_begin == 1;
  }

  Joined as_is(const Hop& hop) const {
    return {plan_.pieces[static_cast<size_t>(chunk(hop).piece_begin)], chunk(hop).nbytes};
  }

  bool join(const Hop& head, const Hop& next, int64_t largest) {
    const auto found = joined_.find(head.chunk);
    const Joined first = found == joined_.end() ? as_is(head) : found->second;
    const Joined second = as_is(next);
    // Of one task and adjacent, so that the message stays one box; and no rank may then have to pack, since
    // that copies every byte.
    Joined both{first.piece, first.nbytes + second.nbytes};
    if (both.nbytes > largest) return false;
    if (first.piece.task != second.piece.task || !join_boxes(second.piece.box, &both.piece.box)) return false;
    if (starts_packing(source_, first.piece, both.piece, head.src)) return false;
    if (starts_packing(destination_, first.piece, both.piece, head.dst)) return false;
    joined_[head.chunk] = both;
    heads_[static_cast<size_t>(next.chunk)] = head.chunk;
    return true;
  }

  static bool starts_packing(const Packing& side, const ChunkPiece& before, const ChunkPiece& after,
                             int32_t rank) {
    return side.packs(after, rank) && !side.packs(before, rank);
  }

  const Plan& plan_;
  const Network& network_;
  const Packing source_;
  const Packing destination_;
  std::vector<int32_t> uses_;                         // hops of each chunk
  std::unordered_map<uint64_t, int64_t> pair_bytes_;  // of chunks that stand alone
  std::vector<int32_t> partner_;                      // by port
  std::vector<int64_t> port_bytes_;                   // of all hops
  std::vector<int32_t> heads_;
  std::unordered_map<int32_t, Joined> joined_;  // by the first chunk
};

// The plan with chunks joined according to `heads`.
Plan joined_plan(const Plan& plan, const std::vector<int32_t>& heads, const Joiner& joiner,
                 const Network& network) {
  Plan out = plan;
  out.pieces.clear();
  out.chunks.clear();
  // Phase 1: chunks, in the order of their first parts.
  std::vector<int32_t> number(plan.chunks.size(), -1);  // of chunks that remain
  for (size_t c = 0; c < plan.chunks.size(); ++c) {
    const auto head = static_cast<int32_t>(c);
    if (heads[c] != head) continue;
    number[c] = static_cast<int32_t>(out.chunks.size());
    const Chunk& chunk = plan.chunks[c];
    const auto begin = static_cast<int32_t>(out.pieces.size());
    if (joiner.grown(head)) {
      out.pieces.push_back(joiner.piece(head));
    } else {
      out.pieces.insert(out.pieces.end(), plan.pieces.begin() + chunk.piece_begin,
                        plan.pieces.begin() + chunk.piece_end);
    }
    out.chunks.push_back({begin, static_cast<int32_t>(out.pieces.size()),
                          joiner.grown(head) ? joiner.nbytes(head) : chunk.nbytes});
  }
  // Phase 2: hops. A joined message takes the place of its first hop. `after` always points to a hop that
  // remains: chunks that are passed on are never joined.
  std::vector<Hop> hops;
  std::vector<int32_t> place(plan.hops.size(), -1);
  for (size_t i = 0; i < plan.hops.size(); ++i) {
    Hop hop = plan.hops[i];
    if (heads[static_cast<size_t>(hop.chunk)] != hop.chunk) continue;  // part of an earlier hop
    place[i] = static_cast<int32_t>(hops.size());
    hop.chunk = number[static_cast<size_t>(hop.chunk)];
    if (hop.after >= 0) hop.after = place[static_cast<size_t>(hop.after)];
    hops.push_back(hop);
  }
  // Phase 3: its times, in the same order on every port.
  Schedule made = simulate(hops, out.chunks, network);
  out.hops = std::move(made.hops);
  out.times = std::move(made.times);
  out.makespan_ns = made.makespan_ns;
  return out;
}

int64_t most_staging(const Plan& plan) {
  const std::vector<int64_t> staging = peak_staging(plan);
  return *std::max_element(staging.begin(), staging.end());
}

}  // namespace

void join_chunks(Plan* plan, const Network& network) {
  if (plan->hops.empty()) return;
  Joiner joiner(*plan, network);
  const int64_t allowed_ns = plan->makespan_ns + plan->makespan_ns / kTolerance;
  int64_t allowed_staging = -1;
  // Ends at the latest when messages would have to be smaller than two chunks: then nothing is joined.
  for (int64_t largest = kLargestJoined;; largest /= 2) {
    const std::vector<int32_t> heads = joiner.find(largest);
    if (heads.empty()) return;
    Plan joined = joined_plan(*plan, heads, joiner, network);
    if (joined.makespan_ns > allowed_ns) continue;
    if (allowed_staging < 0) allowed_staging = std::max(kStagingGoal, most_staging(*plan));
    if (most_staging(joined) > allowed_staging) continue;
    *plan = std::move(joined);
    return;
  }
}

}  // namespace meshcast
