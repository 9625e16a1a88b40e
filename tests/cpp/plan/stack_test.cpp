#include "plan/stack.h"

#include <algorithm>
#include <array>
#include <numeric>
#include <string>
#include <tuple>
#include <utility>

#include "catch.h"
#include "common/error.h"
#include "plan/cases.h"
#include "plan/checker.h"
#include "plan/draft.h"
#include "plan/packing.h"
#include "plan/random_problems.h"
#include "plan/schedule.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

// What a task says, in an order that does not depend on how it was found.
using TaskKey = std::tuple<int32_t, std::vector<int64_t>, int64_t, std::vector<int32_t>, std::vector<int32_t>,
                           std::vector<int32_t>>;

std::vector<TaskKey> sorted(const std::vector<Task>& tasks) {
  std::vector<TaskKey> out;
  for (const Task& task : tasks) {
    std::vector<int64_t> box;
    for (int d = 0; d < task.box.ndim; ++d) box.insert(box.end(), {task.box.lo[d], task.box.hi[d]});
    out.emplace_back(task.tensor, box, task.nbytes, task.holders.list(), task.receivers.list(),
                     task.contribution.list());
  }
  std::sort(out.begin(), out.end());
  return out;
}

// A few random tensors on one network, most of them several times.
std::vector<Problem> random_batch(Random& random) {
  std::vector<Problem> out;
  for (int64_t kinds = random.between(1, 3); kinds > 0; --kinds) {
    const Problem problem = random_case(random, 100, true, random.chance(25)).problem;
    for (int64_t n = random.between(1, 4); n > 0; --n)
      out.insert(out.begin() + random.below(static_cast<int64_t>(out.size()) + 1), problem);
  }
  return out;
}

// Each tensor is cut into rows over 32 ranks and goes to columns over 32 others: 1,024 tasks.
std::vector<Problem> many_tasks(int tensors) {
  const Problem problem{{32, 32}, 2, layout({32}, 0, {shard(0)}), layout({32}, 32, {shard(1)})};
  return std::vector<Problem>(static_cast<size_t>(tensors), problem);
}

// Boxes that cover the tensor and do not overlap; none of an empty one.
std::vector<Box> random_cut(Random& random, const std::vector<int64_t>& shape) {
  Box whole;
  whole.ndim = static_cast<int>(shape.size());
  std::copy(shape.begin(), shape.end(), whole.hi.begin());
  if (whole.empty()) return {};
  std::vector<Box> out{whole};
  for (int64_t cuts = whole.ndim == 0 ? 0 : random.below(6); cuts > 0; --cuts) {
    Box low = out[static_cast<size_t>(random.below(static_cast<int64_t>(out.size())))];
    const auto at = std::find(out.begin(), out.end(), low);
    const auto d = static_cast<int>(random.below(whole.ndim));
    if (low.extent(d) < 2) continue;
    Box high = low;
    low.hi[d] = high.lo[d] = low.lo[d] + random.between(1, low.extent(d) - 1);
    *at = low;
    out.push_back(high);
  }
  return out;
}

// In memory of the same dimensions, one after the other.
Shard in_rows(Random& random, const std::vector<Box>& boxes) {
  Shard out;
  for (const Box& box : boxes) {
    ShardPiece piece{box, {}};
    out.local_shape.resize(static_cast<size_t>(box.ndim), 0);
    for (int d = 0; d < box.ndim; ++d) {
      int64_t& size = out.local_shape[static_cast<size_t>(d)];
      piece.local[d] = d == 0 ? size : random.below(2);
      size = std::max(size, piece.local[d] + box.extent(d)) + random.below(2);
    }
    out.pieces.push_back(piece);
  }
  return out;
}

// In flat memory, one after the other.
Shard flat(const std::vector<Box>& boxes) {
  Shard out;
  int64_t at = 0;
  for (const Box& box : boxes) {
    ShardPiece piece{box, {}};
    piece.local[0] = at;
    BoxPlace place;
    int64_t step = 1;
    for (int d = box.ndim; d-- > 0; step *= box.extent(d)) place.step[d] = step;
    at += box.volume();
    out.pieces.push_back(piece);
    out.places.push_back(place);
  }
  out.local_shape = {at};
  return out;
}

// Each in a slice of its own, as experts in their stack, with the dimensions in another order and gaps between
// elements.
Shard in_slices(Random& random, const std::vector<Box>& boxes) {
  const int ndim = boxes.front().ndim;
  std::vector<int8_t> axes(static_cast<size_t>(ndim));
  std::iota(axes.begin(), axes.end(), static_cast<int8_t>(1));
  for (size_t i = axes.size(); i > 1; --i)
    std::swap(axes[i - 1], axes[static_cast<size_t>(random.below(static_cast<int64_t>(i)))]);
  Shard out;
  out.local_shape.assign(static_cast<size_t>(ndim) + 1, 1);
  out.local_shape[0] = static_cast<int64_t>(boxes.size()) + random.below(2);
  for (size_t i = 0; i < boxes.size(); ++i) {
    ShardPiece piece{boxes[i], {static_cast<int64_t>(i)}};
    BoxPlace place;
    for (int d = 0; d < ndim; ++d) {
      const int8_t axis = place.axis[d] = axes[static_cast<size_t>(d)];
      place.step[d] = random.between(1, 2);
      piece.local[axis] = random.below(2);
      int64_t& size = out.local_shape[static_cast<size_t>(axis)];
      size = std::max(size, piece.local[axis] + (boxes[i].extent(d) - 1) * place.step[d] + 1);
    }
    out.pieces.push_back(piece);
    out.places.push_back(place);
  }
  return out;
}

// Boxes that several ranks hold, cut in several ways, or that none wants: `complete` leaves none out. Some
// ranks have none.
Layout random_boxes(Random& random, const std::vector<int64_t>& shape, bool complete) {
  const int64_t ranks = random.between(1, 6), first = random.below(3);
  Layout out;
  out.mesh.shape = {ranks};
  const int64_t ways = std::min<int64_t>(ranks, random.between(1, 2));
  std::vector<std::vector<Box>> boxes(static_cast<size_t>(ranks));
  for (int64_t way = 0; way < ways; ++way) {  // of ranks way, way + ways, ...
    for (const Box& box : random_cut(random, shape)) {
      const int64_t owner = way + ways * random.below((ranks - way + ways - 1) / ways);
      if (complete || random.chance(80)) boxes[static_cast<size_t>(owner)].push_back(box);
    }
  }
  for (int64_t r = 0; r < ranks; ++r) {
    const std::vector<Box>& own = boxes[static_cast<size_t>(r)];
    const int64_t form = random.below(3);
    Shard shard;
    if (own.empty()) {
      shard.local_shape = {0};
    } else if (form == 0) {
      shard = in_rows(random, own);
    } else if (form == 1) {
      shard = flat(own);
    } else {
      shard = in_slices(random, own);
    }
    shard.rank = static_cast<int32_t>(first + r);
    out.mesh.ranks.push_back(shard.rank);
    out.by_boxes.push_back(std::move(shard));
  }
  return out;
}

// With boxes on one side or both; the other one has placements. 0 to 7 dimensions, now and then an empty
// tensor.
Problem random_box_problem(Random& random) {
  Problem out;
  out.element_bytes = random.one_of<int64_t>({1, 2, 4, 8});
  const int64_t ndim = random.one_of<int64_t>({0, 1, 2, 2, 3, 3, 4, 7});
  for (int64_t d = 0; d < ndim; ++d)
    out.shape.push_back(random.chance(3) ? 0 : random.between(1, ndim == 7 ? 2 : 5));
  const auto placed = [&](bool source) {
    Layout found = layout({random.between(1, 4), 2}, static_cast<int32_t>(random.below(3)), {});
    found.placements = random_placements(random, 2, static_cast<int>(ndim), true);
    if (source && random.chance(25)) found.placements[1] = partial(ReduceOp::Sum);
    return found;
  };
  const int64_t sides = random.below(3);
  out.src = sides == 0 ? placed(true) : random_boxes(random, out.shape, true);
  out.dst = sides == 1 ? placed(false) : random_boxes(random, out.shape, false);
  return out;
}

// The place of an element in the memory of a local tensor, from the definition of a piece and its place.
// `index`: in the whole tensor.
int64_t address(const Shard& shard, size_t piece, const std::vector<int64_t>& index) {
  std::array<int64_t, kMaxDims> local = shard.pieces[piece].local;
  for (size_t d = 0; d < index.size(); ++d) {
    const int64_t from = index[d] - shard.pieces[piece].box.lo[d];
    if (shard.places.empty())
      local[d] += from;
    else
      local[static_cast<size_t>(shard.places[piece].axis[d])] += from * shard.places[piece].step[d];
  }
  int64_t out = 0;
  for (size_t d = 0; d < shard.local_shape.size(); ++d) {
    CHECK((local[d] >= 0 && local[d] < shard.local_shape[d]));
    out = out * shard.local_shape[d] + local[d];
  }
  for (size_t d = shard.local_shape.size(); d < local.size(); ++d) CHECK(local[d] == 0);
  return out;
}

// Whether each element of a stack of shards is where it is in its own one, behind those of the tensors before.
void check_addresses(const Shard& stack, const Shard& single, int64_t tensors) {
  REQUIRE(stack.rank == single.rank);
  REQUIRE(stack.pieces.size() == single.pieces.size());
  REQUIRE(stack.places.size() == single.places.size());
  const int64_t volume = product(single.local_shape);
  REQUIRE(product(stack.local_shape) == tensors * volume);
  for (size_t p = 0; p < single.pieces.size(); ++p) {
    const Box& box = single.pieces[p].box;
    REQUIRE(stack.pieces[p].box.ndim == box.ndim + 1);
    CHECK((stack.pieces[p].box.lo[0] == 0 && stack.pieces[p].box.hi[0] == tensors));
    for (int64_t n = 0; n < box.volume(); ++n) {
      std::vector<int64_t> index(static_cast<size_t>(box.ndim));
      int64_t rest = n;
      for (int d = box.ndim; d-- > 0; rest /= box.extent(d))
        index[static_cast<size_t>(d)] = box.lo[d] + rest % box.extent(d);
      const int64_t own = address(single, p, index);
      index.insert(index.begin(), 0);
      for (index[0] = 0; index[0] < tensors; ++index[0])
        CHECK(address(stack, p, index) == index[0] * volume + own);
    }
  }
}

std::vector<std::tuple<int32_t, int32_t, std::vector<int64_t>>> sorted(const std::vector<LocalCopy>& copies) {
  std::vector<std::tuple<int32_t, int32_t, std::vector<int64_t>>> out;
  for (const LocalCopy& copy : copies) {
    std::vector<int64_t> box(copy.box.lo.begin(), copy.box.lo.end());
    box.insert(box.end(), copy.box.hi.begin(), copy.box.hi.end());
    out.emplace_back(copy.rank, copy.tensor, box);
  }
  std::sort(out.begin(), out.end());
  return out;
}

Topology rails() { return uniform_topology(63, 8, kTenGbit, 8, 8 * kTenGbit, 1000); }

}  // namespace

TEST_CASE("a plan of stacks is one of their tensors", "[plan][stack]") {
  const Topology topology = uniform_topology(63, 4, kTenGbit, 2, 8 * kTenGbit, 1000);
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    Random random(seed);
    const std::vector<Problem> problems = random_batch(random);
    const std::vector<Stack> stacks = stack_alike(problems);
    INFO("seed " << seed);
    size_t tensors = 0;
    for (const Stack& stack : stacks) {
      tensors += stack.tensors.size();
      CHECK(stack.problem.stacked == (stack.tensors.size() > 1));
    }
    CHECK(tensors == problems.size());
    PlanOptions options;
    options.chunk_bytes = random.one_of<int64_t>({0, 16, 64, 500});
    Plan plan = make_plan(stacked_problems(stacks), topology, options);
    const Schedule before{plan.hops, plan.times, plan.makespan_ns};
    unstack(stacks, problems, &plan);
    // Every element of every tensor arrives once, and what the tensors ask for is what they ask for one by one.
    CHECK(check_plan(plan) == "");
    CHECK(sorted(plan.tasks) == sorted(intersect_layouts(problems).tasks));
    for (const ChunkPiece& piece : plan.pieces) {
      const Task& task = plan.tasks[static_cast<size_t>(piece.task)];
      CHECK((task.tensor == piece.tensor && task.box.contains(piece.box)));
    }
    // The hops are those of the stacks, and so are their times.
    const Schedule made = simulate(plan.hops, plan.chunks, Network(topology, plan.ranks));
    CHECK(made.makespan_ns == before.makespan_ns);
  }
}

TEST_CASE("a plan of stacks by boxes is one of their tensors", "[plan][stack]") {
  const Topology topology = uniform_topology(15, 4, kTenGbit, 2, 8 * kTenGbit, 1000);
  size_t planned_as_one = 0, empty_ranks = 0;
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    Random random(seed);
    INFO("seed " << seed);
    std::vector<Problem> problems;
    for (int64_t kinds = random.between(1, 3); kinds > 0; --kinds) {
      const Problem problem = random_box_problem(random);
      for (int64_t n = random.between(1, 4); n > 0; --n)
        problems.insert(problems.begin() + random.below(static_cast<int64_t>(problems.size()) + 1), problem);
    }
    const std::vector<Stack> stacks = stack_alike(problems);
    std::vector<int32_t> tensors;
    for (const Stack& stack : stacks) {
      tensors.insert(tensors.end(), stack.tensors.begin(), stack.tensors.end());
      const Problem& single = problems[static_cast<size_t>(stack.tensors.front())];
      for (const int32_t tensor : stack.tensors) CHECK(problems[static_cast<size_t>(tensor)] == single);
      CHECK(stack.problem.stacked == (stack.tensors.size() > 1));
      if (!stack.problem.stacked) continue;
      ++planned_as_one;
      const auto count = static_cast<int64_t>(stack.tensors.size());
      for (const auto& [stacked, own] :
           {std::pair{&stack.problem.src, &single.src}, std::pair{&stack.problem.dst, &single.dst}}) {
        REQUIRE(stacked->by_boxes.size() == own->by_boxes.size());
        for (size_t i = 0; i < own->by_boxes.size(); ++i) {
          check_addresses(stacked->by_boxes[i], own->by_boxes[i], count);
          empty_ranks += own->by_boxes[i].pieces.empty();
        }
      }
    }
    std::sort(tensors.begin(), tensors.end());
    std::vector<int32_t> all(problems.size());
    std::iota(all.begin(), all.end(), 0);
    CHECK(tensors == all);
    PlanOptions options;
    options.chunk_bytes = random.one_of<int64_t>({0, 16, 64, 500});
    Plan plan = make_plan(stacked_problems(stacks), topology, options);
    unstack(stacks, problems, &plan);
    CHECK(check_plan(plan) == "");
    const Demand demand = intersect_layouts(problems);
    CHECK(sorted(plan.tasks) == sorted(demand.tasks));
    CHECK(sorted(plan.local_copies) == sorted(demand.local_copies));
    for (const ChunkPiece& piece : plan.pieces) {
      const Task& task = plan.tasks[static_cast<size_t>(piece.task)];
      CHECK((task.tensor == piece.tensor && task.box.contains(piece.box)));
    }
  }
  CHECK(planned_as_one > 100);
  CHECK(empty_ranks > 50);
}

TEST_CASE("tensors whose boxes leave no room for one more dimension are not stacked", "[plan][stack]") {
  const Topology topology = uniform_topology(3, 4, kTenGbit, 2, 8 * kTenGbit, 1000);
  Random random(1);
  const std::vector<Box> whole{{2, {0, 0}, {1, 6}}};
  const Problem plain{{1, 6}, 2, layout({2}, 0, {shard(1)}), {{{1}, {2}}, {}, {in_slices(random, whole)}}};
  const auto with = [&](const auto& change) {
    Problem out = plain;
    out.dst.by_boxes[0].rank = 2;
    change(out.dst.by_boxes[0]);
    return out;
  };
  const auto stacked = [&](const Problem& problem) {
    const std::vector<Problem> problems{problem, problem};
    const std::vector<Stack> stacks = stack_alike(problems);
    Plan plan = make_plan(stacked_problems(stacks), topology, {});
    unstack(stacks, problems, &plan);
    CHECK(check_plan(plan) == "");
    return stacks.front().problem.stacked;
  };
  CHECK(stacked(with([](Shard&) {})));
  CHECK(stacked(with([](Shard& shard) { shard.local_shape.resize(kMaxDims - 1, 1); })));
  CHECK_FALSE(stacked(with([](Shard& shard) { shard.local_shape.resize(kMaxDims, 1); })));
  // A dimension of one element lies along any, also one that the local tensor does not have.
  CHECK_FALSE(stacked(with([](Shard& shard) { shard.places[0].axis[0] = kMaxDims - 1; })));
}

TEST_CASE("alike tensors that are too many one by one are planned as one", "[plan][stack]") {
  const Plan plan = make_plan(many_tasks(300), rails(), {});
  CHECK(plan.tasks.size() == 300 * 1024);  // beyond the most boxes
  CHECK(plan.problems.size() == 300);
  CHECK(plan.hops.size() <= 8 * 1024);
  CHECK(plan.makespan_ns <= plan.lower_bound_ns / 100 * 105);
  CHECK(check_plan(plan) == "");
  CHECK(plan.hash == make_plan(many_tasks(300), rails(), {}).hash);
  CHECK(plan.hash != make_plan(many_tasks(301), rails(), {}).hash);
}

TEST_CASE("tensors that are few enough are planned one by one", "[plan][stack]") {
  const Plan plan = make_plan(many_tasks(3), rails(), {});
  for (size_t t = 0; t < plan.tasks.size(); ++t) CHECK(plan.tasks[t].tensor == static_cast<int32_t>(t / 1024));
}

TEST_CASE("tensors that are not alike are refused as before", "[plan][stack]") {
  std::vector<Problem> problems = many_tasks(300);
  for (size_t i = 0; i < problems.size(); ++i) problems[i].shape[0] += static_cast<int64_t>(i);
  CHECK_THROWS_AS(make_plan(problems, rails(), {}), LayoutError);
  // Alike, but more than a plan may list.
  CHECK_THROWS_AS(make_plan(many_tasks(2049), rails(), {}), LayoutError);
}

TEST_CASE("only tensors with equal shape, element size and layouts are alike", "[plan][stack]") {
  const Problem one{{32, 32}, 2, layout({4}, 0, {shard(0)}), layout({4}, 4, {kReplicate})};
  Problem other_size = one, other_layout = one, deep = one;
  other_size.element_bytes = 4;
  other_layout.dst = layout({4}, 4, {shard(1)});
  deep.shape = std::vector<int64_t>(kMaxDims, 4);
  const std::vector<Stack> stacks = stack_alike({one, other_size, deep, one, other_layout, deep});
  REQUIRE(stacks.size() == 5);
  CHECK(stacks[0].tensors == std::vector<int32_t>{0, 3});
  CHECK(stacks[0].problem.shape == std::vector<int64_t>{2, 32, 32});
  CHECK(stacks[0].problem.src.placements[0].dim == 1);
  CHECK_FALSE(stacks[2].problem.stacked);  // no room for one more dimension
  Problem wrong = one;
  wrong.element_bytes = 0;
  CHECK_THROWS_AS(stack_alike({one, wrong}), LayoutError);
}

TEST_CASE("boxes of several tensors are packed", "[plan][stack]") {
  const Problem one{{32, 32}, 2, layout({4}, 0, {shard(0)}), layout({4}, 4, {shard(0)})};
  const std::vector<Problem> problems = stacked_problems(stack_alike({one, one}));
  const Packing source(problems, &Problem::src);
  CHECK_FALSE(source.packs({0, 0, {3, {0, 0, 0}, {1, 8, 32}}}, 0));  // a whole shard
  CHECK(source.packs({0, 0, {3, {0, 0, 0}, {2, 8, 32}}}, 0));        // that of both tensors
}

// A 70B Llama, bfloat16, from FSDP over 512 ranks to 64 replicas of tensor parallel 8: 97 million deliveries.
TEST_CASE("all tensors of a 70B model are one plan", "[.][slow]") {
  const Layout src = layout({512}, 0, {shard(0)});
  const auto dst = [](Placement inside) { return layout({64, 8}, 512, {kReplicate, inside}); };
  const Layout rows = dst(shard(0)), columns = dst(shard(1)), whole = dst(kReplicate);
  std::vector<Problem> problems;
  for (int layer = 0; layer < 80; ++layer) {
    for (const int64_t out : {8192, 1024, 1024, 28672, 28672}) problems.push_back({{out, 8192}, 2, src, rows});
    for (const int64_t in : {8192, 28672}) problems.push_back({{8192, in}, 2, src, columns});
    for (int norm = 0; norm < 2; ++norm) problems.push_back({{8192}, 2, src, whole});
  }
  for (int embedding = 0; embedding < 2; ++embedding) problems.push_back({{128'256, 8192}, 2, src, rows});
  problems.push_back({{8192}, 2, src, whole});
  REQUIRE(problems.size() == 723);
  const Plan plan = make_plan(problems, uniform_topology(1023, 8, 40 * kTenGbit, 8, 8 * kTenGbit, 20'000), {});
  CHECK(plan.makespan_ns <= plan.lower_bound_ns / 100 * 105);
}
