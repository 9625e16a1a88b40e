#include "plan/stack.h"

#include <algorithm>
#include <string>
#include <tuple>

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
