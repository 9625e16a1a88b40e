#include "plan/strategies/reduce_router.h"

#include <algorithm>
#include <set>
#include <tuple>

#include "plan/bound/value_cover.h"

namespace meshcast {
namespace {

constexpr size_t kMostSizes = 64;              // chunk sizes whose times are kept
constexpr int64_t kUnits = 4096;               // of the busiest port
constexpr int64_t kMostLoadUnits = 16 * 1024;  // eighth powers of these and sums of many fit into 128 bits
constexpr size_t kMostRoots = 5;               // ends of the chain, of either kind, tried for each set of ranks
constexpr size_t kManyRanks = 128;             // with more participants, only kFewRoots are tried
constexpr size_t kFewRoots = 1;

}  // namespace

// Greedy routing by potential: the cost of a hop is the growth of sum over ports of f(load), f = square at
// first and the eighth power in the end (the higher the power, the closer to the load of the busiest port
// alone). A port becomes dearer with every hop it carries, so routes keep away from it.
//
// Worked example. Ranks 0, 1 and 2 are on hosts A, B and C of one NIC each; 0 and 1 hold the two values, 2
// needs the sum, and a hop holds each of its ports for 10 us. The chain is 1 -> 0 -> 2 or 0 -> 1 -> 2.
//   chunk 1  all ports empty: both cost 4 * 10^2 = 400; the first one tried stays, 1 -> 0 -> 2
//   now      out of A, into A, out of B and into C carry 10 us each
//   chunk 2  a port with 10 us costs 20^2 - 10^2 = 300, an empty one 100.
//            1 -> 0 -> 2 (out of B, into A, out of A, into C) costs 4 * 300 = 1200
//            0 -> 1 -> 2 (out of A, into B, out of B, into C) costs 3 * 300 + 100 = 1000, and is taken
// So the ends of chains take turns, and the ports into A and B share the work.
void ReduceRouter::measure(int64_t nbytes) {
  // Chunks of one plan have few sizes: the times of a size are computed once for all ports.
  if (hop_ns_of_.size() > kMostSizes) hop_ns_of_.clear();
  std::vector<int64_t>& out = hop_ns_of_[nbytes];
  hop_ns_ = &out;
  if (!out.empty()) return;
  for (int32_t port = 0; port < network_.port_count(); ++port)
    out.push_back(transfer_ns(nbytes, network_.port_rate(port)));
}

__int128 ReduceRouter::weigh(int64_t load_ns) const {
  if (unit_ns_ == 0) {  // microseconds, so that squares of any load fit
    const auto us = static_cast<__int128>(load_ns / 1000);
    return us * us;
  }
  // At most 2^14 units: their eighth power is 2^112, and a sum of thousands of those still fits into 127
  // bits.
  const auto units = static_cast<__int128>(std::min(load_ns / unit_ns_, kMostLoadUnits));
  const __int128 square = units * units;
  return square * square * square * square;
}

__int128 ReduceRouter::cost_of(int32_t port) const {
  const int64_t at = load_[static_cast<size_t>(port)];
  return weigh(at + hop_ns(port)) - weigh(at);
}

void ReduceRouter::mind_the_busiest() {
  // The busiest port has about 4,096 units now. Loads may grow fourfold before kMostLoadUnits clips them.
  unit_ns_ = std::max<int64_t>(1, busiest_ns() / kUnits);
  const auto busiest = std::max_element(load_.begin(), load_.end()) - load_.begin();
  inside_limits_ = busiest >= 2 * network_.nic_count();
}

// The rank with the lowest cost of entering, or leaving, over its NIC; not `but` if there are others.
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
    for (const int32_t port : {link.out, link.in}) load_[static_cast<size_t>(port)] += times * hop_ns(port);
  }
}

// The hosts that together have every value at the lowest cost of entering and leaving; none if there are too
// many values for ValueCover.
std::vector<int32_t> ReduceRouter::cheapest_hosts(const std::map<int32_t, Values>& hosts) const {
  // Every host that gives values is entered once and left once, so the set of hosts is a weighted set cover
  // with these two as prices. Exact up to the budget of ValueCover.
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

// One rank for each partial value, by greedy covering: first the hosts that add most values (every further host
// is a further hop between hosts), or those whose NICs are least loaded, so that replicas take turns, or those
// with the least load for each added value; or the set of hosts with the lowest total cost.
std::vector<int32_t> ReduceRouter::pick_ranks(const std::map<int32_t, Values>& hosts, Cover cover) const {
  const std::vector<int32_t> nobody;
  // Phase 1: the values to cover; with Cover::Cheapest also the order, since the set is known beforehand.
  std::set<int32_t> missing;
  for (const auto& [host, values] : hosts) {
    for (const auto& [value, ranks] : values) missing.insert(value);
  }
  std::vector<int32_t> order;
  if (cover == Cover::Cheapest) order = cheapest_hosts(hosts);
  std::vector<int32_t> out;
  // Phase 2: one host after the other, each of which gives all missing values that it has.
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
              : std::tuple<__int128, __int128>{cost / adds, -adds};  // as in weighted set cover
      if (best < 0 || key < best_key) {
        best = host;
        best_key = key;
      }
    }
    for (const auto& [value, ranks] : hosts.at(best)) {
      if (missing.erase(value) == 0) continue;
      // For few hops, a rank that needs the result comes first, since it can keep it.
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

// Tries each choice of replicas with many ends of the chain, and keeps the cheapest.
void ReduceRouter::reduce_best(const std::map<int32_t, Values>& hosts, const std::vector<int32_t>& others,
                               ReduceOp op) {
  const size_t begin = route_.size();
  const __int128 cost = cost_;
  std::vector<int32_t> best_values;
  int32_t best_root = -1;
  size_t best_rounds = 1;
  __int128 best_cost = 0;
  const auto attempt = [&](const std::vector<int32_t>& values, int32_t root, size_t rounds) {
    serve(values, root, rounds, others, op);
    if (best_root < 0 || cost_ < best_cost) {
      best_values = values;
      best_root = root;
      best_rounds = rounds;
      best_cost = cost_;
    }
    undo(begin);
    cost_ = cost;
  };
  // Every attempt is routed in full, measured and undone, since costs depend on the hops before. Equal choices
  // of replicas are tried once.
  std::vector<std::vector<int32_t>> tried;
  for (const Cover cover : {Cover::FewHosts, Cover::LittleLoad, Cover::BestOfBoth, Cover::Cheapest}) {
    const std::vector<int32_t> values = pick_ranks(hosts, cover);
    if (std::find(tried.begin(), tried.end(), values) != tried.end()) continue;
    tried.push_back(values);
    // Ends on hosts that need the result save a hop, ends on other hosts spare NICs: some of both, different
    // ones each time.
    std::vector<int32_t> ends[2];
    for (const int32_t r : values) ends[receivers_.count(network_.host(r)) == 0].push_back(r);
    const size_t most = values.size() + others.size() > kManyRanks ? kFewRoots : kMostRoots;
    for (const std::vector<int32_t>& roots : ends) {
      const size_t step = (roots.size() + most - 1) / most;
      turn_ = turn_ * 6364136223846793005U + 1442695040888963407U;
      for (size_t i = step == 0 ? 0 : (turn_ >> 33) % step; i < roots.size(); i += step) {
        attempt(values, roots[i], 1);
        if (!inside_limits_ || hosts.size() == 1) continue;
        attempt(values, roots[i], 2);
        attempt(values, roots[i], 4);
      }
    }
  }
  serve(best_values, best_root, best_rounds, others, op);
}

// Brings the result to the hosts that cannot make it alone, by rules. Hosts that reduced for themselves may
// send it on, or the others reduce it again.
void ReduceRouter::spread_or_reduce(const std::vector<int32_t>& others, ReduceOp op) {
  if (having_.empty()) {
    reduce_best(hosts_, others, op);
    return;
  }
  // Two options: a host that made the result sends it on (a hop for each of the others), or the others reduce
  // again among themselves (needs all values outside of those hosts, but spares their NICs). The cheaper one is
  // kept.
  std::map<int32_t, Values> elsewhere = hosts_;  // their values are not used up
  for (const Stop& stop : having_) elsewhere.erase(network_.host(stop.rank));
  std::set<int32_t> values;
  for (const auto& [host, here] : elsewhere) {
    for (const auto& [value, ranks] : here) values.insert(value);
  }
  const size_t begin = route_.size();
  const __int128 before = cost_;
  spread_outside(having_, others);
  if (values.size() < values_) return;
  const __int128 sent_on = cost_;
  undo(begin);
  cost_ = before;
  reduce_best(elsewhere, others, op);
  if (cost_ < sent_on) return;
  undo(begin);
  cost_ = before;
  spread_outside(having_, others);
}

// Costs are compared within one call only, and include the loads of all chunks before. Invariant: load_ is the
// sum over all routes returned so far, plus route_ while it is built.
const Route& ReduceRouter::route(const Task& task, int64_t nbytes, const Ways& ways, int32_t only) {
  // Phase 1: the ranks of the chunk by host, those that have values and those that need the result.
  measure(nbytes);
  route_.clear();
  cost_ = 0;
  receivers_.clear();
  for (const int32_t rank : task.receivers) {
    const int32_t r = network_.index(rank);
    receivers_[network_.host(r)].push_back(r);
  }
  hosts_.clear();
  std::set<int32_t> values;
  for (size_t i = 0; i < task.holders.size(); ++i) {
    const int32_t r = network_.index(task.holders[i]);
    hosts_[network_.host(r)][task.contribution[i]].push_back(r);
    values.insert(task.contribution[i]);
  }
  values_ = values.size();
  // Phase 2: hosts that have every value and need the result reduce inside. They are independent of the others,
  // but the first may also serve these, so it waits for phase 3.
  having_.clear();
  std::vector<int32_t> others;
  std::vector<int32_t> makers;  // hosts that need the result and make it alone
  for (const auto& [host, ranks] : receivers_) {
    const auto here = hosts_.find(host);
    (here == hosts_.end() || here->second.size() < values.size() ? others : makers).push_back(host);
  }
  const auto make = [&](int32_t host) {
    reduce_best({*hosts_.find(host)}, {}, task.reduce);
    having_.insert(having_.end(), visited_.begin(), visited_.end());
  };
  for (size_t i = others.empty() ? 0 : 1; i < makers.size(); ++i) make(makers[i]);
  if (others.empty()) return route_;
  const size_t begin = route_.size();
  const __int128 before = cost_;
  Route best;
  __int128 best_cost = -1;
  // Phase 3: the other hosts. Candidates are built one by one after the existing edges, and the cheapest is
  // kept.
  const auto keep = [&] {
    if (best_cost >= 0 && cost_ >= best_cost) return;
    best_cost = cost_;
    best.assign(route_.begin() + static_cast<int64_t>(begin), route_.end());
  };
  // Candidate: the first host that makes the result sends it to all others itself.
  if (!makers.empty()) {  // its result at the best rank for the others, or for itself
    reduce_best({*hosts_.find(makers.front())}, others, task.reduce);
    keep();
    undo(begin);
    cost_ = before;
    make(makers.front());
  }
  // Candidates: the ways of the linear program. Ways with no part in its mixture are skipped unless requested.
  const size_t made = route_.size();
  const __int128 made_cost = cost_;
  bool followed = false;
  for (size_t i = 0; i < ways.size(); ++i) {
    if (only >= 0 ? i != static_cast<size_t>(only) : ways[i].part == 0) continue;
    if (follow(ways[i].way, task.reduce)) {
      followed = true;
      keep();
    }
    undo(made);
    cost_ = made_cost;
  }
  // Candidate: the rules of thumb; also used if the ranks do not allow the requested way.
  if (only < 0 || !followed) {
    spread_or_reduce(others, task.reduce);
    keep();
  }
  // Phase 4: the cheapest becomes part of the route, and of the load that later chunks see.
  undo(begin);
  route_.insert(route_.end(), best.begin(), best.end());
  load(best, 1);
  cost_ = best_cost;
  return route_;
}

bool ReduceRouter::improve(const Task& task, int64_t nbytes, const Ways& ways, Route* route) {
  measure(nbytes);
  load(*route, -1);
  // The cost of the old route: its edges, put back one by one.
  __int128 old_cost = 0;
  for (const Edge& edge : *route) {
    const Network::Link link = network_.link(edge.src, edge.dst);
    for (const int32_t port : {link.out, link.in}) {
      old_cost += cost_of(port);
      load_[static_cast<size_t>(port)] += hop_ns(port);
    }
  }
  load(*route, -1);
  // Only a cheaper route is taken: two routes of the same cost never replace each other in turns.
  this->route(task, nbytes, ways);
  if (cost_ < old_cost) {
    *route = route_;
    return true;
  }
  load(route_, -1);
  load(*route, 1);
  return false;
}

}  // namespace meshcast
