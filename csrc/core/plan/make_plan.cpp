#include <algorithm>
#include <string>

#include "common/error.h"
#include "plan/best_plan.h"
#include "plan/bound/bound.h"
#include "plan/bound/sort_unique.h"
#include "plan/chunk_size.h"
#include "plan/draft.h"
#include "plan/hash.h"
#include "plan/islands.h"
#include "plan/joined_chunks.h"
#include "plan/multicast_search.h"
#include "plan/network.h"
#include "plan/plan.h"
#include "plan/stack.h"
#include "plan/staging.h"
#include "plan/strategies/rotation.h"
#include "plan/strategies/strategies.h"
#include "plan/tasks.h"

namespace meshcast {
namespace {

// The most hops of all islands together, with finer chunks.
constexpr int64_t kMostIslandHops = int64_t{1} << 20;
constexpr int64_t kFinest = 8;  // by which chunks get finer in the search among trees

constexpr size_t kManyHosts = 8;  // of one box: so many chunks pass before the last host begins

constexpr int64_t kManyTasks = 1000;  // from here on trying all strategies takes more than some 10 ms

std::vector<int32_t> all_ranks(const std::vector<Problem>& problems) {
  std::vector<int32_t> out;
  for (const Problem& p : problems) {
    out.insert(out.end(), p.src.mesh.ranks.begin(), p.src.mesh.ranks.end());
    out.insert(out.end(), p.dst.mesh.ranks.begin(), p.dst.mesh.ranks.end());
    if (out.size() > (size_t{1} << 20)) {
      std::sort(out.begin(), out.end());
      out.erase(std::unique(out.begin(), out.end()), out.end());
    }
  }
  std::sort(out.begin(), out.end());
  out.erase(std::unique(out.begin(), out.end()), out.end());
  return out;
}

// The slowest plan sends every byte to every receiver over the slowest port, one after the other. If even that
// fits into 62 bits of nanoseconds, no sum of times in the planner can wrap.
void check_times(const std::vector<Task>& tasks, const Network& network) {
  __int128 bytes = 0;
  int64_t hops = 1;
  for (const Task& task : tasks) {
    const auto n = static_cast<int64_t>(task.receivers.size() + task.holders.size());
    bytes += static_cast<__int128>(task.nbytes) * n;
    hops += n;
  }
  int64_t slowest = INT64_MAX;
  for (int32_t port = 0; port < network.port_count(); ++port)
    slowest = std::min(slowest, network.port_rate(port));
  const __int128 ns =
      bytes * 1000000000 / slowest + static_cast<__int128>(hops + kMaxHops) * (network.latency_ns() + 1);
  if (ns >> 62 != 0 || bytes >> 62 != 0)
    throw LayoutError("the transfer would take more than a century at the rates of the topology");
}

void hash_box(const Box& box, Hasher* hasher) {
  for (int d = 0; d < box.ndim; ++d) {
    hasher->add(box.lo[d]);
    hasher->add(box.hi[d]);
  }
}

void hash_layout(const Layout& layout, Hasher* hasher) {
  hasher->add(layout.mesh.shape);
  hasher->add(layout.mesh.ranks);
  for (const Placement& p : layout.placements) {
    for (const int64_t v : {static_cast<int64_t>(p.kind), static_cast<int64_t>(p.dim), p.split_factor,
                            static_cast<int64_t>(p.op)}) {
      hasher->add(v);
    }
  }
  for (const Shard& shard : layout.by_boxes) {
    hasher->add(shard.local_shape);
    hasher->add(static_cast<int64_t>(shard.pieces.size()));
    for (const ShardPiece& piece : shard.pieces) hash_box(piece.box, hasher);
  }
}

// `stacks`: those of a plan of stacked problems, else empty.
std::string hash_plan(const Plan& plan, const std::vector<Stack>& stacks) {
  Hasher hasher;
  hasher.add(static_cast<int64_t>(plan.problems.size()));
  for (const Problem& p : plan.problems) {
    hasher.add(p.shape);
    hasher.add(p.element_bytes);
    hash_layout(p.src, &hasher);
    hash_layout(p.dst, &hasher);
  }
  for (const Stack& stack : stacks) hasher.add(stack.tensors);
  hasher.add(static_cast<int64_t>(plan.topology.hosts.size()));
  for (const Host& host : plan.topology.hosts) {
    hasher.add(host.ranks);
    for (const Nic& nic : host.nics) {
      hasher.add(nic.out_rate);
      hasher.add(nic.in_rate);
    }
    hasher.add(host.local_rate);
  }
  hasher.add(plan.topology.latency_ns);
  for (const int64_t v :
       {static_cast<int64_t>(plan.options.strategy), static_cast<int64_t>(plan.options.balance),
        plan.options.chunk_bytes, static_cast<int64_t>(plan.options.seed), static_cast<int64_t>(plan.strategy),
        plan.makespan_ns, plan.lower_bound_ns}) {
    hasher.add(v);
  }
  for (const Task& task : plan.tasks) {
    hasher.add(task.tensor);
    hash_box(task.box, &hasher);
    hasher.add(task.holders.list());
    hasher.add(task.receivers.list());
    hasher.add(static_cast<int64_t>(task.reduce));
    hasher.add(task.contribution.list());
  }
  for (const LocalCopy& copy : plan.local_copies) {
    hasher.add(copy.rank);
    hasher.add(copy.tensor);
    hash_box(copy.box, &hasher);
  }
  for (const ChunkPiece& piece : plan.pieces) {
    hasher.add(piece.task);
    hash_box(piece.box, &hasher);
  }
  for (const Chunk& chunk : plan.chunks) {
    hasher.add(chunk.piece_begin);
    hasher.add(chunk.piece_end);
  }
  for (const Hop& hop : plan.hops) {
    hasher.add((static_cast<int64_t>(hop.src) << 32) | hop.dst);
    hasher.add((static_cast<int64_t>(hop.chunk) << 32) | static_cast<uint32_t>(hop.after));
    if (hop.reduce != ReduceOp::None) hasher.add(static_cast<int64_t>(hop.reduce) * 2 + hop.last_reduce);
  }
  return hasher.hex();
}

// The strategies to try, in this order.
std::vector<Strategy> candidates(Strategy asked, bool large) {
  if (asked != Strategy::Auto) return {asked};
  std::vector<std::pair<int, Strategy>> turns;
  const auto add = [&](Strategy strategy, int turn, int turn_if_large) {
    const int mine = large ? turn_if_large : turn;
    if (mine > 0) turns.emplace_back(mine, strategy);
  };
#define MESHCAST_STRATEGY(name, text, draft, ...) add(Strategy::name, __VA_ARGS__);
#define MESHCAST_SEARCH(name, text, ...) add(Strategy::name, __VA_ARGS__);
#include "plan/strategies.def"
  std::sort(turns.begin(), turns.end());
  std::vector<Strategy> out;
  for (const auto& [turn, strategy] : turns) out.push_back(strategy);
  return out;
}

// Hops of the all-gathers, which cut a box into a part for every receiver and pass each part to all of them.
int64_t count_gather_hops(const Inputs& in) {
  int64_t out = 0;
  for (const Bundle& bundle : in.bundles) {
    const auto receivers = static_cast<int64_t>(in.lead(bundle).receivers.size());
    out += receivers * std::max(receivers, bundle.nbytes / in.chunk_bytes + 1);
  }
  return out;
}

Draft make_draft(Strategy strategy, const Inputs& in) {
#define MESHCAST_STRATEGY(name, text, draft, ...) \
  if (strategy == Strategy::name) return draft(in);
#include "plan/strategies.def"
  throw LayoutError(std::string("strategy ") + to_string(strategy) + " has no fixed routes");
}

// Whether there are so many plain sends that they are offered in rotation before anything is scheduled.
bool rotates_first(const Inputs& in) {
  int64_t sends = 0;
  for (const Bundle& bundle : in.bundles) sends += static_cast<int64_t>(in.lead(bundle).receivers.size());
  return sends > kRetryHops;
}

// Whether every box goes to one rank: strategies then differ in the senders and in the order of their hops.
bool goes_to_one(const Inputs& in) {
  return std::all_of(in.bundles.begin(), in.bundles.end(), [&](const Bundle& bundle) {
    const Task& task = in.lead(bundle);
    return task.receivers.size() == 1 && task.reduce == ReduceOp::None;
  });
}

// Whether every box comes from one rank.
bool comes_from_one(const Inputs& in) {
  return std::all_of(in.bundles.begin(), in.bundles.end(),
                     [&](const Bundle& bundle) { return in.lead(bundle).holders.size() == 1; });
}

// The most of any one bundle.
size_t most_receiving_hosts(const Inputs& in) {
  size_t most = 0;
  std::vector<int32_t> hosts;
  for (const Bundle& bundle : in.bundles) {
    const auto& receivers = in.lead(bundle).receivers;
    if (receivers.size() <= most) continue;
    hosts.clear();
    for (const int32_t r : receivers) hosts.push_back(in.network.host(in.network.index(r)));
    sort_unique(&hosts);
    most = std::max(most, hosts.size());
  }
  return most;
}

// A search for the best plan of plan->tasks among the requested strategies: a series of offers. Each has the
// chunk size that it would have alone.
class Search {
 public:
  // most: the most hops if this is one of many islands, else 0.
  Search(const Inputs& in, const PortDemand& ports, int64_t most, Plan* plan)
      : in_(in),
        ports_(ports),
        plan_(plan),
        best_(plan),
        asked_(plan->options.strategy),
        balance_(plan->options.balance),
        fixed_chunk_(plan->options.chunk_bytes > 0),
        chunk_bytes_(in_.chunk_bytes),
        hops_(count_hops(chunk_bytes_, in_.tasks, in_.bundles)),
        large_(count_gather_hops(in_) > kRetryHops),
        to_one_(goes_to_one(in_)),
        rotates_first_(rotates_first(in_)) {
    if (searches() && most == 0)
      islands_ = find_islands(in_.tasks, in_.bundles, in_.problems, plan->topology, in_.network);
  }

  void run();

 private:
  struct Offer {
    bool (Search::*applies)() const;
    bool (Search::*make)();  // returns whether the search ends with it
  };
  static const Offer kOffers[];

  bool always() const { return true; }
  bool searches() const { return asked_ == Strategy::Auto || asked_ == Strategy::Multicast; }
  // A good plan is kept.
  bool wants_more() const { return !best_.good() && !in_.reduces(); }
  bool may_gain() const { return searches() && wants_more(); }

  // If all hops are given, strategies differ in their order only. Sends that meet the bound, scheduled or in
  // rotation, then end the search: the cheaper of these comes first.
  bool ends_with_sends() const {
    return to_one_ && comes_from_one(in_) && !rotates_first_ && asked_ == Strategy::Auto;
  }
  bool is_small() const { return hops_ <= kManyTasks; }
  bool rotates_before_sends() const { return ends_with_sends() && !is_small(); }

  bool has_islands() const { return !islands_.empty() && !best_.good(); }
  bool has_many_islands() const { return has_islands() && hops_ > kRetryHops; }
  bool has_layers_first() const { return may_gain() && rotates_first_; }
  bool has_layers() const { return may_gain() && !rotates_first_; }
  bool asks_for_sends() const { return asked_ == Strategy::SendRecv && wants_more(); }
  bool has_many_hosts() const {
    return may_gain() && !fixed_chunk_ && finest_chunk_bytes(in_.network) != kSmallestChunk &&
           most_receiving_hosts(in_) >= kManyHosts;
  }

  // A draft with chunks that keep to the goal for staging, if the planner chooses their size: made once to find
  // the staging, and again with smaller chunks if that is too much.
  template <typename Make>
  Draft fitting(const Make& make) {
    Draft draft = make(in_);
    if (fixed_chunk_) return draft;
    const int64_t smaller = shrink_chunks(in_, draft.chunks, peak_staging(in_.problems, in_.tasks, draft));
    if (smaller == 0) return draft;
    in_.chunk_bytes = smaller;
    return make(in_);
  }

  bool offer_islands();
  bool offer_rotation_at_bound();
  bool offer_strategies();
  void offer_strategy(Strategy strategy);
  bool offer_rotation();
  bool offer_layers();
  bool offer_finer();
  bool offer_other_orders();
  bool offer_rotation_with_copies();
  bool offer_pipelines();

  Inputs in_;  // chunk_bytes and balance are those of the offer
  const PortDemand& ports_;
  Plan* const plan_;
  BestPlan best_;
  const Strategy asked_;
  const Balance balance_;
  const bool fixed_chunk_;
  const int64_t chunk_bytes_;
  const int64_t hops_;
  // One all-gather alone would use up all attempts, so strategies are tried from the cheapest on.
  const bool large_;
  const bool to_one_;
  const bool rotates_first_;
  std::vector<IslandKind> islands_;
};

// The offers, in this order. docs/benchmarks.md has the purpose of each.
const Search::Offer Search::kOffers[] = {
    {&Search::has_many_islands, &Search::offer_islands},
    {&Search::rotates_before_sends, &Search::offer_rotation_at_bound},
    {&Search::has_layers_first, &Search::offer_layers},
    {&Search::always, &Search::offer_strategies},
    {&Search::has_many_hosts, &Search::offer_finer},
    {&Search::searches, &Search::offer_other_orders},
    {&Search::asks_for_sends, &Search::offer_rotation},
    {&Search::has_layers, &Search::offer_layers},
    {&Search::may_gain, &Search::offer_rotation_with_copies},
    {&Search::may_gain, &Search::offer_pipelines},
    {&Search::has_islands, &Search::offer_islands},
};

void Search::run() {
  for (const Offer& offer : kOffers) {
    in_.chunk_bytes = chunk_bytes_;
    if ((this->*offer.applies)() && (this->*offer.make)()) return;
  }
}

// Plans plan->tasks, which are not empty, in at most about `most` hops; 0: the usual limit.
void plan_tasks(const Network& network, int64_t most, Plan* plan) {
  const PlanOptions& options = plan->options;
  const std::vector<Bundle> bundles = bundle_tasks(plan->tasks, plan->problems);
  const PortDemand ports = find_port_demand(plan->tasks, bundles, network);
  plan->lower_bound_ns = ports.bound_ns;
  if (bundles.empty()) return;
  const int64_t chunk =
      options.chunk_bytes > 0 ? options.chunk_bytes : choose_chunk_bytes(plan->lower_bound_ns, network);
  const int64_t hops = options.chunk_bytes > 0 ? kMaxHops / 4 : most_hops(plan->tasks, bundles);
  ReductionRoutes reductions;
  Inputs in{
      plan->problems,  plan->tasks,
      bundles,         network,
      ports.bound_ns,  fit_chunk_bytes(chunk, plan->tasks, bundles, most > 0 ? std::min(most, hops) : hops),
      options.balance, options.seed,
      ports.ways,      &reductions};
  Search(in, ports, most, plan).run();
}

// A plan of each kind of islands, repeated for all islands of the kind.
bool Search::offer_islands() {
  size_t islands = 0;
  for (const IslandKind& kind : islands_) islands += kind.size();
  std::vector<Plan> plans;
  Strategy strategy = plan_->strategy;
  int64_t hops = 0;
  int64_t slowest = -1;
  for (const IslandKind& kind : islands_) {
    Plan& one = plans.emplace_back();
    one.problems = plan_->problems;
    one.topology = plan_->topology;
    one.options = plan_->options;
    one.tasks = tasks_of(kind.front(), in_.tasks);
    one.ranks = kind.front().ranks;
    std::sort(one.ranks.begin(), one.ranks.end());
    plan_tasks(Network(one.topology, one.ranks), kMostIslandHops / kFinest / static_cast<int64_t>(islands),
               &one);
    hops += static_cast<int64_t>(one.hops.size() * kind.size());
    if (hops > kMostIslandHops) return false;
    if (one.makespan_ns > slowest) strategy = one.strategy;
    slowest = std::max(slowest, one.makespan_ns);
  }
  return best_.offer_in_order(strategy, join_islands(islands_, plans, in_.tasks), in_.network);
}

// Plain sends in rotation, if they meet the bound: they take a tenth of the time of a schedule to make. Else
// they are not kept, since their turn comes later.
bool Search::offer_rotation_at_bound() {
  Draft draft = fitting(draft_rotation);
  if (!best_.may_meet_bound(draft, in_.network)) return false;
  const BestPlan::State before = best_.save();
  best_.offer_in_order(Strategy::SendRecv, std::move(draft), in_.network);
  if (best_.meets_bound(in_.network)) return true;
  best_.restore(before);
  return false;
}

// If each of many boxes goes to one rank, strategies differ in their order only, so the first good one is
// enough. The same holds if they are tried from the cheapest on.
bool Search::offer_strategies() {
  const bool first_good = large_ || (to_one_ && static_cast<int64_t>(in_.tasks.size()) > kManyTasks);
  for (const Strategy strategy : candidates(asked_, large_)) {
    if (first_good && best_.good()) break;
    in_.chunk_bytes = chunk_bytes_;
    if (strategy == Strategy::Multicast) {
      if (!best_.good()) add_multicast(in_, ports_, fixed_chunk_, large_, &best_, plan_);
      continue;
    }
    if (strategy == Strategy::SendRecv && rotates_first_) {
      if (wants_more()) offer_rotation();
      if (best_.good()) continue;
    }
    offer_strategy(strategy);
    if (strategy == Strategy::SendRecv && ends_with_sends()) {
      if (best_.meets_bound(in_.network)) return true;
      in_.chunk_bytes = chunk_bytes_;
      if (is_small() && offer_rotation_at_bound()) return true;
    }
  }
  return false;
}

// A requested Broadcast keeps the requested order; under "auto" the cheap orders are tried, too.
// Balance::Search takes longest and has gained 0.03 % in one of 2,000 random pairs (docs/decisions.md).
void Search::offer_strategy(Strategy strategy) {
  std::vector<Balance> balances{balance_};
  if (strategy == Strategy::Broadcast && asked_ == Strategy::Auto && !large_) {
    for (const Balance balance : {Balance::None, Balance::Size, Balance::Greedy})
      if (balance != balance_) balances.push_back(balance);
  }
  for (const Balance balance : balances) {
    in_.balance = balance;
    in_.chunk_bytes = chunk_bytes_;
    Draft draft = fitting([&](const Inputs& in) { return make_draft(strategy, in); });
    best_.offer_once(strategy, std::move(draft), in_.network);
  }
  in_.balance = balance_;
}

// Plain sends in rotation, if only their order can prevent a good plan. If the best plan is one of the search
// among trees, that has to be well ahead of them.
bool Search::offer_rotation() {
  Draft draft = fitting(draft_rotation);
  if (!best_.may_be_good(draft, in_.network)) return false;
  if (plan_->strategy != Strategy::Multicast) {
    best_.offer_in_order(Strategy::SendRecv, std::move(draft), in_.network);
    return false;
  }
  const BestPlan::State before = best_.save();
  best_.restore({});
  best_.offer_in_order(Strategy::SendRecv, std::move(draft), in_.network);
  if (!before.empty && is_well_ahead(before.plan.makespan_ns, plan_->makespan_ns)) best_.restore(before);
  return false;
}

// A rotation for each layer of a batch.
bool Search::offer_layers() {
  const Layers layers(in_);
  Draft draft = fitting([&](const Inputs& in) { return layers.draft(in); });
  if (!draft.hops.empty()) best_.offer_in_order(Strategy::Multicast, std::move(draft), in_.network);
  return false;
}

// Finer chunks than usual, for slow NICs: with many hosts in a row, filling costs more there than messages.
// Only for trees: a chain through all ranks has too many stops, each of which costs more than in the model
// (docs/benchmarks.md).
bool Search::offer_finer() {
  in_.chunk_bytes = std::max(finest_chunk_bytes(in_.network), in_.chunk_bytes / kFinest);
  if (count_hops(in_.chunk_bytes, in_.tasks, in_.bundles) <= kRetryHops)
    add_multicast(in_, ports_, true, false, &best_, plan_);
  return false;
}

bool Search::offer_other_orders() {
  best_.urge(in_.network);
  best_.improve(in_.network);
  return false;
}

// Sends in rotation with copies inside hosts, for many senders that send to all ranks of each host.
bool Search::offer_rotation_with_copies() {
  Draft draft = fitting(draft_rotation_with_copies);
  if (best_.may_win(draft, in_.network))
    best_.offer_in_order(Strategy::Multicast, std::move(draft), in_.network);
  return false;
}

bool Search::offer_pipelines() {
  add_pipelines(in_, fixed_chunk_, &best_, plan_);
  return false;
}

}  // namespace

StackedPlan make_stacked_plan(const std::vector<Problem>& problems, const Topology& topology,
                              const PlanOptions& options) {
  validate(topology);
  if (options.chunk_bytes < 0) {
    throw LayoutError("chunk_bytes is " + std::to_string(options.chunk_bytes) + ", it must not be negative");
  }
  StackedPlan made;
  auto& [plan, stacks] = made;
  plan.topology = topology;
  plan.options = options;
  plan.strategy = options.strategy == Strategy::Auto ? Strategy::SendRecv : options.strategy;
  // Phase 1: the data to move, and its ports. Tensors of one kind are planned as one if they would be too many
  // one by one.
  stacks = stack_alike(problems);
  Demand demand;
  if (stacks.size() < problems.size()) {
    plan.problems = stacked_problems(stacks);
    demand = intersect_layouts(plan.problems);
    if (!too_large_apart(stacks, demand)) stacks.clear();
  } else {
    stacks.clear();
  }
  if (stacks.empty()) {
    plan.problems = problems;
    demand = intersect_layouts(problems);
  }
  plan.ranks = all_ranks(problems);
  plan.local_copies = std::move(demand.local_copies);
  plan.tasks = std::move(demand.tasks);
  const Network network(topology, plan.ranks);
  check_times(plan.tasks, network);
  // Phase 2: the bound and the strategies; then fewer and larger messages, if the planner chooses their size.
  plan_tasks(network, 0, &plan);
  if (options.chunk_bytes == 0 && !plan.hops.empty()) join_chunks(&plan, network);
  // Over all that ranks must agree on. It omits the times of hops, which follow from the rest.
  plan.hash = hash_plan(plan, stacks);
  return made;
}

Plan make_plan(const std::vector<Problem>& problems, const Topology& topology, const PlanOptions& options) {
  auto [plan, stacks] = make_stacked_plan(problems, topology, options);
  if (!stacks.empty()) unstack(stacks, problems, &plan);
  return std::move(plan);
}

}  // namespace meshcast
