#pragma once

#include <cstdint>
#include <memory>
#include <random>
#include <vector>

#include "rounds/rank_rounds.h"
#include "rounds/round_table.h"
#include "run/harness.h"
#include "run/random_reductions.h"
#include "support/round_check.h"

namespace meshcast::testing {

// Row-major local tensors of int64, as the harness makes them.
inline TensorForms row_major_forms(const Plan& plan, int32_t rank) {
  TensorForms forms;
  for (const Problem& problem : plan.problems) {
    const auto form = [&](const Layout& layout) {
      const LocalTensor tensor = make_local(shard_of(layout, problem.shape, rank), problem.shape, false);
      return TensorForm{tensor.memory.stride, problem.element_bytes, ElementType::Int64};
    };
    forms.source.push_back(form(problem.src));
    forms.destination.push_back(form(problem.dst));
    forms.wire.push_back(ElementType::Int64);
  }
  return forms;
}

inline std::vector<RankRounds> rounds_of_all(const Plan& plan, int world, const RoundOptions& options) {
  const RoundTable table = make_rounds(plan, options);
  std::vector<int32_t> group(static_cast<size_t>(world));
  std::iota(group.begin(), group.end(), 0);
  std::vector<RankRounds> out;
  for (const int32_t rank : group)
    out.push_back(schedule_rank(plan, table, rank, std::make_shared<const Program>(project(plan, rank, group)),
                                row_major_forms(plan, rank)));
  return out;
}

// Rounds of one hop a link up to rounds of everything at once, with much and with little memory.
inline RoundOptions random_options(std::mt19937& rng) {
  RoundOptions options;
  options.round_ns = static_cast<int64_t>(rng() % 3) * 100 + (rng() % 2);
  options.staging_bytes = rng() % 2 == 0 ? kStagingGoal : 6 * 128;
  return options;
}

inline Plan random_case(std::mt19937& rng, int world) {
  if (rng() % 2 == 0) return random_plan(rng, world);
  return random_reduction(rng, world, kOps[rng() % 5], rng() % 2 == 0 ? pairs_of(world) : pairs_of(1));
}

inline std::vector<RoundStep> exchanges_of(const RankRounds& rounds) {
  std::vector<RoundStep> out;
  for (const RoundStep& step : rounds.steps)
    if (step.kind == StepKind::Exchange) out.push_back(step);
  return out;
}

}  // namespace meshcast::testing
