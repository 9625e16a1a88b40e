#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <vector>

#include "rounds/rank_rounds.h"
#include "rounds/round_table.h"

namespace meshcast {

// A plan in rounds as one rank enqueues them, for each form that its tensors come in: their strides and element
// types, which a caller rarely changes. Thread-safe.
class PlannedRounds {
 public:
  PlannedRounds(std::shared_ptr<const Plan> plan, int32_t rank, const std::vector<int32_t>& group,
                const RoundOptions& options);

  std::shared_ptr<const RankRounds> of(const TensorForms& forms);

 private:
  const std::shared_ptr<const Plan> plan_;
  const int32_t rank_;
  const std::shared_ptr<const Program> program_;
  const RoundTable table_;

  std::mutex mutex_;
  std::list<std::shared_ptr<const RankRounds>> kept_;  // most recently used first
};

}  // namespace meshcast
