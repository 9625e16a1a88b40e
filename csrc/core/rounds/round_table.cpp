#include "rounds/round_table.h"

#include <algorithm>
#include <cmath>
#include <queue>
#include <unordered_map>

#include <fmt/format.h>

#include "common/error.h"
#include "plan/network.h"

namespace meshcast {
namespace {

// A buffer is in use for up to three rounds where it receives (being filled; unpacked; forwarded) and for two
// where it sends (being packed; being sent), and allocation leaves gaps.
constexpr int64_t kBuffersPerRound = 6;

// A result of a reduction leaves two rounds later at the earliest, so that the round between them hides the
// kernel.
constexpr int32_t kReduceLag = 2;

class Rounds {
 public:
  Rounds(const Plan& plan, const RoundOptions& options)
      : plan_(plan),
        network_(plan.topology, plan.ranks),
        carried_(carried_hops(plan.tasks, plan.pieces, plan.chunks, plan.hops)),
        rank_bytes_(std::max<int64_t>(options.staging_bytes / kBuffersPerRound, 1)),
        port_load_(static_cast<size_t>(network_.port_count())),
        rank_load_(2 * plan.ranks.size()),
        carries_(plan.ranks.size()),
        followers_(plan.hops.size()),
        leaves_left_(plan.hops.size(), 0),
        carry_number_(plan.hops.size(), -1) {
    table_.of_hop.assign(plan.hops.size(), -1);
    for (const int32_t rank : plan.ranks) {
      index_.emplace(rank, static_cast<int32_t>(index_.size()));
    }
    for (size_t i = 0; i < plan.hops.size(); ++i) {
      const Hop& hop = plan.hops[i];
      if (hop.after >= 0) followers_[static_cast<size_t>(hop.after)].push_back(static_cast<int32_t>(i));
    }
    count_carries();
    table_.round_ns = options.round_ns > 0 ? options.round_ns : best_round_ns(options);
  }

  RoundTable run() {
    for (size_t i = 0; i < plan_.hops.size(); ++i) {
      if (plan_.hops[i].after < 0) make_ready(static_cast<int32_t>(i));
    }
    size_t placed = 0;
    int32_t idle = 0;
    for (int32_t round = 0; placed < plan_.hops.size(); ++round) {
      const size_t before = placed;
      placed += fill(round);
      idle = placed == before ? idle + 1 : 0;
      // Without a mistake in the plan the first hop that is missing always finds its place (see carries.h).
      if (idle > kReduceLag)
        throw Error(ErrorKind::Generic, fmt::format("{} hops of the plan can never be done: they wait for one "
                                                    "another or for buffers",
                                                    plan_.hops.size() - placed));
      if (placed > before) table_.count = round + 1;
    }
    return std::move(table_);
  }

 private:
  // Hops of one pair that may go, in plan order.
  using Queue = std::priority_queue<int32_t, std::vector<int32_t>, std::greater<>>;

  // A load of the round that is being filled.
  struct Load {
    int32_t round = -1;
    int64_t amount = 0;
    int64_t in(int32_t now) const { return round == now ? amount : 0; }
    void add(int32_t now, int64_t more) {
      amount = in(now) + more;
      round = now;
    }
  };

  // Values that a rank only passes on, as in run/carries.h: numbered in plan order, number n may come once
  // fewer than `most` of those before it are held.
  struct Carries {
    int32_t numbered = 0;
    int32_t released = 0;
    int32_t most = 0;
  };

  int64_t nbytes(const Hop& hop) const { return plan_.chunks[static_cast<size_t>(hop.chunk)].nbytes; }
  int32_t index(int32_t rank) const { return index_.at(rank); }

  void count_carries() {
    std::vector<int32_t> held(plan_.ranks.size(), 0);
    std::vector<int32_t> left(plan_.hops.size(), 0);
    for (size_t i = 0; i < plan_.hops.size(); ++i) {
      const Hop& hop = plan_.hops[i];
      if (hop.after >= 0) {
        const auto before = static_cast<size_t>(hop.after);
        if (carried_[before] && --left[before] == 0) --held[static_cast<size_t>(index(hop.src))];
      }
      if (!carried_[i]) continue;
      const auto dst = static_cast<size_t>(index(hop.dst));
      left[i] = leaves_left_[i] = static_cast<int32_t>(followers_[i].size());
      carry_number_[i] = carries_[dst].numbered++;
      carries_[dst].most = std::max(carries_[dst].most, ++held[dst]);
    }
    for (Carries& carries : carries_) carries.most += static_cast<int32_t>(kMessageWindow);
  }

  // With L the time of the busiest link, d the hops of the longest chain and g the cost of a round apart from
  // its bytes, rounds of T take about (L / T + d - 1) * (T + g), which is least at T = sqrt(L g / (d - 1)).
  //
  // The product is L + L g / T + (d - 1) T + (d - 1) g; its derivative is zero at that T. Example: L = 100
  // ms, g = 0.03 ms and d = 4 give T = 1 ms and (100 + 3) * 1.03 = 106 ms; rounds of 0.1 ms would take 130
  // ms, of 10 ms also 130.
  int64_t best_round_ns(const RoundOptions& options) const {
    std::vector<int64_t> busy(static_cast<size_t>(network_.port_count()), 0);
    std::vector<int32_t> depth(plan_.hops.size(), 1);
    int32_t deepest = 1;
    int64_t longest = 1;
    int32_t busiest = -1;
    for (size_t i = 0; i < plan_.hops.size(); ++i) {
      const Hop& hop = plan_.hops[i];
      if (hop.after >= 0) depth[i] = depth[static_cast<size_t>(hop.after)] + 1;
      deepest = std::max(deepest, depth[i]);
      const Network::Link link = network_.link(index(hop.src), index(hop.dst));
      for (const int32_t port : {link.out, link.in}) {
        int64_t& time = busy[static_cast<size_t>(port)];
        time += transfer_ns(nbytes(hop), network_.port_rate(port));
        if (time <= longest) continue;
        longest = time;
        busiest = port;
      }
    }
    if (deepest == 1) return longest;
    const int64_t guessed = options.group_ns + network_.latency_ns();
    auto overhead = static_cast<double>(options.measured_ns > 0 ? options.measured_ns : guessed);
    const bool inside = busiest >= 2 * network_.nic_count();  // a host
    if (inside && options.link_rate > network_.port_rate(busiest))
      overhead *= static_cast<double>(options.link_rate) / static_cast<double>(network_.port_rate(busiest));
    // sqrt is exact to the last bit under IEEE 754, so all ranks round equally.
    return std::max<int64_t>(1, static_cast<int64_t>(std::sqrt(static_cast<double>(longest) * overhead /
                                                               static_cast<double>(deepest - 1))));
  }

  void make_ready(int32_t i) {
    const Hop& hop = plan_.hops[static_cast<size_t>(i)];
    const uint64_t pair = (static_cast<uint64_t>(index(hop.src)) << 32) | static_cast<uint64_t>(index(hop.dst));
    const auto [it, fresh] = pair_.try_emplace(pair, queues_.size());
    if (fresh) queues_.emplace_back();
    Queue& queue = queues_[it->second];
    queue.push(i);
    // The queue may stand in the heads under a later hop already; stale entries are skipped.
    if (queue.top() == i) heads_.push({i, it->second});
  }

  // A hop that is larger than a limit by itself goes into an empty round: each limit holds from the second hop
  // on.
  bool fits(const Hop& hop, int32_t i, int32_t round) const {
    const Network::Link link = network_.link(index(hop.src), index(hop.dst));
    for (const int32_t port : {link.out, link.in}) {
      const int64_t load = port_load_[static_cast<size_t>(port)].in(round);
      if (load > 0 && load + transfer_ns(nbytes(hop), network_.port_rate(port)) > table_.round_ns) return false;
    }
    for (const size_t side : {out_side(hop), in_side(hop)}) {
      const int64_t load = rank_load_[side].in(round);
      if (load > 0 && load + nbytes(hop) > rank_bytes_) return false;
    }
    if (!carried_[static_cast<size_t>(i)]) return true;
    const Carries& carries = carries_[static_cast<size_t>(index(hop.dst))];
    return carry_number_[static_cast<size_t>(i)] - carries.released < carries.most;
  }

  void place(const Hop& hop, int32_t i, int32_t round) {
    table_.of_hop[static_cast<size_t>(i)] = round;
    const Network::Link link = network_.link(index(hop.src), index(hop.dst));
    for (const int32_t port : {link.out, link.in})
      port_load_[static_cast<size_t>(port)].add(round, transfer_ns(nbytes(hop), network_.port_rate(port)));
    for (const size_t side : {out_side(hop), in_side(hop)}) rank_load_[side].add(round, nbytes(hop));
    if (hop.after < 0) return;
    const auto before = static_cast<size_t>(hop.after);
    // The buffer is free when the round is over.
    if (carried_[before] && --leaves_left_[before] == 0) released_.push_back(index(hop.src));
  }

  // Fills the round, in plan order over all pairs.
  // Phase 1: hops whose chunk is there by this round join the queues of their pairs. Phase 2: from the first of
  // every queue, in plan order, those that fit; one that does not holds back only its own pair, since the
  // messages of a pair match in order. Phase 3: hops that did not fit are tried again in the next round.
  size_t fill(int32_t round) {
    while (!waiting_.empty() && waiting_.front().first <= round) {
      make_ready(waiting_.front().second);
      waiting_.pop();
    }
    while (!reduced_.empty() && reduced_.front().first <= round) {
      make_ready(reduced_.front().second);
      reduced_.pop();
    }
    size_t placed = 0;
    std::vector<std::pair<int32_t, size_t>> later;
    while (!heads_.empty()) {
      const auto [i, pair] = heads_.top();
      heads_.pop();
      Queue& queue = queues_[pair];
      if (queue.empty() || queue.top() != i) continue;  // stale
      const Hop& hop = plan_.hops[static_cast<size_t>(i)];
      if (!fits(hop, i, round)) {
        later.emplace_back(i, pair);
        continue;
      }
      place(hop, i, round);
      ++placed;
      queue.pop();
      if (!queue.empty()) heads_.push({queue.top(), pair});
      auto& next = hop.reduce == ReduceOp::None ? waiting_ : reduced_;
      const int32_t lag = hop.reduce == ReduceOp::None ? 1 : kReduceLag;
      for (const int32_t follower : followers_[static_cast<size_t>(i)]) next.emplace(round + lag, follower);
    }
    for (const auto& head : later) heads_.push(head);
    for (const int32_t rank : released_) ++carries_[static_cast<size_t>(rank)].released;
    released_.clear();
    return placed;
  }

  size_t out_side(const Hop& hop) const { return 2 * static_cast<size_t>(index(hop.src)); }
  size_t in_side(const Hop& hop) const { return 2 * static_cast<size_t>(index(hop.dst)) + 1; }

  const Plan& plan_;
  const Network network_;
  const std::vector<char> carried_;
  const int64_t rank_bytes_;  // one direction, one round
  std::unordered_map<int32_t, int32_t> index_;

  std::vector<Load> port_load_;  // nanoseconds
  std::vector<Load> rank_load_;  // bytes, by rank and direction
  std::vector<Carries> carries_;
  std::vector<int32_t> released_;  // ranks that get a buffer back when the round is over

  std::vector<std::vector<int32_t>> followers_;
  std::vector<int32_t> leaves_left_;                 // by hop: sends of a carried value that have no round yet
  std::vector<int32_t> carry_number_;                // by hop
  std::queue<std::pair<int32_t, int32_t>> waiting_;  // (first round that is allowed, hop), ascending
  std::queue<std::pair<int32_t, int32_t>> reduced_;  // the same, of hops behind a reduction
  std::unordered_map<uint64_t, size_t> pair_;
  std::vector<Queue> queues_;
  using Head = std::pair<int32_t, size_t>;  // first hop of a queue, its queue
  std::priority_queue<Head, std::vector<Head>, std::greater<>> heads_;

  RoundTable table_;
};

}  // namespace

RoundTable make_rounds(const Plan& plan, const RoundOptions& options) { return Rounds(plan, options).run(); }

}  // namespace meshcast
