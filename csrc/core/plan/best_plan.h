#pragma once

#include <cstdint>
#include <vector>

#include "plan/draft.h"
#include "plan/network.h"
#include "plan/plan.h"
#include "plan/schedule.h"
#include "plan/strategies/strategies.h"

namespace meshcast {

// Hops that may be scheduled in one search for a better plan (kinds of trees, urgency, forward-backward), over
// all its attempts.
inline constexpr int64_t kRetryHops = 100'000;

// Keeps the plan with the least makespan; the first of equals.
class BestPlan {
 public:
  explicit BestPlan(Plan* plan) : plan_(*plan) {}

  // Returns the makespan of the draft's schedule, or INT64_MAX if the draft is known to lose.
  int64_t offer(Strategy strategy, Draft draft, const Network& network);

  // The same if the makespan of a losing draft is of no use: many of these are not scheduled. Returns whether
  // it is the best plan now. `also_equal`: also takes one that is as long as the best one.
  bool offer_once(Strategy strategy, Draft draft, const Network& network, bool also_equal = false);

  // The same, but every port takes its hops in the order of the draft: nothing is scheduled, which takes a
  // tenth of the time.
  bool offer_in_order(Strategy strategy, Draft draft, const Network& network);

  // Schedules the draft of the best plan repeatedly. Ports that ended late because they had idled become more
  // urgent each time, so that they come first if two ports compete for another.
  void urge(const Network& network);

  // The best plan so far, to return to.
  struct State {
    Plan plan;
    Draft last;
    bool empty = true;
  };
  State save() const;
  void restore(const State& state);

  // Reorders the hops of the best plan while that changes anything.
  void improve(const Network& network);

  bool empty() const { return empty_; }

  // See good_ns.
  bool good() const { return !empty_ && plan_.makespan_ns <= good_ns(plan_.lower_bound_ns); }

  // Whether the plan takes as long as its busiest port, and that as long as the bound, except for the
  // nanosecond by which the time of each hop is rounded up. No other order of its hops is faster, and hardly
  // any other hops.
  bool meets_bound(const Network& network) const;

  // Whether no port has so much to carry that the draft cannot meet the bound in any order.
  bool may_meet_bound(const Draft& draft, const Network& network) const;

  // Whether a plan that takes `least_ns` at least may be good.
  bool may_be_good(int64_t least_ns) const { return least_ns <= good_ns(plan_.lower_bound_ns); }

  // Whether a plan that takes `least_ns` at least may win.
  bool may_win(int64_t least_ns) const { return empty_ || least_ns < plan_.makespan_ns; }

  // Whether no port has so much to carry that the draft is known to lose against the best plan.
  bool may_win(const Draft& draft, const Network& network) const;

  // Whether no port has so much to carry that the draft cannot be good in any order.
  bool may_be_good(const Draft& draft, const Network& network) const;

 private:
  bool take(Strategy strategy, Draft draft, Schedule made, bool also_equal = false);
  void raise_urgency(const Schedule& made, const Network& network, std::vector<int32_t>* urgency) const;

  Plan& plan_;
  Draft last_;  // of the best plan, without pieces and chunks
  bool empty_ = true;
};

}  // namespace meshcast
