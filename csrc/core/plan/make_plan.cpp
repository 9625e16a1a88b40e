#include <algorithm>
#include <string>

#ifdef __GLIBC__
#include <malloc.h>
#endif

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

// Hops of islands that are alike, all together: what finer chunks may make of them.
constexpr int64_t kMostIslandHops = int64_t{1} << 20;
constexpr int64_t kFinest = 8;  // as chunks get finer in the search among trees

constexpr size_t kManyHosts = 8;  // that one box goes to: as many chunks have to pass before the last begins

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

// The slowest plan sends every byte to every receiver over the slowest port, one after the other. Where even
// that fits into 62 bits of nanoseconds, no sum of times in the planner can wrap.
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

// `stacks`: of a plan of stacked problems, else empty.
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

// Hops of the gathers, which cut a box into a part for every receiver and pass each part to all of them.
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

// A draft with chunks that keep to the goal for staging, if the size is ours to choose: made once to see how
// much there is, and once more where that is too much.
template <typename Make>
Draft make_fitting(const Make& make, bool fixed_chunk, Inputs* in) {
  Draft draft = make(*in);
  if (fixed_chunk) return draft;
  const int64_t smaller = shrink_chunks(*in, draft.chunks, peak_staging(in->problems, in->tasks, draft));
  if (smaller == 0) return draft;
  in->chunk_bytes = smaller;
  return make(*in);
}

// Whether plain sends are so many, joined or not, that they are offered in rotation before anything is
// scheduled.
bool rotates_first(const Inputs& in) {
  int64_t sends = 0;
  for (const Bundle& bundle : in.bundles) sends += static_cast<int64_t>(in.lead(bundle).receivers.size());
  return sends > kRetryHops;
}

// Whether every box goes to one rank: strategies then differ in who sends it and in the order of their hops.
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

// Offers plain sends in rotation, which take a tenth of the time of a schedule to make. Returns whether they
// meet the bound, which ends the search; else they are not kept, since their turn comes later.
bool rotation_meets_bound(Inputs in, bool fixed_chunk, BestPlan* best) {
  Draft draft = make_fitting(draft_rotation, fixed_chunk, &in);
  if (!best->may_meet_bound(draft, in.network)) return false;
  const BestPlan::State before = best->save();
  best->offer_in_order(Strategy::SendRecv, std::move(draft), in.network);
  if (best->meets_bound(in.network)) return true;
  best->restore(before);
  return false;
}

// Offers plain sends in rotation, where their order alone could keep them from being good. As for the search
// among trees, which may have been tried before: its plan has to be well ahead.
void offer_rotation(Inputs in, bool fixed_chunk, BestPlan* best, Plan* plan) {
  if (best->good() || in.reduces()) return;
  Draft draft = make_fitting(draft_rotation, fixed_chunk, &in);
  if (!best->may_be_good(draft, in.network)) return;
  if (plan->strategy != Strategy::Multicast) {
    best->offer_in_order(Strategy::SendRecv, std::move(draft), in.network);
    return;
  }
  const BestPlan::State before = best->save();
  best->restore({});
  best->offer_in_order(Strategy::SendRecv, std::move(draft), in.network);
  if (!before.empty && is_well_ahead(before.plan.makespan_ns, plan->makespan_ns)) best->restore(before);
}

// The same with copies inside hosts, where many senders have something for all ranks of each.
void offer_rotation_with_copies(Inputs in, bool fixed_chunk, BestPlan* best) {
  if (best->good() || in.reduces()) return;
  Draft draft = make_fitting(draft_rotation_with_copies, fixed_chunk, &in);
  if (best->may_win(draft, in.network)) best->offer_in_order(Strategy::Multicast, std::move(draft), in.network);
}

// Of one bundle.
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

// Offers chunks that are finer than usual where NICs are slow: with many hosts in a row, filling costs more
// than messages do there. Trees alone: one chain through all ranks has as many stops as there are, and each
// costs more than the model knows (docs/benchmarks.md).
void offer_finer(Inputs in, const PortDemand& ports, BestPlan* best, Plan* plan) {
  const int64_t finest = finest_chunk_bytes(in.network);
  if (best->good() || in.reduces() || finest == kSmallestChunk || most_receiving_hosts(in) < kManyHosts) return;
  in.chunk_bytes = std::max(finest, in.chunk_bytes / kFinest);
  if (count_hops(in.chunk_bytes, in.tasks, in.bundles) > kRetryHops) return;
  add_multicast(in, ports, true, false, best, plan);
}

// Offers a rotation for each layer of a batch.
void offer_layers(Inputs in, bool fixed_chunk, BestPlan* best) {
  if (best->good() || in.reduces()) return;
  const Layers layers(in);
  Draft draft = make_fitting([&](const Inputs& now) { return layers.draft(now); }, fixed_chunk, &in);
  if (!draft.hops.empty()) best->offer_in_order(Strategy::Multicast, std::move(draft), in.network);
}

void find_best(Inputs in, const PortDemand& ports, int64_t most, Plan* plan);

// Plans plan->tasks, which are not empty, in at most about `most` hops; 0 for as many as there may be.
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
  find_best(in, ports, most, plan);
}

// Offers a plan of each kind of islands, again and again for those that are alike.
void offer_islands(const Inputs& in, const std::vector<IslandKind>& kinds, BestPlan* best, const Plan& plan) {
  size_t islands = 0;
  for (const IslandKind& kind : kinds) islands += kind.size();
  std::vector<Plan> plans;
  Strategy strategy = plan.strategy;
  int64_t hops = 0;
  int64_t slowest = -1;
  for (const IslandKind& kind : kinds) {
    Plan& one = plans.emplace_back();
    one.problems = plan.problems;
    one.topology = plan.topology;
    one.options = plan.options;
    one.tasks = tasks_of(kind.front(), in.tasks);
    one.ranks = kind.front().ranks;
    std::sort(one.ranks.begin(), one.ranks.end());
    plan_tasks(Network(one.topology, one.ranks), kMostIslandHops / kFinest / static_cast<int64_t>(islands),
               &one);
    hops += static_cast<int64_t>(one.hops.size() * kind.size());
    if (hops > kMostIslandHops) return;
    if (one.makespan_ns > slowest) strategy = one.strategy;
    slowest = std::max(slowest, one.makespan_ns);
  }
  best->offer_in_order(strategy, join_islands(kinds, plans, in.tasks), in.network);
}

// Fills in the best plan of the strategies that are asked for. Each has the chunks that it would have alone.
// most: hops, where this is one of many islands, else 0.
void find_best(Inputs in, const PortDemand& ports, int64_t most, Plan* plan) {
  const PlanOptions& options = plan->options;
  const bool fixed_chunk = options.chunk_bytes > 0;
  const int64_t chunk_bytes = in.chunk_bytes;
  BestPlan best(plan);
  const bool searches = options.strategy == Strategy::Auto || options.strategy == Strategy::Multicast;
  std::vector<IslandKind> islands;
  if (searches && most == 0)
    islands = find_islands(in.tasks, in.bundles, in.problems, plan->topology, in.network);
  if (!islands.empty() && count_hops(chunk_bytes, in.tasks, in.bundles) > kRetryHops) {
    offer_islands(in, islands, &best, *plan);
    if (!best.empty()) return;
  }
  // Where one gather alone would use up all attempts, strategies are tried from the cheapest on. Where each of
  // many boxes goes to one rank, they differ in their order alone. In both cases the first good one will do.
  const bool large = count_gather_hops(in) > kRetryHops;
  const bool to_one = goes_to_one(in);
  const bool alike = to_one && static_cast<int64_t>(in.tasks.size()) > kManyTasks;
  const bool first = rotates_first(in);
  // Where all hops are given, strategies differ in their order alone. Sends that meet the bound then end the
  // search, scheduled or in rotation: the cheaper of these comes first.
  const bool ends_early = to_one && comes_from_one(in) && !first && options.strategy == Strategy::Auto;
  const bool few = count_hops(chunk_bytes, in.tasks, in.bundles) <= kManyTasks;
  if (ends_early && !few && rotation_meets_bound(in, fixed_chunk, &best)) return;
  if (searches && first) offer_layers(in, fixed_chunk, &best);
  for (const Strategy strategy : candidates(options.strategy, large)) {
    if ((large || alike) && best.good()) break;
    in.chunk_bytes = chunk_bytes;
    if (strategy != Strategy::Multicast) {
      // Broadcast alone keeps the order that was asked for; here the cheap ones may be best, too. The search
      // for one takes longest and has gained 0.03 % in one of 2,000 random pairs (docs/decisions.md).
      std::vector<Balance> balances{options.balance};
      if (strategy == Strategy::Broadcast && options.strategy == Strategy::Auto && !large) {
        for (const Balance balance : {Balance::None, Balance::Size, Balance::Greedy})
          if (balance != options.balance) balances.push_back(balance);
      }
      if (strategy == Strategy::SendRecv && first) {
        offer_rotation(in, fixed_chunk, &best, plan);
        if (best.good()) continue;
      }
      for (const Balance balance : balances) {
        in.balance = balance;
        in.chunk_bytes = chunk_bytes;
        Draft draft =
            make_fitting([&](const Inputs& now) { return make_draft(strategy, now); }, fixed_chunk, &in);
        best.offer_once(strategy, std::move(draft), in.network);
      }
      in.balance = options.balance;
      if (ends_early && strategy == Strategy::SendRecv) {
        if (best.meets_bound(in.network)) return;
        in.chunk_bytes = chunk_bytes;
        if (few && rotation_meets_bound(in, fixed_chunk, &best)) return;
      }
    } else if (!best.good()) {
      add_multicast(in, ports, fixed_chunk, large, &best, plan);
    }
  }
  if (searches) {
    in.chunk_bytes = chunk_bytes;
    if (!fixed_chunk) offer_finer(in, ports, &best, plan);
    best.urge(in.network);
    best.improve(in.network);
  }
  // What is good by now stays as it is.
  in.chunk_bytes = chunk_bytes;
  if (options.strategy == Strategy::Auto || options.strategy == Strategy::SendRecv)
    offer_rotation(in, fixed_chunk, &best, plan);
  if (searches && !first) offer_layers(in, fixed_chunk, &best);
  if (searches) offer_rotation_with_copies(in, fixed_chunk, &best);
  if (searches) add_pipelines(in, fixed_chunk, &best, plan);
  if (!islands.empty() && !best.good()) offer_islands(in, islands, &best, *plan);
}

}  // namespace

Plan make_plan(const std::vector<Problem>& problems, const Topology& topology, const PlanOptions& options) {
  validate(topology);
  if (options.chunk_bytes < 0) {
    throw LayoutError("chunk_bytes is " + std::to_string(options.chunk_bytes) + ", it must not be negative");
  }
  Plan plan;
  plan.topology = topology;
  plan.options = options;
  plan.strategy = options.strategy == Strategy::Auto ? Strategy::SendRecv : options.strategy;
  // Phase 1: what has to move, and over which ports.
  // Tensors that are alike are planned as one where they would be too many one by one.
  std::vector<Stack> stacks = stack_alike(problems);
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
  // Phase 2: the bound and the strategies; then fewer and larger messages, where the size is ours to choose.
  plan_tasks(network, 0, &plan);
  if (options.chunk_bytes == 0 && !plan.hops.empty()) join_chunks(&plan, network);
  // Over all that ranks must agree on. Times of hops are not in it, as they follow from what is.
  plan.hash = hash_plan(plan, stacks);
  if (!stacks.empty()) {
#ifdef __GLIBC__
    // The search leaves some 300 MiB of small free blocks behind a million hops, and single tensors take as
    // much.
    malloc_trim(0);
#endif
    unstack(stacks, problems, &plan);
  }
  return plan;
}

}  // namespace meshcast
