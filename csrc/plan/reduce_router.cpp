#include "plan/reduce_router.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "plan/value_cover.h"

namespace meshcast {
namespace {

constexpr size_t kMostSizes = 64;          // of chunks whose times are kept
constexpr int64_t kUnits = 4096;           // of the busiest lane
constexpr int64_t kMostUnits = 16 * 1024;  // eighth powers of these and sums of many fit into 128 bits
constexpr size_t kMostRoots = 5;           // ends of the chain tried for one chunk
constexpr size_t kManyRanks = 128;         // taking part: there only kFewRoots are tried
constexpr size_t kFewRoots = 1;

}  // namespace

void ReduceRouter::measure(int64_t nbytes) {
  if (hop_ns_of_.size() > kMostSizes) hop_ns_of_.clear();
  std::vector<int64_t>& out = hop_ns_of_[nbytes];
  hop_ns_ = &out;
  if (!out.empty()) return;
  for (int32_t lane = 0; lane < network_.lane_count(); ++lane)
    out.push_back(transfer_ns(nbytes, network_.lane_rate(lane)));
}

__int128 ReduceRouter::weigh(int64_t load_ns) const {
  if (unit_ns_ == 0) {  // microseconds, so that squares of any load fit
    const auto us = static_cast<__int128>(load_ns / 1000);
    return us * us;
  }
  const auto units = static_cast<__int128>(std::min(load_ns / unit_ns_, kMostUnits));
  const __int128 square = units * units;
  return square * square * square * square;
}

__int128 ReduceRouter::cost_of(int32_t lane) const {
  const int64_t at = load_[static_cast<size_t>(lane)];
  return weigh(at + hop_ns(lane)) - weigh(at);
}

void ReduceRouter::mind_the_busiest() {
  const int64_t most = load_.empty() ? 0 : *std::max_element(load_.begin(), load_.end());
  unit_ns_ = std::max<int64_t>(1, most / kUnits);
}

// The rank that is entered, or left, over the NIC to which that adds least; not `but` where others are.
int32_t ReduceRouter::cheapest(const std::vector<int32_t>& ranks, int32_t but, bool entry) const {
  int32_t best = but;
  __int128 best_cost = 0;
  for (const int32_t r : ranks) {
    if (r == but) continue;
    const __int128 cost = entry ? entry_cost(r) : exit_cost(r);
    if (best == but || cost < best_cost) {
      best = r;
      best_cost = cost;
    }
  }
  return best;
}

void ReduceRouter::load(const Route& route, int64_t times) {
  for (const Edge& edge : route) {
    const Network::Link link = network_.link(edge.src, edge.dst);
    for (const int32_t lane : {link.out, link.in}) load_[static_cast<size_t>(lane)] += times * hop_ns(lane);
  }
}

ReduceRouter::Stop ReduceRouter::go(Stop from, int32_t to, ReduceOp reduce) {
  route_.push_back({from.rank, to, from.edge, reduce, false});
  const Network::Link link = network_.link(from.rank, to);
  for (const int32_t lane : {link.out, link.in}) {
    cost_ += cost_of(lane);
    load_[static_cast<size_t>(lane)] += hop_ns(lane);
  }
  return {to, static_cast<int32_t>(route_.size()) - 1};
}

// Takes back the edges of the route from the given number on.
void ReduceRouter::undo(size_t edges) {
  while (route_.size() > edges) {
    const Network::Link link = network_.link(route_.back().src, route_.back().dst);
    for (const int32_t lane : {link.out, link.in}) {
      load_[static_cast<size_t>(lane)] -= hop_ns(lane);
    }
    route_.pop_back();
  }
}

// The hosts whose entering and leaving costs least among all that together have every value; none where there
// are too many values to tell.
std::vector<int32_t> ReduceRouter::cheapest_hosts(const std::map<int32_t, Values>& hosts) const {
  ValueCover cover;
  uint64_t all = 0;
  for (const auto& [host, values] : hosts) {
    uint64_t mask = 0;
    __int128 in = -1;
    __int128 leave = -1;
    for (const auto& [value, ranks] : values) {
      if (value >= 64) return {};
      mask |= uint64_t{1} << value;
      for (const int32_t r : ranks) {
        if (in < 0 || entry_cost(r) < in) in = entry_cost(r);
        if (leave < 0 || exit_cost(r) < leave) leave = exit_cost(r);
      }
    }
    cover.add(mask, in + leave, host);
    all |= mask;
  }
  std::vector<int32_t> out;
  cover.solve(all, &out);
  return out;
}

// One rank for each partial value, by greedy covering: hosts that add most values first (every further host is
// a further hop between hosts), or those whose NICs are least loaded, so that replicas take turns, or those
// whose load is least for each value that they add; or by the set of hosts that costs least altogether.
std::vector<int32_t> ReduceRouter::pick_ranks(const std::map<int32_t, Values>& hosts, Cover cover) const {
  const std::vector<int32_t> nobody;
  std::set<int32_t> missing;
  for (const auto& [host, values] : hosts) {
    for (const auto& [value, ranks] : values) missing.insert(value);
  }
  std::vector<int32_t> order;
  if (cover == Cover::Cheapest) order = cheapest_hosts(hosts);
  std::vector<int32_t> out;
  for (size_t turn = 0; !missing.empty(); ++turn) {
    int32_t best = turn < order.size() ? order[turn] : -1;
    std::tuple<__int128, __int128> best_key;
    for (const auto& [host, values] : hosts) {
      if (turn < order.size()) break;
      int64_t adds = 0;
      __int128 in = -1;
      __int128 leave = -1;
      for (const auto& [value, ranks] : values) {
        if (missing.count(value) == 0) continue;
        ++adds;
        for (const int32_t r : ranks) {
          if (in < 0 || entry_cost(r) < in) in = entry_cost(r);
          if (leave < 0 || exit_cost(r) < leave) leave = exit_cost(r);
        }
      }
      if (adds == 0) continue;
      // A host that needs the result is entered anyway.
      const __int128 cost = leave + (receivers_.count(host) == 0 ? in : 0);
      const std::tuple<__int128, __int128> key =
          cover == Cover::FewHosts ? std::tuple<__int128, __int128>{-adds, cost}
          : cover == Cover::LittleLoad
              ? std::tuple<__int128, __int128>{cost, -adds}
              : std::tuple<__int128, __int128>{cost / adds, -adds};  // as weighted set cover does
      if (best < 0 || key < best_key) {
        best = host;
        best_key = key;
      }
    }
    for (const auto& [value, ranks] : hosts.at(best)) {
      if (missing.erase(value) == 0) continue;
      // Where hops are to be few, a rank that needs the result comes first: it can keep it.
      const auto& need = receivers_.count(best) == 0 ? nobody : receivers_.at(best);
      const auto needs = [&](int32_t r) { return std::binary_search(need.begin(), need.end(), r); };
      const auto cost = [&](int32_t r) {
        return entry_cost(r) + exit_cost(r) + cost_of(network_.local_out(r)) + cost_of(network_.local_in(r));
      };
      out.push_back(*std::min_element(ranks.begin(), ranks.end(), [&](int32_t a, int32_t b) {
        if (cover == Cover::FewHosts && needs(a) != needs(b)) return needs(a);
        return cost(a) < cost(b);
      }));
    }
  }
  return out;
}

// A chain through the given ranks that ends at `root`. It begins on the host that is most costly to enter; the
// others follow each other in ring order up to the root's. Each host is entered and left over its least
// loaded NICs.
ReduceRouter::Stop ReduceRouter::reduce_along(const std::vector<int32_t>& values, int32_t root, ReduceOp op) {
  const int32_t home = network_.host(root);
  std::map<int32_t, std::vector<int32_t>> by_host;
  for (const int32_t r : values) by_host[network_.host(r)].push_back(r);
  int32_t first = home;
  __int128 most = -1;
  std::vector<std::pair<int32_t, int32_t>> hosts;  // ring position, host
  for (auto& [host, ranks] : by_host) {
    std::sort(ranks.begin(), ranks.end());
    if (host == home) continue;
    hosts.emplace_back(host > home ? host - home : host - home + network_.host_count(), host);
    const __int128 cost = entry_cost(cheapest(ranks, -1, true));
    if (cost > most) {
      most = cost;
      first = host;
    }
  }
  for (auto& [position, host] : hosts) position = host == first ? -1 : position;
  hosts.emplace_back(INT32_MAX, home);
  std::sort(hosts.begin(), hosts.end());
  Stop at;
  for (const auto& [position, host] : hosts) {
    std::vector<int32_t>& ranks = by_host[host];
    const int32_t last =
        host == home
            ? root
            : cheapest(ranks, ranks.size() > 1 && position >= 0 ? cheapest(ranks, -1, true) : -1, false);
    // On a host alone, ranks follow each other from behind the root: the ring of an all-reduce.
    const int32_t enter = position == INT32_MAX && hosts.size() == 1 ? -1 : cheapest(ranks, last, true);
    std::vector<int32_t> order;
    if (enter >= 0) order.push_back(enter);
    const auto behind = static_cast<size_t>(std::upper_bound(ranks.begin(), ranks.end(), last) - ranks.begin());
    for (size_t i = 0; i < ranks.size(); ++i) {
      const int32_t r = ranks[(behind + i) % ranks.size()];
      if (r != enter && r != last) order.push_back(r);
    }
    // The first takes in nothing: the one that takes in most otherwise.
    if (enter < 0 && !order.empty()) {
      std::rotate(order.begin(),
                  std::max_element(order.begin(), order.end(),
                                   [&](int32_t a, int32_t b) {
                                     return cost_of(network_.local_in(a)) < cost_of(network_.local_in(b));
                                   }),
                  order.end());
    }
    if (last != enter) order.push_back(last);
    for (const int32_t r : order) at = at.rank < 0 ? Stop{r, -1} : go(at, r, op);
  }
  if (at.edge >= 0) route_[static_cast<size_t>(at.edge)].last_reduce = true;
  return at;
}

// Through the receivers of the host of `first`, from there on, as a chain.
ReduceRouter::Stop ReduceRouter::spread_inside(Stop from, int32_t first) {
  const auto it = receivers_.find(network_.host(first));
  if (it == receivers_.end()) return from;
  const std::vector<int32_t>& ranks = it->second;
  const auto begin = static_cast<size_t>(std::lower_bound(ranks.begin(), ranks.end(), first) - ranks.begin());
  std::vector<int32_t> order;
  for (size_t i = 0; i < ranks.size(); ++i) {
    if (ranks[(begin + i) % ranks.size()] != from.rank) order.push_back(ranks[(begin + i) % ranks.size()]);
  }
  if (order.empty()) return from;
  // The last passes nothing on: the one that sends most otherwise.
  const auto most = std::max_element(order.begin(), order.end(), [&](int32_t a, int32_t b) {
    return cost_of(network_.local_out(a)) < cost_of(network_.local_out(b));
  });
  std::rotate(most, most + 1, order.end());
  for (const int32_t next : order) {
    from = go(from, next, ReduceOp::None);
    visited_.push_back(from);
  }
  return from;
}

// A tree through hosts: each is served over the least loaded NIC of all ranks that have the result by then,
// those that can best pass it on come first.
void ReduceRouter::spread_outside(std::vector<Stop> having, const std::vector<int32_t>& hosts) {
  std::vector<int32_t> used;
  std::vector<std::pair<__int128, int32_t>> heap;  // (-cost, -number of the stop)
  std::vector<Stop> senders;
  const auto open = [&](const std::vector<Stop>& stops) {
    for (const Stop& stop : stops) {  // one for each NIC: the first that has the chunk
      const int32_t nic = network_.nic(stop.rank);
      if (nic_edge_[static_cast<size_t>(nic)] != kUnseen) continue;
      nic_edge_[static_cast<size_t>(nic)] = stop.edge;
      used.push_back(nic);
      senders.push_back(stop);
      heap.emplace_back(-exit_cost(stop.rank), -static_cast<int32_t>(senders.size() - 1));
      std::push_heap(heap.begin(), heap.end());
    }
  };
  open(having);
  const int32_t home = network_.host(having.front().rank);
  std::vector<std::tuple<__int128, int32_t, int32_t>> waiting;  // cost to pass on, ring, host
  for (const int32_t host : hosts) {
    waiting.emplace_back(exit_cost(cheapest(receivers_.at(host), -1, false)),
                         host > home ? host - home : host - home + network_.host_count(), host);
  }
  std::sort(waiting.begin(), waiting.end());
  for (const auto& [cost, ring, host] : waiting) {
    while (true) {  // costs only grow: a stale entry sinks to its place
      std::pop_heap(heap.begin(), heap.end());
      const Stop sender = senders[static_cast<size_t>(-heap.back().second)];
      const __int128 now = -exit_cost(sender.rank);
      const bool fresh = now == heap.back().first;
      if (fresh) {
        visited_.clear();
        const Stop at = go(sender, cheapest(receivers_.at(host), -1, true), ReduceOp::None);
        visited_.push_back(at);
        spread_inside(at, at.rank);
        heap.back().first = -exit_cost(sender.rank);
      } else {
        heap.back().first = now;
      }
      std::push_heap(heap.begin(), heap.end());
      if (fresh) break;
    }
    const std::vector<Stop> reached = visited_;
    open(reached);
  }
  for (const int32_t nic : used) nic_edge_[static_cast<size_t>(nic)] = kUnseen;
}

// Reduces at `root` and passes the result to the receivers on its host and on `others`.
void ReduceRouter::serve(const std::vector<int32_t>& values, int32_t root, const std::vector<int32_t>& others,
                         ReduceOp op) {
  const Stop at = reduce_along(values, root, op);
  visited_.assign(1, at);
  spread_inside(at, root);
  std::vector<int32_t> hosts = others;
  hosts.erase(std::remove(hosts.begin(), hosts.end(), network_.host(root)), hosts.end());
  if (hosts.empty()) return;
  std::vector<Stop> from = visited_;
  from.insert(from.end(), having_.begin(), having_.end());
  spread_outside(std::move(from), hosts);
}

// Tries each choice of replicas with many ends of the chain, and keeps the cheapest.
void ReduceRouter::reduce_best(const std::map<int32_t, Values>& hosts, const std::vector<int32_t>& others,
                               ReduceOp op) {
  const size_t begin = route_.size();
  const __int128 cost = cost_;
  std::vector<int32_t> best_values;
  int32_t best_root = -1;
  __int128 best_cost = 0;
  std::vector<std::vector<int32_t>> tried;
  for (const Cover cover : {Cover::FewHosts, Cover::LittleLoad, Cover::BestOfBoth, Cover::Cheapest}) {
    const std::vector<int32_t> values = pick_ranks(hosts, cover);
    if (std::find(tried.begin(), tried.end(), values) != tried.end()) continue;
    tried.push_back(values);
    // Ends on hosts that need the result save a hop, ends elsewhere spare NICs: some of both, others each time.
    std::vector<int32_t> ends[2];
    for (const int32_t r : values) ends[receivers_.count(network_.host(r)) == 0].push_back(r);
    const size_t most = values.size() + others.size() > kManyRanks ? kFewRoots : kMostRoots;
    for (const std::vector<int32_t>& roots : ends) {
      const size_t step = (roots.size() + most - 1) / most;
      turn_ = turn_ * 6364136223846793005U + 1442695040888963407U;
      for (size_t i = step == 0 ? 0 : (turn_ >> 33) % step; i < roots.size(); i += step) {
        serve(values, roots[i], others, op);
        if (best_root < 0 || cost_ < best_cost) {
          best_values = values;
          best_root = roots[i];
          best_cost = cost_;
        }
        undo(begin);
        cost_ = cost;
      }
    }
  }
  serve(best_values, best_root, others, op);
}

const Route& ReduceRouter::route(const Task& task, int64_t nbytes) {
  measure(nbytes);
  route_.clear();
  cost_ = 0;
  receivers_.clear();
  for (const int32_t rank : task.receivers) {
    const int32_t r = network_.index(rank);
    receivers_[network_.host(r)].push_back(r);
  }
  std::map<int32_t, Values> hosts;
  std::set<int32_t> values;
  for (size_t i = 0; i < task.holders.size(); ++i) {
    const int32_t r = network_.index(task.holders[i]);
    hosts[network_.host(r)][task.contribution[i]].push_back(r);
    values.insert(task.contribution[i]);
  }
  having_.clear();
  std::vector<int32_t> others;
  std::map<int32_t, Values> elsewhere = hosts;  // their values are not used up
  for (const auto& [host, ranks] : receivers_) {
    const auto here = hosts.find(host);
    if (here == hosts.end() || here->second.size() < values.size()) {
      others.push_back(host);
      continue;
    }
    reduce_best({*here}, {}, task.reduce);
    having_.insert(having_.end(), visited_.begin(), visited_.end());
    elsewhere.erase(host);
  }
  if (others.empty()) return route_;
  if (having_.empty()) {
    reduce_best(hosts, others, task.reduce);
    return route_;
  }
  // Hosts that reduced for themselves may send the result on, or the others bring it together once more.
  const size_t begin = route_.size();
  const __int128 before = cost_;
  spread_outside(having_, others);
  std::set<int32_t> missing = values;
  for (const auto& [host, here] : elsewhere) {
    for (const auto& [value, ranks] : here) missing.erase(value);
  }
  if (!missing.empty()) return route_;
  const __int128 sent_on = cost_ - before;
  undo(begin);
  cost_ = before;
  reduce_best(elsewhere, others, task.reduce);
  if (cost_ - before < sent_on) return route_;
  undo(begin);
  cost_ = before;
  spread_outside(having_, others);
  return route_;
}

bool ReduceRouter::improve(const Task& task, int64_t nbytes, Route* route) {
  measure(nbytes);
  load(*route, -1);
  // What the old one costs: its edges, put back one by one.
  __int128 old_cost = 0;
  for (const Edge& edge : *route) {
    const Network::Link link = network_.link(edge.src, edge.dst);
    for (const int32_t lane : {link.out, link.in}) {
      old_cost += cost_of(lane);
      load_[static_cast<size_t>(lane)] += hop_ns(lane);
    }
  }
  load(*route, -1);
  this->route(task, nbytes);
  if (cost_ < old_cost) {
    *route = route_;
    return true;
  }
  load(route_, -1);
  load(*route, 1);
  return false;
}

}  // namespace meshcast
