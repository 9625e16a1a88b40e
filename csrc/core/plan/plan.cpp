#include "plan/plan.h"

#include <algorithm>

#include "common/checked.h"
#include "common/error.h"
#include "plan/best_plan.h"
#include "plan/bound/bound.h"
#include "plan/draft.h"
#include "plan/hash.h"
#include "plan/joined_chunks.h"
#include "plan/network.h"
#include "plan/staging.h"
#include "plan/strategies/detours.h"
#include "plan/strategies/strategies.h"
#include "plan/tasks.h"

namespace meshcast {
namespace {

constexpr int64_t kSmallestChunk = 64 * 1024;
constexpr int64_t kLargestChunk = 4096 * 1024;
constexpr int64_t kMostHops = 300'000;  // of a plan whose chunk size is ours to choose
constexpr size_t kBeam = 3;             // kinds of trees that are tried again with finer chunks
constexpr int64_t kLongChain = 16;      // hosts
// One part in so many of the makespan is what the search among trees has to gain over the paper's strategies:
// measured, docs/planner_results.md.
constexpr int64_t kMulticastGain = 100;

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

// About 1/128 of the bound on the fastest port: small enough that filling a chain costs little.
int64_t choose_chunk_bytes(int64_t bound_ns, const Network& network) {
  int64_t rate = 0;
  for (int32_t n = 0; n < network.nic_count(); ++n)
    rate = std::max(rate, network.port_rate(network.nic_out(n)));
  const auto bytes = static_cast<__int128>(bound_ns) * rate / 1000000000 / 128;
  return static_cast<int64_t>(std::clamp<__int128>(bytes, kSmallestChunk, kLargestChunk));
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
}

void hash_box(const Box& box, Hasher* hasher) {
  for (int d = 0; d < box.ndim; ++d) {
    hasher->add(box.lo[d]);
    hasher->add(box.hi[d]);
  }
}

std::string hash_plan(const Plan& plan) {
  Hasher hasher;
  hasher.add(static_cast<int64_t>(plan.problems.size()));
  for (const Problem& p : plan.problems) {
    hasher.add(p.shape);
    hasher.add(p.element_bytes);
    hash_layout(p.src, &hasher);
    hash_layout(p.dst, &hasher);
  }
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
    hasher.add(task.holders);
    hasher.add(task.receivers);
    hasher.add(static_cast<int64_t>(task.reduce));
    hasher.add(task.contribution);
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

// Hops of all chunks if bundles are cut into chunks of the given size.
int64_t count_hops(int64_t chunk_bytes, const std::vector<Task>& tasks, const std::vector<Bundle>& bundles) {
  int64_t out = 0;
  for (const Bundle& bundle : bundles) {
    const Task& task = tasks[static_cast<size_t>(bundle.tasks.front())];
    out += (bundle.nbytes / chunk_bytes + 1) *
           static_cast<int64_t>(task.receivers.size() + task.contribution.size());
  }
  return out;
}

// The size itself, or the smallest doubling of it that keeps the plan within `most` hops.
int64_t fit_chunk_bytes(int64_t chunk_bytes, const std::vector<Task>& tasks, const std::vector<Bundle>& bundles,
                        int64_t most) {
  while (chunk_bytes < (int64_t{1} << 60) && count_hops(chunk_bytes, tasks, bundles) > most) chunk_bytes *= 2;
  return chunk_bytes;
}

// Several kinds of trees, scheduled by either rule; then those that did best with finer and finer chunks (which
// fill the chains sooner), until the bound is near or the hops get too many to try again.
void try_multicast(Inputs in, const PortDemand& balanced, bool fixed_chunk, BestPlan* best) {
  PortDemand direct = balanced;
  prefer_emitters(in.network, balanced.bound_ns / 10 * 9, &direct.items);
  PortDemand packed = balanced;
  pack_relays(in.network, balanced.bound_ns, &packed.items);
  int64_t most_hosts = 0;
  for (const Parties& parties : balanced.parties) most_hosts = std::max(most_hosts, parties.remote_hosts);
  struct Attempt {
    const PortDemand* ports;
    TreeStyle style;
    int64_t makespan_ns = 0;  // of the last time
  };
  std::vector<Attempt> attempts{
      {&balanced, {1, true, false, false, 0, 1}},  {&packed, {1, true, false, false, 0, 1}},
      {&balanced, {1, false, false, false, 0, 1}}, {&direct, {2, true, false, false, 0, 1}},
      {&direct, {1, false, false, false, 0, 1}},   {&balanced, {2, true, false, false, 0, 1}},
      {&balanced, {3, false, false, false, 0, 1}}, {&packed, {1, false, false, false, 0, 1}}};
  // Kinds of trees make no difference to reductions: their routes, and the rules of scheduling, do.
  const bool reduced = std::all_of(in.bundles.begin(), in.bundles.end(),
                                   [&](const Bundle& b) { return in.lead(b).reduce != ReduceOp::None; });
  if (reduced) {
    attempts.clear();
    for (const bool second : {false, true})
      for (const int32_t patience : {0, kPatience / 4})
        for (const bool steady : {true, false})
          attempts.push_back({&balanced, {1, steady, false, false, patience, 1, second}});
  }
  // Long chains take too long to fill: there, start with shallow trees.
  if (!reduced && most_hosts > kLongChain) std::swap(attempts[0], attempts[3]);
  if (!fixed_chunk && has_slow_ports(balanced, in.network)) {
    attempts.push_back({&balanced, {1, true, false, false, 0, 4}});
    attempts.push_back({&balanced, {1, false, false, false, 0, 4}});
  }
  if (!fixed_chunk && !reduced && has_unlike_nics(balanced, in.network)) {
    attempts.push_back({&balanced, {1, true, false, true, 0, 1}});
    attempts.push_back({&balanced, {1, false, false, true, 0, 1}});
    // Ports that may wait find their places in the common period; without it many senders keep missing one
    // receiver that is busy all the time.
    attempts.push_back({&balanced, {1, true, false, true, kPatience / 4, 1}});
    attempts.push_back({&balanced, {1, false, false, true, kPatience / 4, 1}});
  }
  // Where all chunks take equally long, ports fall into step and meet at the same NIC again and again.
  if (!fixed_chunk && !reduced && in.bundles.size() > 1 &&
      count_hops(in.chunk_bytes, in.tasks, in.bundles) < kRetryHops / 32) {
    attempts.push_back({&balanced, {1, true, true, false, 0, 1}});
    attempts.push_back({&balanced, {1, false, true, false, 0, 1}});
    attempts.push_back({&balanced, {1, true, true, false, 0, 4}});
  }
  // Before all others: those without are seldom better, but may be where few hops leave little to choose.
  PortDemand detoured;
  if (!reduced && find_detours(balanced, in.network, &detoured)) {
    const size_t before = attempts.size();
    for (size_t i = 0; i < before; ++i)
      if (attempts[i].ports == &balanced) attempts.push_back({&detoured, attempts[i].style});
    std::rotate(attempts.begin(), attempts.begin() + static_cast<std::ptrdiff_t>(before), attempts.end());
  }
  const int64_t coarse = in.chunk_bytes;
  int64_t spent = 0;  // hops scheduled so far
  for (const int64_t finer : {1, 2, 4, 8}) {
    in.chunk_bytes = std::max(coarse / finer, std::min(coarse, kSmallestChunk));
    if (finer > 1 && (fixed_chunk || in.chunk_bytes >= coarse)) return;
    const int64_t hops = count_hops(in.chunk_bytes, in.tasks, in.bundles);
    for (Attempt& attempt : attempts) {
      if (spent > 0 && spent + hops > kRetryHops) return;
      Draft draft = draft_multicast(in, *attempt.ports, attempt.style);
      spent += static_cast<int64_t>(draft.hops.size());
      attempt.makespan_ns = best->offer(Strategy::Multicast, std::move(draft), in.network);
      if (best->good()) return;
    }
    // Small plans can afford to try all of them again.
    if (static_cast<int64_t>(attempts.size()) * hops < kRetryHops / 8) continue;
    std::stable_sort(attempts.begin(), attempts.end(),
                     [](const Attempt& a, const Attempt& b) { return a.makespan_ns < b.makespan_ns; });
    attempts.resize(std::min(attempts.size(), kBeam));
  }
}

// The strategies to try. All of the paper's come before the search among trees, which ends early where one of
// them is good. Plans too large to be made many times start with the cheapest and end with the first good one.
std::vector<Strategy> candidates(Strategy asked, bool large) {
  if (asked != Strategy::Auto) return {asked};
  if (large) return {Strategy::SendRecv, Strategy::Multicast, Strategy::Broadcast};
  return {Strategy::SendRecv, Strategy::Broadcast, Strategy::LocalAllGather, Strategy::GlobalAllGather,
          Strategy::Multicast};
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
  switch (strategy) {
    case Strategy::SendRecv: return draft_send_recv(in);
    case Strategy::Broadcast: return draft_broadcast(in);
    case Strategy::LocalAllGather: return draft_local_all_gather(in);
    case Strategy::GlobalAllGather: return draft_global_all_gather(in);
    case Strategy::Multicast:
    case Strategy::Auto: break;
  }
  throw LayoutError(std::string("strategy ") + to_string(strategy) + " has no fixed routes");
}

// Smaller chunks for a strategy by which a rank would need more staging than it should; 0 where these would not
// mend it.
int64_t shrink_chunks(const Inputs& in, const std::vector<Chunk>& chunks, int64_t staging) {
  if (staging <= kStagingGoal) return 0;
  int64_t largest = 0;
  for (const Chunk& chunk : chunks) largest = std::max(largest, chunk.nbytes);
  largest = std::min(in.chunk_bytes, largest);
  // Staging follows the size of chunks, but for the ranks that trees of other chunks meet: some room for those.
  const auto fitting = static_cast<int64_t>(static_cast<__int128>(largest) * kStagingGoal / staging / 8 * 7);
  const int64_t chunk = fit_chunk_bytes(std::max(fitting, kSmallestChunk), in.tasks, in.bundles, kMostHops);
  return chunk < largest ? chunk : 0;
}

// Tries the search among trees. Where others have been tried before, it has to be well ahead of the best of
// them: its chunks take many ways, which meet at ports in orders that the network does not keep to.
void add_multicast(Inputs in, const PortDemand& ports, bool fixed_chunk, bool large, BestPlan* best,
                   Plan* plan) {
  const BestPlan::State before = best->save();
  try_multicast(in, ports, fixed_chunk, best);
  if (plan->strategy != Strategy::Multicast) return;
  if (!fixed_chunk) {
    const std::vector<int64_t> staging = peak_staging(*plan);
    const int64_t smaller = shrink_chunks(in, plan->chunks, *std::max_element(staging.begin(), staging.end()));
    if (smaller > 0) {
      best->restore(before);
      in.chunk_bytes = smaller;
      try_multicast(in, ports, fixed_chunk, best);
    }
  }
  if (before.empty || large) return;
  const int64_t gained = before.plan.makespan_ns - plan->makespan_ns;
  if (gained < before.plan.makespan_ns / kMulticastGain) best->restore(before);
}

// Fills in the best plan of the strategies that are asked for. Each has the chunks that it would have alone.
void find_best(Inputs in, const PortDemand& ports, Plan* plan) {
  const PlanOptions& options = plan->options;
  const bool fixed_chunk = options.chunk_bytes > 0;
  const int64_t chunk_bytes = in.chunk_bytes;
  BestPlan best(plan);
  const bool large = count_gather_hops(in) > kRetryHops;
  for (const Strategy strategy : candidates(options.strategy, large)) {
    if (large && best.good()) break;
    in.chunk_bytes = chunk_bytes;
    if (strategy != Strategy::Multicast) {
      // Broadcast alone keeps the order that was asked for; here every one may be best.
      std::vector<Balance> balances{options.balance};
      if (strategy == Strategy::Broadcast && options.strategy == Strategy::Auto && !large) {
        for (const Balance balance : {Balance::None, Balance::Size, Balance::Greedy, Balance::Search})
          if (balance != options.balance) balances.push_back(balance);
      }
      for (const Balance balance : balances) {
        in.balance = balance;
        in.chunk_bytes = chunk_bytes;
        Draft draft = make_draft(strategy, in);
        if (!fixed_chunk) {
          const int64_t smaller = shrink_chunks(in, draft.chunks, peak_staging(in.problems, in.tasks, draft));
          if (smaller > 0) {
            in.chunk_bytes = smaller;
            draft = make_draft(strategy, in);
          }
        }
        best.offer(strategy, std::move(draft), in.network);
      }
      in.balance = options.balance;
    } else if (!best.good()) {
      add_multicast(in, ports, fixed_chunk, large, &best, plan);
    }
  }
  if (options.strategy == Strategy::Auto || options.strategy == Strategy::Multicast) {
    best.urge(in.network);
    best.improve(in.network);
  }
}

}  // namespace

Plan make_plan(const std::vector<Problem>& problems, const Topology& topology, const PlanOptions& options) {
  validate(topology);
  if (options.chunk_bytes < 0) {
    throw LayoutError("chunk_bytes is " + std::to_string(options.chunk_bytes) + ", it must not be negative");
  }
  Plan plan;
  plan.problems = problems;
  plan.topology = topology;
  plan.options = options;
  plan.strategy = options.strategy == Strategy::Auto ? Strategy::SendRecv : options.strategy;
  Demand demand = intersect_layouts(problems);
  plan.ranks = all_ranks(problems);
  plan.local_copies = std::move(demand.local_copies);
  plan.tasks = std::move(demand.tasks);
  const Network network(topology, plan.ranks);
  check_times(plan.tasks, network);
  const std::vector<Bundle> bundles = bundle_tasks(plan.tasks, problems);
  const PortDemand ports = find_port_demand(plan.tasks, bundles, network);
  plan.lower_bound_ns = ports.bound_ns;
  if (!bundles.empty()) {
    const int64_t chunk =
        options.chunk_bytes > 0 ? options.chunk_bytes : choose_chunk_bytes(plan.lower_bound_ns, network);
    const int64_t most = options.chunk_bytes > 0 ? kMaxHops / 2 : kMostHops;
    ReductionRoutes reductions;
    Inputs in{problems,        plan.tasks,     bundles,
              network,         ports.bound_ns, fit_chunk_bytes(chunk, plan.tasks, bundles, most),
              options.balance, options.seed,   ports.ways,
              &reductions};
    find_best(in, ports, &plan);
    if (options.chunk_bytes == 0) join_chunks(&plan, network);
  }
  plan.hash = hash_plan(plan);
  return plan;
}

}  // namespace meshcast
