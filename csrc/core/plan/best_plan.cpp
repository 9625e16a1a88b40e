#include "plan/best_plan.h"

#include <algorithm>
#include <tuple>

namespace meshcast {
namespace {

constexpr int64_t kImproveRounds = 6;  // of reordering the hops of the best plan
constexpr int64_t kUrgeRounds = 12;

struct PortLoad {
  int64_t ns = 0;
  int64_t hops = 0;
  bool operator<(const PortLoad& other) const { return std::tie(ns, hops) < std::tie(other.ns, other.hops); }
};

// No schedule of hops ends before their busiest port, which is cheaper to find than the schedule.
PortLoad busiest_port(const std::vector<Hop>& hops, const std::vector<Chunk>& chunks, const Network& network) {
  std::vector<PortLoad> busy(static_cast<size_t>(network.port_count()));
  PortLoad out;
  for (const Hop& hop : hops) {
    const Network::Link link = network.link(network.index(hop.src), network.index(hop.dst));
    const int64_t nbytes = chunks[static_cast<size_t>(hop.chunk)].nbytes;
    for (const int32_t port : {link.out, link.in}) {
      PortLoad& load = busy[static_cast<size_t>(port)];
      load.ns += transfer_ns(nbytes, network.port_rate(port));
      ++load.hops;
      out = std::max(out, load);
    }
  }
  return out;
}

int64_t busiest_port_ns(const Draft& draft, const Network& network) {
  return busiest_port(draft.hops, draft.chunks, network).ns;
}

}  // namespace

bool BestPlan::may_win(const Draft& draft, const Network& network) const {
  return empty_ || may_win(busiest_port_ns(draft, network) + network.latency_ns());
}

bool BestPlan::may_be_good(const Draft& draft, const Network& network) const {
  return may_be_good(busiest_port_ns(draft, network) + network.latency_ns());
}

bool BestPlan::may_meet_bound(const Draft& draft, const Network& network) const {
  const PortLoad busiest = busiest_port(draft.hops, draft.chunks, network);
  return busiest.ns + network.latency_ns() <= plan_.lower_bound_ns + busiest.hops;
}

bool BestPlan::meets_bound(const Network& network) const {
  const PortLoad busiest = busiest_port(plan_.hops, plan_.chunks, network);
  const int64_t least = busiest.ns + network.latency_ns();
  return plan_.makespan_ns <= least && least <= plan_.lower_bound_ns + busiest.hops;
}

int64_t BestPlan::offer(Strategy strategy, Draft draft, const Network& network) {
  if (!may_win(draft, network)) return INT64_MAX;
  Schedule made = schedule(draft, draft.chunks, network);
  const int64_t makespan = made.makespan_ns;
  take(strategy, std::move(draft), std::move(made));
  return makespan;
}

bool BestPlan::offer_once(Strategy strategy, Draft draft, const Network& network, bool also_equal) {
  if (!empty_ && !may_win(least_makespan_ns(draft.hops, draft.chunks, network) - also_equal)) return false;
  Schedule made = schedule(draft, draft.chunks, network);
  return take(strategy, std::move(draft), std::move(made), also_equal);
}

bool BestPlan::offer_in_order(Strategy strategy, Draft draft, const Network& network) {
  // The order of hops in a plan is that in which ranks issue them, so it must follow the times. Plans of many
  // hops are not scheduled again (urge), so their draft need not be kept.
  const bool keeps = 2 * static_cast<int64_t>(draft.hops.size()) <= kRetryHops;
  std::vector<Hop> hops = keeps ? draft.hops : std::move(draft.hops);
  if (!keeps) draft.hops.clear();
  Schedule made = sort_by_start(simulate(std::move(hops), draft.chunks, network));
  return take(strategy, std::move(draft), std::move(made));
}

bool BestPlan::take(Strategy strategy, Draft draft, Schedule made, bool also_equal) {
  if (!empty_ && made.makespan_ns >= plan_.makespan_ns + also_equal) return false;
  empty_ = false;
  plan_.strategy = strategy;
  plan_.pieces = std::move(draft.pieces);
  plan_.chunks = std::move(draft.chunks);
  plan_.hops = std::move(made.hops);
  plan_.times = std::move(made.times);
  plan_.makespan_ns = made.makespan_ns;
  last_ = std::move(draft);
  if (2 * static_cast<int64_t>(last_.hops.size()) > kRetryHops) last_ = {};  // too many for urge
  return true;
}

void BestPlan::urge(const Network& network) {
  if (empty_ || last_.hops.empty()) return;
  std::vector<int32_t> urgency(static_cast<size_t>(network.port_count()), kUrgency);
  Schedule now{plan_.hops, plan_.times, plan_.makespan_ns};
  const auto hops = static_cast<int64_t>(last_.hops.size());
  // Urgency multiplies the work that a port has left, as the scheduler sees it (schedule.h). It never falls,
  // and the best of all rounds is kept, so a worse round does no harm.
  if (2 * hops > kRetryHops) return;  // one round alone seldom helps
  for (int64_t round = 1; round <= kUrgeRounds && !good() && round * hops <= kRetryHops; ++round) {
    raise_urgency(now, network, &urgency);
    now = schedule(last_, plan_.chunks, network, urgency);
    if (now.makespan_ns < plan_.makespan_ns) {
      plan_.hops = now.hops;
      plan_.times = now.times;
      plan_.makespan_ns = now.makespan_ns;
    }
  }
}

BestPlan::State BestPlan::save() const {
  State out;
  out.plan.strategy = plan_.strategy;
  out.plan.pieces = plan_.pieces;
  out.plan.chunks = plan_.chunks;
  out.plan.hops = plan_.hops;
  out.plan.times = plan_.times;
  out.plan.makespan_ns = plan_.makespan_ns;
  out.last = last_;
  out.empty = empty_;
  return out;
}

void BestPlan::restore(const State& state) {
  plan_.strategy = state.plan.strategy;
  plan_.pieces = state.plan.pieces;
  plan_.chunks = state.plan.chunks;
  plan_.hops = state.plan.hops;
  plan_.times = state.plan.times;
  plan_.makespan_ns = state.plan.makespan_ns;
  last_ = state.last;
  empty_ = state.empty;
}

void BestPlan::improve(const Network& network) {
  Schedule now{plan_.hops, plan_.times, plan_.makespan_ns};
  const auto hops = static_cast<int64_t>(now.hops.size());
  for (int64_t round = 1; round <= kImproveRounds && !good() && 2 * round * hops <= kRetryHops; ++round) {
    Schedule next = reschedule(now, plan_.chunks, network);
    // The order no longer changes: another round would hardly find anything else.
    if (next.makespan_ns == now.makespan_ns) return;
    if (next.makespan_ns < plan_.makespan_ns) {
      plan_.hops = next.hops;
      plan_.times = next.times;
      plan_.makespan_ns = next.makespan_ns;
    }
    now = std::move(next);
  }
}

void BestPlan::raise_urgency(const Schedule& made, const Network& network,
                             std::vector<int32_t>* urgency) const {
  std::vector<int64_t> busy(urgency->size(), 0), end(urgency->size(), 0);
  for (size_t i = 0; i < made.hops.size(); ++i) {
    const Hop& hop = made.hops[i];
    const Network::Link link = network.link(network.index(hop.src), network.index(hop.dst));
    for (const int32_t port : {link.out, link.in}) {
      const auto l = static_cast<size_t>(port);
      const int64_t ns =
          transfer_ns(plan_.chunks[static_cast<size_t>(hop.chunk)].nbytes, network.port_rate(port));
      busy[l] += ns;
      end[l] = std::max(end[l], made.times[i].start_ns + ns);
    }
  }
  for (size_t l = 0; l < busy.size(); ++l) {
    // Ports with work for at least 4/5 of the bound that still end after it: they idled when they should not
    // have.
    const int64_t late = end[l] - plan_.lower_bound_ns;
    if (late <= 0 || busy[l] < plan_.lower_bound_ns / 10 * 8) continue;
    const int64_t more = 1 + std::min<int64_t>(15, late * 64 / std::max<int64_t>(1, plan_.lower_bound_ns));
    (*urgency)[l] = static_cast<int32_t>(std::min<int64_t>((*urgency)[l] + more, 16 * kUrgency));
  }
}

}  // namespace meshcast
