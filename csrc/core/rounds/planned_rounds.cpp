#include "rounds/planned_rounds.h"

#include <algorithm>
#include <utility>

namespace meshcast {
namespace {

constexpr size_t kKeptForms = 8;

}  // namespace

// The program is one without local ranks: NCCL itself finds the links inside a host, and over CUDA IPC all
// ranks are on one host.
PlannedRounds::PlannedRounds(std::shared_ptr<const Plan> plan, int32_t rank, const std::vector<int32_t>& group,
                             const RoundOptions& options)
    : plan_(std::move(plan)),
      rank_(rank),
      program_(std::make_shared<const Program>(project(*plan_, rank, group))),
      table_(make_rounds(*plan_, options)) {}

std::shared_ptr<const RankRounds> PlannedRounds::of(const TensorForms& forms) {
  const std::lock_guard lock(mutex_);
  const auto hit = std::find_if(kept_.begin(), kept_.end(), [&](const auto& r) { return r->forms == forms; });
  if (hit != kept_.end()) {
    kept_.splice(kept_.begin(), kept_, hit);
  } else {
    kept_.push_front(std::make_shared<const RankRounds>(schedule_rank(*plan_, table_, rank_, program_, forms)));
    if (kept_.size() > kKeptForms) kept_.pop_back();
  }
  return kept_.front();
}

}  // namespace meshcast
