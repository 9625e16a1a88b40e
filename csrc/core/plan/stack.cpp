#include "plan/stack.h"

#include <algorithm>
#include <array>
#include <map>
#include <string>
#include <utility>

#include "common/error.h"

namespace meshcast {
namespace {

// (task, receiver) pairs from which on equal tensors are planned as one.
constexpr int64_t kMostDeliveriesApart = int64_t{1} << 20;
constexpr int64_t kMostOfAll = int64_t{1}
                               << 21;  // tasks, pieces or local copies of single tensors: 500 MiB each

// Whether a layout can hold `tensors` of its kind as one: their boxes get one more dimension, and so do the
// local tensors.
bool stacks(const Layout& layout) {
  // A dimension of one element may lie along any axis, also behind those of its local tensor.
  const auto has_room = [](const BoxPlace& place) {
    return std::all_of(place.axis.begin(), place.axis.end(), [](int8_t axis) { return axis < kMaxDims - 1; });
  };
  return std::all_of(layout.by_boxes.begin(), layout.by_boxes.end(), [&](const Shard& shard) {
    return shard.local_shape.size() < static_cast<size_t>(kMaxDims) &&
           std::all_of(shard.places.begin(), shard.places.end(), has_room);
  });
}

bool stacks(const Problem& problem) {
  return problem.shape.size() < static_cast<size_t>(kMaxDims) && stacks(problem.src) && stacks(problem.dst);
}

// Values at dimensions, with one more before them.
template <typename T>
std::array<T, kMaxDims> below(const std::array<T, kMaxDims>& values, T first, T more) {
  std::array<T, kMaxDims> out{};
  out[0] = first;
  for (size_t d = 1; d < out.size(); ++d) out[d] = static_cast<T>(values[d - 1] + more);
  return out;
}

Shard below_a_dimension(const Shard& shard, int64_t tensors) {
  Shard out = shard;
  out.local_shape.insert(out.local_shape.begin(), tensors);
  for (ShardPiece& piece : out.pieces) {
    Box box;
    box.ndim = piece.box.ndim + 1;
    box.lo[0] = 0;
    box.hi[0] = tensors;
    for (int d = 0; d < piece.box.ndim; ++d) {
      box.lo[d + 1] = piece.box.lo[d];
      box.hi[d + 1] = piece.box.hi[d];
    }
    piece = {box, below<int64_t>(piece.local, 0, 0)};
  }
  for (BoxPlace& place : out.places)
    place = {below<int8_t>(place.axis, 0, 1), below<int64_t>(place.step, 1, 0)};
  return out;
}

Layout below_a_dimension(Layout layout, int64_t tensors) {
  for (Placement& p : layout.placements)
    if (p.kind == PlacementKind::Shard || p.kind == PlacementKind::StridedShard) ++p.dim;
  for (Shard& shard : layout.by_boxes) shard = below_a_dimension(shard, tensors);
  return layout;
}

Problem stacked(const Problem& one, size_t tensors) {
  Problem out{{static_cast<int64_t>(tensors)},
              one.element_bytes,
              below_a_dimension(one.src, static_cast<int64_t>(tensors)),
              below_a_dimension(one.dst, static_cast<int64_t>(tensors)),
              true};
  out.shape.insert(out.shape.end(), one.shape.begin(), one.shape.end());
  return out;
}

// The number of tensors that a box of a planned problem represents.
int64_t copies(const Problem& problem, const Box& box) { return problem.stacked ? box.extent(0) : 1; }

Box without_first_dimension(const Box& box) {
  Box out;
  out.ndim = box.ndim - 1;
  for (int d = 0; d < out.ndim; ++d) {
    out.lo[d] = box.lo[d + 1];
    out.hi[d] = box.hi[d + 1];
  }
  return out;
}

void check_total(int64_t total, const char* what) {
  if (total <= kMostOfAll) return;
  throw LayoutError("the plan has " + std::to_string(total) + " " + what + " of single tensors, at most " +
                    std::to_string(kMostOfAll) + " are planned at once: move the tensors in several batches");
}

// The rows (tasks, local copies, pieces) of single tensors.
template <typename Row>
std::vector<Row> unstacked(const std::vector<Stack>& stacks, const std::vector<Row>& rows, const char* what) {
  int64_t total = 0;
  for (const Row& row : rows) total += copies(stacks[static_cast<size_t>(row.tensor)].problem, row.box);
  check_total(total, what);
  std::vector<Row> out;
  out.reserve(static_cast<size_t>(total));
  for (const Row& row : rows) {
    const Stack& stack = stacks[static_cast<size_t>(row.tensor)];
    if (!stack.problem.stacked) {
      out.push_back(row);
      out.back().tensor = stack.tensors.front();
      continue;
    }
    for (int64_t copy = row.box.lo[0]; copy < row.box.hi[0]; ++copy) {
      out.push_back(row);
      out.back().tensor = stack.tensors[static_cast<size_t>(copy)];
      out.back().box = without_first_dimension(row.box);
    }
  }
  return out;
}

}  // namespace

std::vector<Stack> stack_alike(const std::vector<Problem>& problems) {
  std::vector<Stack> out;
  std::map<std::pair<std::vector<int64_t>, int64_t>, std::vector<size_t>> kinds;  // by shape and element size
  for (size_t i = 0; i < problems.size(); ++i) {
    const Problem& problem = problems[i];
    check_problem(problem);
    std::vector<size_t>& like = kinds[{problem.shape, problem.element_bytes}];
    const auto found =
        std::find_if(like.begin(), like.end(), [&](size_t s) { return out[s].problem == problem; });
    if (found != like.end() && stacks(problem)) {
      out[*found].tensors.push_back(static_cast<int32_t>(i));
      continue;
    }
    like.push_back(out.size());
    out.push_back({{static_cast<int32_t>(i)}, problem});
  }
  for (Stack& stack : out)
    if (stack.tensors.size() > 1) stack.problem = stacked(stack.problem, stack.tensors.size());
  return out;
}

std::vector<Problem> stacked_problems(const std::vector<Stack>& stacks) {
  std::vector<Problem> out;
  out.reserve(stacks.size());
  for (const Stack& stack : stacks) out.push_back(stack.problem);
  return out;
}

bool too_large_apart(const std::vector<Stack>& stacks, const Demand& demand) {
  int64_t tasks = 0, deliveries = 0, entries = 0;
  for (const Task& task : demand.tasks) {
    const int64_t n = copies(stacks[static_cast<size_t>(task.tensor)].problem, task.box);
    const auto receivers = static_cast<int64_t>(task.receivers.size());
    tasks += n;
    deliveries += n * receivers;
    entries += n * (receivers + static_cast<int64_t>(task.holders.size()));
  }
  check_total(tasks, "tasks");
  return tasks > kMaxTasks || deliveries > kMostDeliveriesApart || entries > kMaxEntries;
}

void unstack(const std::vector<Stack>& stacks, const std::vector<Problem>& problems, Plan* plan) {
  std::vector<int64_t> first(plan->tasks.size());  // the first single task of each task
  int64_t next = 0;
  for (size_t t = 0; t < plan->tasks.size(); ++t) {
    first[t] = next;
    next += copies(stacks[static_cast<size_t>(plan->tasks[t].tensor)].problem, plan->tasks[t].box);
  }
  // Phase 1: pieces, with their tasks, and the chunks.
  std::vector<ChunkPiece> pieces = unstacked(stacks, plan->pieces, "pieces");
  size_t at = 0;
  for (Chunk& chunk : plan->chunks) {
    const auto begin = static_cast<int32_t>(at);
    for (auto p = static_cast<size_t>(chunk.piece_begin); p < static_cast<size_t>(chunk.piece_end); ++p) {
      const ChunkPiece& piece = plan->pieces[p];
      const Problem& problem = stacks[static_cast<size_t>(piece.tensor)].problem;
      const int64_t skipped =
          problem.stacked ? piece.box.lo[0] - plan->tasks[static_cast<size_t>(piece.task)].box.lo[0] : 0;
      for (int64_t k = 0; k < copies(problem, piece.box); ++k)
        pieces[at++].task = static_cast<int32_t>(first[static_cast<size_t>(piece.task)] + skipped + k);
    }
    chunk.piece_begin = begin;
    chunk.piece_end = static_cast<int32_t>(at);
  }
  plan->pieces = std::move(pieces);
  // Phase 2: tasks and local copies.
  plan->tasks = unstacked(stacks, plan->tasks, "tasks");
  for (Task& task : plan->tasks)
    task.nbytes = task.box.volume() * problems[static_cast<size_t>(task.tensor)].element_bytes;
  plan->local_copies = unstacked(stacks, plan->local_copies, "local copies");
  plan->problems = problems;
}

}  // namespace meshcast
