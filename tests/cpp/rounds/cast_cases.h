#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <memory>
#include <numeric>
#include <random>
#include <utility>
#include <vector>

#include "common/numbers.h"
#include "memory/combined.h"
#include "memory/element_type.h"
#include "rounds/cases.h"
#include "rounds/fake_device.h"
#include "rounds/world.h"

// Batches of tensors that change their type on the way, each between types of its own, with strides and
// padding, and what must arrive.
namespace meshcast::testing {

inline constexpr ElementType kCastTypes[] = {ElementType::Float32, ElementType::BFloat16, ElementType::Float16,
                                             ElementType::Float8E4m3, ElementType::Float8E5m2};

struct CastTypes {
  ElementType source = ElementType::Int64;
  ElementType wire = ElementType::Int64;
  ElementType destination = ElementType::Int64;

  bool at_source() const { return source != wire; }
  bool at_destination() const { return destination != wire; }
};

inline ReduceOp reduction_of(const Layout& layout) {
  for (const Placement& placement : layout.placements)
    if (placement.kind == PlacementKind::Partial) return placement.op;
  return ReduceOp::None;
}

// As medium.py and gpu.py choose it: the narrower type travels, that of the result where both are as
// wide, and what is reduced travels as it is.
inline CastTypes random_types(std::mt19937& rng, const Problem& problem) {
  const bool reduced = reduction_of(problem.src) != ReduceOp::None;
  for (;;) {
    if (rng() % 6 == 0 && !reduced) return {};  // rides along as it is
    const ElementType source = kCastTypes[rng() % 5];
    const ElementType destination = kCastTypes[rng() % 5];
    if (reduced && !can_reduce(source, ReduceOp::Sum)) continue;
    const bool widens = size_of(destination) > size_of(source);
    const CastTypes types{source, widens || reduced ? source : destination, destination};
    if (returns_through(types.wire, destination)) return types;
  }
}

// What element i of a source is. Reduced ones are few bits wide, so that every order gives the same sum, and
// have more than the narrower types hold where they can.
inline std::vector<std::byte> source_element(int64_t i, int64_t contribution, ReduceOp op, ElementType type) {
  const auto hash = static_cast<uint64_t>(value_of(i, contribution));
  std::vector<std::byte> out(static_cast<size_t>(size_of(type)));
  if (op == ReduceOp::None) {
    std::memcpy(out.data(), &hash, out.size());
    float number = 0;
    if (type != ElementType::Int64)
      cast_element(out.data(), type, reinterpret_cast<std::byte*>(&number), ElementType::Float32);
    if (!is_nan(number)) return out;
  }
  float unit = 1;
  if (type == ElementType::Float32) unit += 0x1p-14F;
  if (type == ElementType::Float16) unit += 0x1p-4F;
  const auto small = static_cast<float>(static_cast<int>(hash % 16) - 5);
  const float number = op == ReduceOp::Product ? (hash % 2 == 0 ? 2.F : -0.5F) : small * unit;
  cast_element(reinterpret_cast<const std::byte*>(&number), ElementType::Float32, out.data(), type);
  return out;
}

// What it becomes: reduced in the source's type, then cast once.
inline std::vector<std::byte> result_element(int64_t i, int64_t contributions, ReduceOp op,
                                             const CastTypes& types) {
  std::vector<std::byte> value = source_element(i, 0, op, types.source);
  for (int64_t c = 1; c < contributions; ++c) {
    std::vector<std::byte> own = source_element(i, c, op, types.source);
    combine({own.data(), 0, size_of(types.source), {}, {}}, value.data(), types.source, op);
  }
  if (op == ReduceOp::Avg) divide(value.data(), size_of(types.source), types.source, contributions);
  std::vector<std::byte> out(static_cast<size_t>(size_of(types.destination)));
  if (types.source == types.destination) return value;
  cast_element(value.data(), types.source, out.data(), types.destination);
  return out;
}

// Where the elements of one local tensor lie behind `begin`: dense rows, or in any order of dimensions with
// gaps.
inline TensorForm random_form(std::mt19937& rng, const Shard& shard, ElementType type) {
  const size_t n = shard.local_shape.size();
  std::vector<size_t> order(n);
  std::iota(order.rbegin(), order.rend(), 0);  // innermost first
  const bool dense = rng() % 2 == 0;
  if (!dense) std::shuffle(order.begin(), order.end(), rng);
  TensorForm form{{}, size_of(type), type};
  int64_t stride = form.element_bytes;
  for (const size_t d : order) {
    if (!dense) stride += static_cast<int64_t>(rng() % 3) * form.element_bytes;
    form.stride[d] = stride;
    stride *= std::max<int64_t>(shard.local_shape[d], 1);
  }
  return form;
}

// Bytes from the first element to behind the last one.
inline int64_t extent_of(const Shard& shard, const TensorForm& form) {
  int64_t out = form.element_bytes;
  for (size_t d = 0; d < shard.local_shape.size(); ++d)
    out += std::max<int64_t>(shard.local_shape[d] - 1, 0) * form.stride[d];
  return out;
}

// Calls visit(byte offset in the local tensor, global index) for every element of a shard.
template <class Visit>
void each_element(const Shard& shard, const std::vector<int64_t>& shape, const TensorForm& form,
                  const Visit& visit) {
  for (size_t p = 0; p < shard.pieces.size(); ++p) {
    const ShardPiece& piece = shard.pieces[p];
    std::vector<int64_t> index(shape.size());
    for (int64_t i = 0; i < piece.box.volume(); ++i) {
      int64_t rest = i;
      for (size_t d = shape.size(); d-- > 0;) {
        index[d] = piece.box.lo[d] + rest % piece.box.extent(static_cast<int>(d));
        rest /= piece.box.extent(static_cast<int>(d));
      }
      visit(local_offset(shard, p, index, form.stride), linear_index(shape, index));
    }
  }
}

// A plan of one to three tensors, and what they are made of.
struct CastBatch {
  Plan plan;
  std::vector<CastTypes> types;
};

inline CastBatch random_cast_batch(std::mt19937& rng, int world) {
  CastBatch out;
  std::vector<Problem> problems;
  PlanOptions options;
  for (size_t count = 1 + rng() % 3; problems.size() < count;) {
    const Plan plan = random_case(rng, world);
    problems.push_back(plan.problems.front());
    out.types.push_back(random_types(rng, problems.back()));
    problems.back().element_bytes = size_of(out.types.back().wire);
    if (problems.size() == 1) options = plan.options;
    out.plan.topology = plan.topology;
  }
  options.chunk_bytes = 16 << (rng() % 3);
  out.plan = make_plan(problems, out.plan.topology, options);
  return out;
}

// The rank's part of a batch: all its tensors of one side lie behind one another in one piece of memory.
inline RankCase cast_case(std::mt19937& rng, const CastBatch& batch, const RoundTable& table, int32_t rank,
                          const std::vector<int32_t>& group) {
  RankCase part;
  TensorForms forms;
  std::vector<std::byte> source, destination;
  part.source_at.clear();
  part.destination_at.clear();
  for (size_t t = 0; t < batch.types.size(); ++t) {
    const Problem& problem = batch.plan.problems[t];
    const CastTypes& types = batch.types[t];
    const ReduceOp op = reduction_of(problem.src);
    forms.wire.push_back(types.wire);

    const Shard from = shard_of(problem.src, problem.shape, rank);
    const TensorForm from_form = forms.source.emplace_back(random_form(rng, from, types.source));
    part.source_at.push_back(source.size());
    source.resize(source.size() + static_cast<size_t>(extent_of(from, from_form)), std::byte{0x77});
    each_element(from, problem.shape, from_form, [&](int64_t offset, int64_t i) {
      const auto value = source_element(i, contribution_of(problem.src, rank), op, types.source);
      std::copy(value.begin(), value.end(),
                source.begin() + static_cast<int64_t>(part.source_at.back()) + offset);
    });

    const Shard to = shard_of(problem.dst, problem.shape, rank);
    const TensorForm to_form = forms.destination.emplace_back(random_form(rng, to, types.destination));
    part.destination_at.push_back(destination.size());
    const size_t end = destination.size() + static_cast<size_t>(extent_of(to, to_form));
    destination.resize(end, std::byte{0x66});
    part.expected.resize(end, std::byte{0x66});
    each_element(to, problem.shape, to_form, [&](int64_t offset, int64_t i) {
      const auto value = result_element(i, contributions_of(problem.src), op, types);
      std::copy(value.begin(), value.end(),
                part.expected.begin() + static_cast<int64_t>(part.destination_at.back()) + offset);
    });
  }
  part.source = std::make_shared<GpuTensor>(std::move(source));
  part.destination = std::make_shared<GpuTensor>(std::move(destination));
  part.rounds = std::make_shared<const RankRounds>(schedule_rank(
      batch.plan, table, rank, std::make_shared<const Program>(project(batch.plan, rank, group)), forms));
  return part;
}

// What the rounds of a batch did, so that a test can tell that all of it has come up.
struct CastCounts {
  int64_t packed = 0;     // messages that are cast at their source, though they are one run there
  int64_t unpacked = 0;   // and those that are cast where they arrive
  int64_t copied = 0;     // local copies that are cast
  int64_t forwarded = 0;  // messages that are packed again from where they were unpacked and cast
  int64_t straight = 0;   // messages that no kernel touches
  int64_t mixed = 0;      // launches in which boxes of different types meet
};

inline void count_casts(const RankRounds& rounds, CastCounts* counts) {
  const Program& program = *rounds.program;
  const auto form = [&](const Part& part) -> const TensorForm& {
    return (part.side == Side::Source ? rounds.forms.source
                                      : rounds.forms.destination)[static_cast<size_t>(part.tensor)];
  };
  const auto casts = [&](const Part& part) {
    return form(part).type != rounds.forms.wire[static_cast<size_t>(part.tensor)];
  };
  for (const RoundMessage& message : rounds.messages) {
    if (message.staging >= 0) continue;
    ++counts->straight;
    REQUIRE_FALSE(casts(program.parts[static_cast<size_t>(message.part)]));
  }
  for (const RoundStep& step : rounds.steps) {
    if (step.kind != StepKind::Kernels) continue;
    int64_t cast = 0;
    int64_t plain = 0;
    for (int32_t k = step.begin; k < step.end; ++k) {
      const KernelOp& op = rounds.kernels[static_cast<size_t>(k)];
      if (op.kind == KernelKind::Copy) {
        const CopyOp& copy = program.copies[static_cast<size_t>(op.copy)];
        const bool is_cast = form(copy.from).type != form(copy.to).type;
        counts->copied += is_cast;
        (is_cast ? cast : plain) += 1;
        continue;
      }
      for (int32_t p = op.parts.begin; p < op.parts.end; ++p) {
        const Part& part = program.parts[static_cast<size_t>(p)];
        (casts(part) ? cast : plain) += 1;
        if (!casts(part) ||
            !part_view(part, program.places, form(part).stride, form(part).element_bytes, nullptr).contiguous())
          continue;
        if (op.kind == KernelKind::Unpack) ++counts->unpacked;
        if (op.kind == KernelKind::Pack) ++(part.side == Side::Source ? counts->packed : counts->forwarded);
      }
    }
    counts->mixed += cast > 0 && plain > 0;
  }
}

}  // namespace meshcast::testing
