#include "plan/schedule.h"

#include <algorithm>
#include <queue>
#include <tuple>
#include <utility>

#include "plan/stable_order.h"

namespace meshcast {
namespace {

constexpr int32_t kNone = -1;
constexpr size_t kMostCandidates =
    64;  // looked at when a port becomes free: bounds the work if all send to all

// The hops between one pair of ports whose data is there.
struct Pair {
  int32_t out = kNone;
  int32_t in = kNone;
  std::vector<int32_t> ready;  // heap, best hop first
  int32_t out_slot = kNone;    // index of the pair in its ports' lists, kNone while `ready` is empty
  int32_t in_slot = kNone;
};

// A pair as one of its ports lists it. The other port is here too, since most look-ups only find that it is
// busy.
struct Waiting {
  int32_t pair = kNone;
  int32_t other = kNone;
};

// A port carries one hop at a time. It is idle at `now` if its free_at_ <= now.
struct Port {
  int64_t work_left = 0;  // ns of hops that have not started
  int64_t urgency = kUrgency;
  int64_t pressing() const { return work_left / kUrgency * urgency; }
  std::vector<Waiting> waiting;  // pairs with ready hops
};

// List scheduling (Graham, 1966) driven by events: a port becomes free, or a chunk arrives. Time jumps from
// event to event; at each one all hops that may start do so, best first. A port idles although a hop could use
// it only out of patience, or if the hop is beyond the candidates that are looked at. All times are ns, and
// ties are broken by index: the same hops give the same schedule on every rank.
//
// Worked example. Two chunks take the chain A -> B -> C; a hop holds its ports for 1 s, the latency is 0.1 s.
// Hops 0 and 1 carry the first chunk, 2 and 3 the second; hop 1 comes after 0, and 3 after 2.
//   t = 0.0   hops 0 and 2 are ready on one pair of ports; equal in all else, the lower index goes: hop 0
//   t = 1.0   out of A and into B are free again: hop 2 starts
//   t = 1.1   hop 0 has arrived, so hop 1 is ready: it starts, while B takes in hop 2
//   t = 2.1   hop 2 has arrived and B's port out is free: hop 3 starts
//   t = 3.2   hop 3 has arrived. The makespan is 1 s to fill the chain, 2 s of hops and 0.2 s of latency.
class ListScheduler {
 public:
  // `backwards`: time runs from the end to the start, a hop comes after all hops that follow it in the plan.
  ListScheduler(const std::vector<Hop>& hops, const std::vector<Chunk>& chunks,
                const std::vector<int64_t>& order, const std::vector<int64_t>& due_ns, const Network& network,
                bool backwards, const std::vector<int32_t>& urgency = {}, int32_t patience = 0)
      : hops_(hops),
        chunks_(chunks),
        order_(order),
        due_ns_(due_ns),
        ports_(static_cast<size_t>(network.port_count())),
        free_at_(static_cast<size_t>(network.port_count()), 0),
        latency_(network.latency_ns()),
        backwards_(backwards),
        patience_(patience) {
    for (size_t l = 0; l < urgency.size(); ++l) ports_[l].urgency = urgency[l];
    const size_t n = hops.size();
    out_ns_.resize(n);
    in_ns_.resize(n);
    rest_.assign(n, 0);
    pair_.resize(n);
    prepare(network);
  }

  Schedule run() {
    // Phase 1: hops that wait for no other hop are ready. Backwards these are the last ones of every route.
    const size_t n = hops_.size();
    Schedule result;
    result.hops.reserve(n);
    result.times.reserve(n);
    place_.assign(n, kNone);
    start_ns_.resize(n);
    for (size_t i = 0; i < n; ++i) {
      if (backwards_ ? child_begin_[i] == child_begin_[i + 1] : hops_[i].after < 0)
        make_ready(static_cast<int32_t>(i));
    }
    // Phase 2: start what may start, continue with the next event, and note what it frees or brings.
    while (true) {
      start_all(&result);
      if (events_.empty()) break;
      now_ = std::get<0>(events_.top());
      // All events of one time are handled before anything starts, so that the choice includes all that is
      // ready.
      while (!events_.empty() && std::get<0>(events_.top()) == now_) {
        const auto [time, kind, id] = events_.top();
        events_.pop();
        if (kind == 0) {
          freed_.push_back(id);
        } else {
          const auto hop = static_cast<size_t>(id);
          if (backwards_) {
            const int32_t before = hops_[hop].after;
            if (before >= 0 && --open_children_[static_cast<size_t>(before)] == 0) make_ready(before);
            continue;
          }
          for (int32_t c = child_begin_[hop]; c < child_begin_[hop + 1]; ++c)
            make_ready(children_[static_cast<size_t>(c)]);
        }
      }
    }
    return result;
  }

  const std::vector<int64_t>& start_ns() const { return start_ns_; }  // by hop, after run

 private:
  // (time, 0 = port is free or 1 = hop arrived, port or hop): a total order, so runs repeat exactly.
  using Event = std::tuple<int64_t, int32_t, int32_t>;

  void prepare(const Network& network) {
    // Phase 1: how long each hop holds either port, and the work that each port has before it.
    const size_t n = hops_.size();
    std::vector<std::pair<int64_t, int32_t>> keys(n);
    for (size_t i = 0; i < n; ++i) {
      const Hop& hop = hops_[i];
      const Network::Link link = network.link(network.index(hop.src), network.index(hop.dst));
      const int64_t nbytes = chunks_[static_cast<size_t>(hop.chunk)].nbytes;
      out_ns_[i] = transfer_ns(nbytes, network.port_rate(link.out));
      in_ns_[i] = transfer_ns(nbytes, network.port_rate(link.in));
      ports_[static_cast<size_t>(link.out)].work_left += out_ns_[i];
      ports_[static_cast<size_t>(link.in)].work_left += in_ns_[i];
      keys[i] = {static_cast<int64_t>(link.out) * network.port_count() + link.in, static_cast<int32_t>(i)};
    }
    // Phase 2: one Pair for each two ports that have a hop in common. Hops of a pair exclude each other, so
    // only the best one of them is ever compared with those of other pairs: a heap each instead of a list of
    // all hops.
    std::sort(keys.begin(), keys.end());
    for (size_t k = 0; k < n; ++k) {
      if (k == 0 || keys[k].first != keys[k - 1].first) {
        Pair pair;
        pair.out = static_cast<int32_t>(keys[k].first / network.port_count());
        pair.in = static_cast<int32_t>(keys[k].first % network.port_count());
        pairs_.push_back(std::move(pair));
      }
      pair_[static_cast<size_t>(keys[k].second)] = static_cast<int32_t>(pairs_.size()) - 1;
    }
    looked_.assign(pairs_.size(), 0);
    // Phase 3: the children of every hop, as ranges of one array (counted here, filled at the end).
    child_begin_.assign(n + 1, 0);
    for (const Hop& hop : hops_) {
      if (hop.after >= 0) ++child_begin_[static_cast<size_t>(hop.after) + 1];
    }
    for (size_t i = 0; i < n; ++i) child_begin_[i + 1] += child_begin_[i];
    children_.resize(static_cast<size_t>(child_begin_[n]));
    if (backwards_) {
      open_children_.resize(n);
      for (size_t i = 0; i < n; ++i) open_children_[i] = child_begin_[i + 1] - child_begin_[i];
    }
    std::vector<int32_t> fill(child_begin_.begin(), child_begin_.end() - 1);
    // Phase 4: the time before a hop and behind it on its route, if no port were ever busy. A parent has a
    // lower index than its children, so one pass forwards and one backwards are enough.
    depth_ns_.assign(n, 0);
    for (size_t i = 0; i < n; ++i) {
      if (hops_[i].after < 0) continue;
      const auto before = static_cast<size_t>(hops_[i].after);
      depth_ns_[i] = depth_ns_[before] + std::max(out_ns_[before], in_ns_[before]) + latency_;
    }
    for (size_t i = n; i-- > 0;) {
      if (hops_[i].after < 0) continue;
      const auto before = static_cast<size_t>(hops_[i].after);
      rest_[before] = std::max(rest_[before], rest_[i] + std::max(out_ns_[i], in_ns_[i]) + latency_);
    }
    for (size_t i = 0; i < n; ++i) {
      if (hops_[i].after < 0) continue;
      children_[static_cast<size_t>(fill[static_cast<size_t>(hops_[i].after)]++)] = static_cast<int32_t>(i);
    }
  }

  // True if `a` should go after `b` on the same pair (heap order of the standard library). Both ports are the
  // same for all hops of a pair, so their work does not distinguish these.
  bool worse(int32_t a, int32_t b) const {
    const auto i = static_cast<size_t>(a);
    const auto j = static_cast<size_t>(b);
    if (!order_.empty() && order_[i] != order_[j]) return order_[i] > order_[j];
    if (!due_ns_.empty() && due_ns_[i] != due_ns_[j]) return due_ns_[i] > due_ns_[j];
    if (rest_[i] != rest_[j]) return rest_[i] < rest_[j];
    return a > b;
  }

  // A pair is listed at both of its ports exactly while it has a ready hop.
  void make_ready(int32_t hop) {
    const int32_t p = pair_[static_cast<size_t>(hop)];
    Pair& pair = pairs_[static_cast<size_t>(p)];
    pair.ready.push_back(hop);
    std::push_heap(pair.ready.begin(), pair.ready.end(), [this](int32_t a, int32_t b) { return worse(a, b); });
    if (pair.ready.size() == 1) {
      insert({p, pair.in}, &pair.out_slot, pair.out);
      insert({p, pair.out}, &pair.in_slot, pair.in);
      candidates_.push_back(p);
    }
  }

  void insert(Waiting pair, int32_t* slot, int32_t port) {
    auto& list = ports_[static_cast<size_t>(port)].waiting;
    *slot = static_cast<int32_t>(list.size());
    list.push_back(pair);
  }

  // In constant time: the last pair of the list moves to the free place, and its slot is updated.
  void remove(int32_t slot, int32_t port, int32_t Pair::*slot_of) {
    auto& list = ports_[static_cast<size_t>(port)].waiting;
    list[static_cast<size_t>(slot)] = list.back();
    pairs_[static_cast<size_t>(list.back().pair)].*slot_of = slot;
    list.pop_back();
  }

  bool idle(int32_t port) const { return free_at_[static_cast<size_t>(port)] <= now_; }

  // Lower goes first. Work that is left on the two ports counts against the time at which the hop is due: a hop
  // may be late by as much as its ports are behind the others. Three rules, in this order. Draft::order counts
  // first. Without due times the pair with the most work left goes first (the port that is busiest for the rest
  // of the plan must not idle), then the longest rest of a route. With them a stream advances steadily, unless
  // its ports are behind.
  using Key = std::tuple<int64_t, int64_t, int64_t, int32_t>;
  Key key(int32_t p) const {
    const Pair& pair = pairs_[static_cast<size_t>(p)];
    const auto hop = static_cast<size_t>(pair.ready.front());
    const int64_t out = ports_[static_cast<size_t>(pair.out)].pressing();
    const int64_t in = ports_[static_cast<size_t>(pair.in)].pressing();
    const int64_t order = order_.empty() ? 0 : order_[hop];
    if (due_ns_.empty()) return {order, -(out + in), -rest_[hop], p};
    return {order, due_ns_[hop] + depth_ns_[hop] - (out + in), -std::min(out, in), p};
  }

  // Whether one of the ports of a pair should wait for a port with more work left, which becomes free soon. The
  // wait is bounded: the wanted port is busy now, so an event ends it, and it is at most patience / kPatience
  // of the time that the better hop would hold this port. A gap of that length costs time once; then the
  // senders are shifted against each other and no longer meet.
  bool should_wait(const Pair& pair) const {
    return waits_for(pair, pair.out, pair.in, out_ns_) || waits_for(pair, pair.in, pair.out, in_ns_);
  }

  bool waits_for(const Pair& pair, int32_t port, int32_t partner, const std::vector<int64_t>& port_ns) const {
    const auto mine = static_cast<size_t>(pair.ready.front());
    // The other one must have clearly more work left than the partner, by two hops, else ports with about the
    // same work would wait for each other in turns.
    const int64_t enough = ports_[static_cast<size_t>(partner)].work_left + 2 * port_ns[mine];
    size_t looked_at = 0;
    for (const auto& [q, other] : ports_[static_cast<size_t>(port)].waiting) {
      if (++looked_at > kMostCandidates) break;
      const Port& wanted = ports_[static_cast<size_t>(other)];
      if (other == partner || idle(other) || wanted.work_left <= enough) continue;
      const auto hop = static_cast<size_t>(pairs_[static_cast<size_t>(q)].ready.front());
      if ((free_at_[static_cast<size_t>(other)] - now_) * kPatience <= patience_ * port_ns[hop]) return true;
    }
    return false;
  }

  void start_all(Schedule* result) {
    // Phase 1: candidates. Besides pairs that became ready (make_ready), only pairs at a port that just became
    // free can start now and could not before.
    for (const int32_t port : freed_) {
      if (!idle(port)) continue;
      size_t found = 0;
      for (const auto& [p, other] : ports_[static_cast<size_t>(port)].waiting) {
        if (!idle(other)) continue;
        candidates_.push_back(p);
        if (++found == kMostCandidates) break;
      }
    }
    freed_.clear();
    // Phase 2: those that can start, with their keys. Pairs that waited out of patience are looked at again.
    ranked_.clear();
    candidates_.insert(candidates_.end(), held_.begin(), held_.end());
    held_.clear();
    ++look_;
    for (const int32_t p : candidates_) {
      const Pair& pair = pairs_[static_cast<size_t>(p)];
      // If both of its ports became free, a pair is listed twice.
      if (std::exchange(looked_[static_cast<size_t>(p)], look_) == look_) continue;
      if (pair.ready.empty() || !idle(pair.out) || !idle(pair.in)) continue;
      if (patience_ > 0 && should_wait(pair)) {
        held_.push_back(p);
      } else {
        ranked_.push_back(key(p));
      }
    }
    // Phase 3: start the best, then the best of what can still start.
    candidates_.clear();
    if (ranked_.size() > kMostCandidates) {
      start_best_of_many(result);
      return;
    }
    // The keys are those of the beginning of the phase, although each start takes work off two ports. A hop
    // that the start blocks is dropped; its pair becomes a candidate again when the port is free. Few start,
    // since most share the port that became free, so it is cheaper to look for the best each time.
    while (!ranked_.empty()) {
      start(std::get<3>(*std::min_element(ranked_.begin(), ranked_.end())), result);
      const auto blocked = [this](const Key& k) {
        const Pair& pair = pairs_[static_cast<size_t>(std::get<3>(k))];
        return !idle(pair.out) || !idle(pair.in);
      };
      ranked_.erase(std::remove_if(ranked_.begin(), ranked_.end(), blocked), ranked_.end());
    }
  }

  // Many ports became free at once. The same order as sorted by key, but only the best are sorted, part by
  // part: each part blocks most of the hops after it.
  void start_best_of_many(Schedule* result) {
    auto begin = ranked_.begin();
    auto end = ranked_.end();
    const auto blocked = [this](const Key& k) {
      const Pair& pair = pairs_[static_cast<size_t>(std::get<3>(k))];
      return !idle(pair.out) || !idle(pair.in);
    };
    while (begin != end) {
      auto part = end;
      const auto left = end - begin;
      if (left > 256) {
        part = begin + left / 8;
        std::nth_element(begin, part, end);
      }
      std::sort(begin, part);
      for (; begin != part; ++begin)
        if (!blocked(*begin)) start(std::get<3>(*begin), result);
      end = std::remove_if(part, end, blocked);
    }
  }

  void start(int32_t p, Schedule* result) {
    Pair& pair = pairs_[static_cast<size_t>(p)];
    const int32_t id = pair.ready.front();
    const auto i = static_cast<size_t>(id);
    std::pop_heap(pair.ready.begin(), pair.ready.end(), [this](int32_t a, int32_t b) { return worse(a, b); });
    pair.ready.pop_back();
    if (pair.ready.empty()) {
      remove(pair.out_slot, pair.out, &Pair::out_slot);
      remove(pair.in_slot, pair.in, &Pair::in_slot);
    }
    // The slower port holds the hop longer; the faster one is free for others meanwhile. Latency delays the
    // arrival and holds neither.
    Port& out = ports_[static_cast<size_t>(pair.out)];
    Port& in = ports_[static_cast<size_t>(pair.in)];
    const int64_t out_free = now_ + out_ns_[i];
    const int64_t in_free = now_ + in_ns_[i];
    free_at_[static_cast<size_t>(pair.out)] = out_free;
    free_at_[static_cast<size_t>(pair.in)] = in_free;
    out.work_left -= out_ns_[i];
    in.work_left -= in_ns_[i];
    const int64_t finish = now_ + std::max(out_ns_[i], in_ns_[i]) + latency_;
    events_.emplace(out_free, 0, pair.out);
    events_.emplace(in_free, 0, pair.in);
    events_.emplace(finish, 1, id);

    start_ns_[i] = now_;
    result->makespan_ns = std::max(result->makespan_ns, finish);
    if (backwards_) return;  // only the start times are of use
    Hop hop = hops_[i];
    place_[i] = static_cast<int32_t>(result->hops.size());
    if (hop.after >= 0) hop.after = place_[static_cast<size_t>(hop.after)];
    result->hops.push_back(hop);
    result->times.push_back({now_, finish});
  }

  const std::vector<Hop>& hops_;
  const std::vector<Chunk>& chunks_;
  const std::vector<int64_t>& order_;
  const std::vector<int64_t>& due_ns_;
  std::vector<Port> ports_;
  std::vector<int64_t> free_at_;  // by port, separate from Port since it is read far more often
  std::vector<Pair> pairs_;
  std::vector<int32_t> looked_;  // by pair: the last time that it was a candidate
  int32_t look_ = 0;
  std::vector<int64_t> out_ns_, in_ns_;  // by hop
  std::vector<int64_t> depth_ns_;        // ns from the start of a hop's route to its own start, at best
  std::vector<int64_t> rest_;            // ns from a hop's arrival to the last arrival that depends on it
  std::vector<int32_t> pair_;
  std::vector<int32_t> child_begin_, children_, open_children_;
  std::vector<int64_t> start_ns_;  // by hop
  std::vector<int32_t> place_;     // index in the result, once started
  std::priority_queue<Event, std::vector<Event>, std::greater<>> events_;
  std::vector<int32_t> freed_, candidates_;
  std::vector<Key> ranked_;
  int64_t now_ = 0;
  int64_t latency_ = 0;
  bool backwards_ = false;
  int64_t patience_ = 0;
  std::vector<int32_t> held_;  // pairs that could have started and wait
};

}  // namespace

Schedule sort_by_start(Schedule made) {
  std::vector<int64_t> starts;
  starts.reserve(made.times.size());
  for (const HopTime& time : made.times) starts.push_back(time.start_ns);
  if (std::is_sorted(starts.begin(), starts.end())) return made;
  const std::vector<int32_t> order = stable_order(starts);
  starts = {};
  std::vector<int32_t> place(order.size());
  for (size_t i = 0; i < order.size(); ++i) place[static_cast<size_t>(order[i])] = static_cast<int32_t>(i);
  Schedule out;
  out.makespan_ns = made.makespan_ns;
  out.hops.reserve(order.size());
  for (const int32_t i : order) {
    Hop hop = made.hops[static_cast<size_t>(i)];
    if (hop.after >= 0) hop.after = place[static_cast<size_t>(hop.after)];
    out.hops.push_back(hop);
  }
  made.hops = {};
  place = {};
  out.times.reserve(order.size());
  for (const int32_t i : order) out.times.push_back(made.times[static_cast<size_t>(i)]);
  return out;
}

Schedule schedule(const Draft& draft, const std::vector<Chunk>& chunks, const Network& network,
                  const std::vector<int32_t>& urgency) {
  Schedule made =
      ListScheduler(draft.hops, chunks, draft.order, draft.due_ns, network, false, urgency, draft.patience)
          .run();
  // A hop for which a port waited in vain may still start earlier, in the same order. The order of hops in a
  // plan is the order in which ranks issue them, so it must follow the times.
  return draft.patience > 0 ? sort_by_start(simulate(made.hops, chunks, network)) : made;
}

Schedule reschedule(const Schedule& before, const std::vector<Chunk>& chunks, const Network& network) {
  // Forward-backward improvement (after Li and Willis, 1992). Phase 1: the reversed problem, in which hops that
  // finished last go first. So hops move towards the end of the plan, and leave room at their old places.
  const std::vector<int64_t> none;
  std::vector<int64_t> order(before.hops.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = -before.times[i].finish_ns;
  ListScheduler back(before.hops, chunks, order, none, network, true);
  back.run();
  // Phase 2: forwards again, in the order of the reversed times. A hop that ends at time t of the reversed
  // run has to start t before the end of the plan, so the largest t goes first.
  for (size_t i = 0; i < order.size(); ++i) {
    // Hops that end together in reversed time start together.
    const Hop& hop = before.hops[i];
    const Network::Link link = network.link(network.index(hop.src), network.index(hop.dst));
    const int64_t nbytes = chunks[static_cast<size_t>(hop.chunk)].nbytes;
    order[i] = -(back.start_ns()[i] + std::max(transfer_ns(nbytes, network.port_rate(link.out)),
                                               transfer_ns(nbytes, network.port_rate(link.in))));
  }
  return ListScheduler(before.hops, chunks, order, none, network, false).run();
}

}  // namespace meshcast
