#pragma once

#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "group/agreement.h"
#include "plan/plan.h"
#include "rounds/planned_rounds.h"
#include "run/run_state.h"
#include "run/slot_pool.h"

namespace meshcast {

// What a plan expects of the tensors of one (global) rank, by problem.
struct ExpectedTensors {
  std::vector<std::optional<std::vector<int64_t>>> source_shapes;  // none: not in that mesh
  std::vector<std::optional<std::vector<int64_t>>> destination_shapes;
  std::vector<ReduceOp> reductions;  // None: the source of that problem is not reduced
};

// One direction of an agreed plan, as this rank runs it: each projection is made by the first start that needs
// it. Thread-safe.
class PlanDirection {
 public:
  PlanDirection(std::shared_ptr<const Plan> whole, PlanText text, const GroupIdentity& group);

  const std::shared_ptr<const Plan> plan;
  const std::shared_ptr<const PlanText> text;
  const ExpectedTensors tensors;

  // `local`: the ranks that share this host's memory; must be the same at each call.
  std::shared_ptr<const Program> program(const std::vector<int32_t>& local);
  // `options`: must be the same at each call.
  PlannedRounds& rounds(const RoundOptions& options);

 private:
  const GroupIdentity group_;
  std::once_flag program_once_;
  std::once_flag rounds_once_;
  std::shared_ptr<const Program> program_;
  std::unique_ptr<PlannedRounds> rounds_;
};

// What the ranks of a group have agreed on: a plan, the plan of its backward if it has one, and the slot of its
// messages. The destructor frees the slot. A start needs nothing else except its tensors. Thread-safe.
class AgreedPlan : public std::enable_shared_from_this<AgreedPlan> {
 public:
  // The lane of all backwards; that of a forward is given.
  static constexpr int32_t kReverseLane = 1;

  // `reverse`: null if there is no backward. `slots`: the pool on the rank that assigns slots, null on all
  // others.
  AgreedPlan(int32_t lane, std::shared_ptr<PlanDirection> forward, std::shared_ptr<PlanDirection> reverse,
             int32_t slot, std::weak_ptr<SlotPool> slots);
  ~AgreedPlan();
  AgreedPlan(const AgreedPlan&) = delete;
  AgreedPlan& operator=(const AgreedPlan&) = delete;

  int32_t slot() const { return slot_; }
  int32_t lane(bool reverse) const { return reverse ? kReverseLane : lane_; }

  // The number of its earlier runs. The caller that starts a run counts it, in the same way on all ranks.
  int64_t next_run() { return runs_++; }

  // Throws Error if there is no backward.
  PlanDirection& direction(bool reverse) const;
  RunLabel label(bool reverse, int64_t ordinal) const;

 private:
  const int32_t lane_;
  const int32_t slot_;
  const std::shared_ptr<PlanDirection> forward_;
  const std::shared_ptr<PlanDirection> reverse_;
  const std::weak_ptr<SlotPool> slots_;
  std::atomic<int64_t> runs_{0};
};

}  // namespace meshcast
