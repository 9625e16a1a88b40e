#include "plan/multicast_search.h"

#include <algorithm>

#include "common/checked.h"
#include "plan/chunk_size.h"
#include "plan/staging.h"
#include "plan/strategies/detours.h"
#include "plan/strategies/pipeline.h"
#include "plan/strategies/port_credits.h"
#include "plan/strategies/rounds.h"

namespace meshcast {
namespace {

constexpr size_t kBeam = 3;         // kinds of trees that are tried again with finer chunks
constexpr int64_t kLongChain = 16;  // hosts
// Rounds save filling, but a holder sends the last chunk more than once, which pays off only with many stops.
constexpr size_t kManyStops = 16;
// The search among trees has to gain 1/kMulticastGain of the makespan over the paper's strategies: measured,
// docs/benchmarks.md.
constexpr int64_t kMulticastGain = 100;
constexpr int64_t kMostPipelineHops = int64_t{1} << 20;
constexpr int64_t kChunksPerFill = 64;  // filling a pipeline then takes 1/64 of its time
// Time of two trees, in per cent of the time without filling, as hops of both meet at ports: measured.
constexpr int64_t kTwoTreesCost = 108;

enum class Ports : uint8_t {
  Balanced,
  Direct,  // emitters send instead of relays, up to 9/10 of the bound
  Packed,  // few ports relay
};

// When a kind of trees has an effect.
enum class Where : uint8_t {
  Always,
  WideHosts,   // a host gets more than two copies inside
  SlowPorts,   // a port limits the plan for longer than the port at its other end
  UnlikeNics,  // NICs that carry a share differ in rate
  ManyBoxes,   // several bundles, few hops: with equal chunks, ports fall into step and keep meeting at one NIC
};

struct Kind {
  Ports ports;
  Where where;
  TreeStyle style;
};

// In the order in which they are tried, which matters: the search ends at the first plan near the bound.
// docs/benchmarks.md has the loss without each.
constexpr Kind kKinds[] = {
    {Ports::Balanced, Where::Always, {.fan = 1, .steady = true}},
    {Ports::Packed, Where::Always, {.fan = 1, .steady = true}},
    {Ports::Balanced, Where::Always, {.fan = 1, .steady = false}},
    {Ports::Direct, Where::Always, {.fan = 2, .steady = true}},
    {Ports::Direct, Where::Always, {.fan = 1, .steady = false}},
    {Ports::Balanced, Where::Always, {.fan = 2, .steady = true}},
    {Ports::Balanced, Where::Always, {.fan = 3, .steady = false}},
    {Ports::Packed, Where::Always, {.fan = 1, .steady = false}},
    {Ports::Balanced, Where::WideHosts, {.fan = PortCredits::kStar, .steady = true}},
    {Ports::Balanced, Where::WideHosts, {.fan = PortCredits::kStar, .steady = false}},
    {Ports::Balanced, Where::SlowPorts, {.steady = true, .finer = 4}},
    {Ports::Balanced, Where::SlowPorts, {.steady = false, .finer = 4}},
    {Ports::Balanced, Where::UnlikeNics, {.steady = true, .timed = true}},
    {Ports::Balanced, Where::UnlikeNics, {.steady = false, .timed = true}},
    // Ports that may wait find their places in the common period; without patience many senders repeatedly miss
    // one receiver that is always busy.
    {Ports::Balanced, Where::UnlikeNics, {.steady = true, .timed = true, .patience = kPatience / 4}},
    {Ports::Balanced, Where::UnlikeNics, {.steady = false, .timed = true, .patience = kPatience / 4}},
    {Ports::Balanced, Where::ManyBoxes, {.steady = true, .uneven = true}},
    {Ports::Balanced, Where::ManyBoxes, {.steady = false, .uneven = true}},
    {Ports::Balanced, Where::ManyBoxes, {.steady = true, .uneven = true, .finer = 4}},
};
constexpr size_t kShallow = 3;  // in kKinds

bool applies(Where where, const Inputs& in, const PortDemand& balanced, bool fixed_chunk, bool reduced) {
  switch (where) {
    case Where::Always: return !reduced;
    case Where::WideHosts:
      return !reduced && std::any_of(balanced.items.begin(), balanced.items.end(), [](const PortItem& it) {
        return it.kind == PortItem::Kind::Local && it.copies > 2;
      });
    case Where::SlowPorts: return !fixed_chunk && has_slow_ports(balanced, in.network);
    case Where::UnlikeNics: return !fixed_chunk && !reduced && has_unlike_nics(balanced, in.network);
    case Where::ManyBoxes:
      return !fixed_chunk && !reduced && in.bundles.size() > 1 &&
             count_hops(in.chunk_bytes, in.tasks, in.bundles) < kRetryHops / 32;
  }
  return false;
}

// Several kinds of trees, scheduled by either rule; then the best of these with finer and finer chunks (which
// fill the chains sooner), until the plan is near the bound or there are too many hops to try again.
void try_multicast(Inputs in, const PortDemand& balanced, bool fixed_chunk, BestPlan* best) {
  // Phase 1: the ways to share the ports, and the kinds of trees that have an effect.
  PortDemand direct = balanced;
  prefer_emitters(in.network, balanced.bound_ns / 10 * 9, &direct.items);
  PortDemand packed = balanced;
  pack_relays(in.network, balanced.bound_ns, &packed.items);
  const auto demand_of = [&](Ports ports) {
    return ports == Ports::Direct ? &direct : ports == Ports::Packed ? &packed : &balanced;
  };
  struct Attempt {
    const PortDemand* ports;
    TreeStyle style;
    int64_t makespan_ns = 0;  // of the last time
  };
  std::vector<Attempt> attempts;
  const bool reduced = std::all_of(in.bundles.begin(), in.bundles.end(),
                                   [&](const Bundle& b) { return in.lead(b).reduce != ReduceOp::None; });
  // Kinds of trees have no effect on reductions; their routes, and the rules of scheduling, have.
  if (reduced) {
    for (const bool second : {false, true})
      for (const int32_t patience : {0, kPatience / 4})
        for (const bool steady : {true, false})
          attempts.push_back({&balanced, {.steady = steady, .patience = patience, .second_routes = second}});
  }
  for (const Kind& kind : kKinds) {
    if (applies(kind.where, in, balanced, fixed_chunk, reduced))
      attempts.push_back({demand_of(kind.ports), kind.style});
  }
  // Long chains take too long to fill: there, start with shallow trees.
  const bool long_chains =
      std::any_of(balanced.parties.begin(), balanced.parties.end(),
                  [](const Parties& parties) { return parties.remote_hosts > kLongChain; });
  if (!reduced && long_chains) std::swap(attempts[0], attempts[kShallow]);
  // Detours come before all others: attempts without them are seldom better, but may be with few hops.
  PortDemand detoured;
  if (!reduced && find_detours(balanced, in.network, &detoured)) {
    const size_t before = attempts.size();
    for (size_t i = 0; i < before; ++i)
      if (attempts[i].ports == &balanced) attempts.push_back({&detoured, attempts[i].style});
    std::rotate(attempts.begin(), attempts.begin() + static_cast<std::ptrdiff_t>(before), attempts.end());
  }
  // Phase 2: all kinds at the coarse size, the best few at finer ones. `spent` bounds the work of planning in
  // hops, not in seconds: all ranks must make the same plan.
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

// A pipeline to try.
struct Pipeline {
  PipelineStyle style;
  int64_t chunk_bytes = 0;  // 0: there is none
  int64_t least_ns = 0;     // of its plan
  int32_t number = 0;
};

// The shape that should be faster, by the ratio of the time with filling to the time without, in units of 1 /
// (100 * 1024). Chunks are fine enough for filling to cost little, as far as hops allow, or as `given`.
// `largest`: bytes of a bundle.
Pipeline choose_pipeline(const Inputs& in, bool by_rank, int64_t given, int64_t largest) {
  Pipeline out{{by_rank, false}};
  int64_t least = INT64_MAX;
  for (const bool two_trees : {false, true}) {
    const PipelineCost cost = pipeline_cost(in, {by_rank, two_trees});
    const int64_t chunks =
        given > 0
            ? largest / given
            : std::min({kChunksPerFill * cost.fill, kMostPipelineHops / cost.hops, largest / kSmallestChunk});
    if (chunks < 1) continue;
    const int64_t time = (1024 + 1024 * cost.fill / chunks) * (two_trees ? kTwoTreesCost : 100);
    if (time >= least) continue;
    least = time;
    out.style.two_trees = two_trees;
    out.chunk_bytes = given > 0 ? given : ceil_div(largest, chunks);
  }
  return out;
}

// Pipelines in the fewest possible rounds, in their own order: they take a tenth of the time of a schedule, so
// there may be more hops. `coarse`: bytes of a chunk if given, else 0. `largest`: bytes of a bundle. Returns
// whether they are the best plan now.
bool offer_rounds(Inputs in, bool by_rank, int64_t coarse, int64_t largest, BestPlan* best) {
  const RoundsCost cost = rounds_cost(in, by_rank, coarse > 0 ? ceil_div(largest, coarse) : 0);
  if (cost.chunks == 0 || cost.stops < kManyStops) return false;
  in.chunk_bytes = coarse > 0 ? coarse : ceil_div(largest, cost.chunks);
  Draft draft = draft_rounds(in, cost.style);
  // Boxes are cut along their dimensions, so there may be more chunks than requested, and too many.
  if (draft.hops.empty() && coarse == 0) {
    in.chunk_bytes += in.chunk_bytes / 4;
    draft = draft_rounds(in, cost.style);
  }
  if (draft.hops.empty() || !best->may_win(draft, in.network)) return false;
  if (coarse == 0 && peak_staging(in.problems, in.tasks, draft) > kStagingGoal) return false;
  return best->offer_in_order(Strategy::Multicast, std::move(draft), in.network);
}

}  // namespace

bool is_well_ahead(int64_t multicast_ns, int64_t others_ns) {
  return others_ns - multicast_ns >= others_ns / kMulticastGain;
}

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
  if (!is_well_ahead(plan->makespan_ns, before.plan.makespan_ns)) best->restore(before);
}

void add_pipelines(Inputs in, bool fixed_chunk, BestPlan* best, Plan* plan) {
  if (best->good() || in.reduces()) return;
  if (std::all_of(in.bundles.begin(), in.bundles.end(),
                  [&](const Bundle& bundle) { return in.lead(bundle).receivers.size() == 1; })) {
    return;  // nothing is passed on
  }
  const BestPlan::State before = best->save();
  int64_t largest = 0;  // bundle, bytes
  for (const Bundle& bundle : in.bundles) largest = std::max(largest, bundle.nbytes);
  const int64_t coarse = in.chunk_bytes;
  // Phase 1: pipelines. One that cannot be good waits until rounds are made, which need not be scheduled: few
  // pipelines may still win then. The result is the same as if none had waited.
  std::vector<Pipeline> waiting;
  int32_t winner = 0;  // number of the best plan; the lowest wins among equals
  for (const bool by_rank : {false, true}) {
    Pipeline pipeline = choose_pipeline(in, by_rank, fixed_chunk ? coarse : 0, largest);
    if (pipeline.chunk_bytes == 0) continue;
    in.chunk_bytes = pipeline.chunk_bytes;
    Draft draft = draft_pipeline(in, pipeline.style);
    if (draft.hops.empty()) continue;
    pipeline.least_ns = least_makespan_ns(draft.hops, draft.chunks, in.network);
    pipeline.number = 1 + by_rank;
    if (!best->may_win(pipeline.least_ns)) continue;
    if (!best->may_be_good(pipeline.least_ns)) {
      waiting.push_back(pipeline);
      continue;
    }
    if (!fixed_chunk && peak_staging(in.problems, in.tasks, draft) > kStagingGoal) continue;
    if (best->offer_once(Strategy::Multicast, std::move(draft), in.network)) winner = pipeline.number;
    if (best->good()) break;
  }
  // Phase 2: rounds.
  for (const bool by_rank : {false, true}) {
    if (best->good()) break;
    if (offer_rounds(in, by_rank, fixed_chunk ? coarse : 0, largest, best)) winner = 3 + by_rank;
  }
  // Phase 3: pipelines that may still win.
  for (const Pipeline& pipeline : waiting) {
    const bool also_equal = pipeline.number < winner;
    if (!best->may_win(pipeline.least_ns - also_equal)) continue;
    in.chunk_bytes = pipeline.chunk_bytes;
    Draft draft = draft_pipeline(in, pipeline.style);
    if (!fixed_chunk && peak_staging(in.problems, in.tasks, draft) > kStagingGoal) continue;
    if (best->offer_once(Strategy::Multicast, std::move(draft), in.network, also_equal))
      winner = pipeline.number;
  }
  if (before.empty) return;
  if (!is_well_ahead(plan->makespan_ns, before.plan.makespan_ns)) best->restore(before);
}

}  // namespace meshcast
