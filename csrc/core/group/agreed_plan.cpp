#include "group/agreed_plan.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "common/error.h"

namespace meshcast {
namespace {

std::optional<std::vector<int64_t>> local_shape(const Layout& layout, const std::vector<int64_t>& shape,
                                                int32_t rank) {
  const auto& ranks = layout.mesh.ranks;
  const auto it = std::find(ranks.begin(), ranks.end(), rank);
  if (it == ranks.end()) return std::nullopt;
  return shards(layout, shape)[static_cast<size_t>(it - ranks.begin())].local_shape;
}

ExpectedTensors expected_tensors(const Plan& plan, int32_t rank) {
  ExpectedTensors out;
  for (const Problem& problem : plan.problems) {
    out.source_shapes.push_back(local_shape(problem.src, problem.shape, rank));
    out.destination_shapes.push_back(local_shape(problem.dst, problem.shape, rank));
  }
  out.reductions.assign(plan.problems.size(), ReduceOp::None);
  for (const Task& task : plan.tasks) {
    if (task.reduce != ReduceOp::None) out.reductions[static_cast<size_t>(task.tensor)] = task.reduce;
  }
  return out;
}

}  // namespace

PlanDirection::PlanDirection(std::shared_ptr<const Plan> whole, PlanText words, const GroupIdentity& group)
    : plan(std::move(whole)),
      text(std::make_shared<const PlanText>(std::move(words))),
      tensors(expected_tensors(*plan, group.rank)),
      group_(group) {}

std::shared_ptr<const Program> PlanDirection::program(const std::vector<int32_t>& local) {
  std::call_once(program_once_, [&] {
    program_ = std::make_shared<const Program>(project(*plan, group_.rank, group_.ranks, local));
  });
  return program_;
}

PlannedRounds& PlanDirection::rounds(const RoundOptions& options) {
  std::call_once(rounds_once_,
                 [&] { rounds_ = std::make_unique<PlannedRounds>(plan, group_.rank, group_.ranks, options); });
  return *rounds_;
}

AgreedPlan::AgreedPlan(int32_t lane, std::shared_ptr<PlanDirection> forward,
                       std::shared_ptr<PlanDirection> reverse, int32_t slot, std::weak_ptr<SlotPool> slots)
    : lane_(lane),
      slot_(slot),
      forward_(std::move(forward)),
      reverse_(std::move(reverse)),
      slots_(std::move(slots)) {}

// The first rank frees a slot for all: slots are assigned in turn, so a late rank has finished with one long
// before it is assigned again.
AgreedPlan::~AgreedPlan() {
  if (const auto slots = slots_.lock()) slots->release(slot_);
}

PlanDirection& AgreedPlan::direction(bool reverse) const {
  const auto& found = reverse ? reverse_ : forward_;
  if (!found)
    throw Error(ErrorKind::Generic, fmt::format("{}: was agreed on without a backward", forward_->text->op));
  return *found;
}

RunLabel AgreedPlan::label(bool reverse, int64_t ordinal) const {
  return {slot_, reverse, lane(reverse), ordinal, direction(reverse).text};
}

}  // namespace meshcast
