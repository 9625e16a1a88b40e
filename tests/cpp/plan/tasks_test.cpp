#include "plan/tasks.h"

#include <string>

#include "catch.h"
#include "common/error.h"
#include "plan/cases.h"
#include "plan/draft.h"
#include "plan/network.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

Demand demand(std::vector<int64_t> shape, Layout src, Layout dst) {
  return intersect_layouts({Problem{std::move(shape), 4, std::move(src), std::move(dst)}});
}

std::string error_of(const std::vector<Problem>& problems) {
  try {
    intersect_layouts(problems);
  } catch (const LayoutError& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("the paper's cases have the paper's unit tasks", "[plan]") {
  const std::vector<size_t> tasks{2, 2, 4, 64, 4, 4, 4, 4, 4};
  const std::vector<size_t> receivers{4, 4, 4, 1, 4, 4, 8, 8, 4};
  const std::vector<NamedCase> cases = paper_cases();
  for (size_t i = 0; i < tasks.size(); ++i) {
    INFO(cases[i].name);
    const Demand d = intersect_layouts({cases[i].problem});
    REQUIRE(d.tasks.size() == tasks[i]);
    for (const Task& t : d.tasks) CHECK(t.receivers.size() == receivers[i]);
    CHECK(d.local_copies.empty());
  }
  // 3072 rows in halves against thirds.
  const Demand six = intersect_layouts({cases[5].problem});
  const int64_t row = 1024 * 170 * 4;
  CHECK(six.tasks[0].nbytes == 1024 * row);
  CHECK(six.tasks[1].nbytes == 512 * row);
  CHECK(six.tasks[2].nbytes == 512 * row);
  CHECK(six.tasks[3].nbytes == 1024 * row);
}

TEST_CASE("what a rank holds already is copied, not sent", "[plan]") {
  const Demand equal =
      demand({8, 6}, layout({2, 2}, 0, {shard(0), shard(1)}), layout({2, 2}, 0, {shard(0), shard(1)}));
  CHECK(equal.tasks.empty());
  CHECK(equal.local_copies.size() == 4);
  // Ranks 0, 1 split the rows; ranks 1, 2 need all: rank 1 keeps its half.
  const Demand overlap = demand({8}, layout({2}, 0, {shard(0)}), layout({2}, 1, {kReplicate}));
  REQUIRE(overlap.local_copies.size() == 1);
  CHECK(overlap.local_copies[0].rank == 1);
  REQUIRE(overlap.tasks.size() == 2);
  CHECK(overlap.tasks[0].receivers == std::vector<int32_t>{1, 2});
  CHECK(overlap.tasks[1].receivers == std::vector<int32_t>{2});
}

TEST_CASE("pending reductions are kept by an unchanged layout and resolved by any other", "[plan]") {
  const Layout pending = layout({2, 2}, 0, {partial(ReduceOp::Sum), shard(0)});
  CHECK(demand({4}, pending, pending).tasks.empty());
  CHECK(demand({4}, pending, pending).local_copies.size() == 4);
  const Demand d = demand({4}, pending, layout({4}, 0, {kReplicate}));
  REQUIRE(d.tasks.size() == 2);
  CHECK(d.local_copies.empty());
  CHECK(d.tasks[0].holders == std::vector<int32_t>{0, 2});
  CHECK(d.tasks[0].contribution == std::vector<int32_t>{0, 1});
  CHECK(d.tasks[0].receivers == std::vector<int32_t>{0, 1, 2, 3});
  CHECK(d.tasks[0].reduce == ReduceOp::Sum);
}

TEST_CASE("demands that cannot be planned are refused by name", "[plan]") {
  const Layout flat = layout({2}, 0, {kReplicate});
  CHECK(error_of({{{4}, 0, flat, flat}}).find("0 bytes") != std::string::npos);
  CHECK(error_of({{{4}, 4, flat, layout({2}, 0, {partial(ReduceOp::Sum)})}}).find("destination") !=
        std::string::npos);
  CHECK(error_of({{{4}, 4, layout({2, 2}, 0, {partial(ReduceOp::Sum), partial(ReduceOp::Max)}), flat}})
            .find("mixes Partial") != std::string::npos);
  CHECK(error_of({{{int64_t{1} << 61}, 8, flat, flat}}).find("overflows") != std::string::npos);
  // Every rank to every rank: 2048 rows against 2048 columns.
  const std::string size =
      error_of({{{2048, 2048}, 4, layout({2048}, 0, {shard(0)}), layout({2048}, 2048, {shard(1)})}});
  CHECK(size.find("4194304 tasks") != std::string::npos);
  const std::string many =
      error_of({{{4096}, 4, layout({1024}, 0, {shard(0)}), layout({4096}, 1024, {kReplicate})}});
  CHECK(many.find("3145728 deliveries") != std::string::npos);
}

TEST_CASE("boxes with the same holders and receivers are one delivery, whatever the tensor", "[plan]") {
  // 1,024 sources to 2,048 replicas are 2,097,152 deliveries, and are no more with 50 tensors of different
  // shapes.
  const Layout src = layout({1024}, 0, {shard(0)}), dst = layout({2048}, 1024, {kReplicate});
  std::vector<Problem> problems;
  for (int64_t n = 1; n <= 50; ++n) problems.push_back({{1024, n}, 2, src, dst});
  const Demand d = intersect_layouts(problems);
  CHECK(d.tasks.size() == 50 * 1024);
  CHECK(d.deliveries == 1024 * 2048);
  CHECK(d.tasks.front().receivers.identity() == d.tasks.back().receivers.identity());
  // Another order of the ranks is another kind of boxes: each source has another row.
  Layout turned = src;
  std::reverse(turned.mesh.ranks.begin(), turned.mesh.ranks.end());
  problems.push_back({{1024, 60}, 2, turned, dst});
  CHECK(intersect_layouts(problems).deliveries == 1024 * 2048);
  problems.push_back({{1024, 60}, 2, src, layout({1024}, 1024, {kReplicate})});
  CHECK(intersect_layouts(problems).deliveries == 1024 * 2048 + 1024 * 1024);
}

TEST_CASE("tensors beyond 2^40 elements are planned", "[plan]") {
  const int64_t n = int64_t{1} << 41;
  const Demand d = demand({n}, layout({2}, 0, {shard(0)}), layout({4}, 2, {shard(0)}));
  REQUIRE(d.tasks.size() == 4);
  CHECK(d.tasks[3].box.hi[0] == n);
  CHECK(d.tasks[3].nbytes == n);
}

TEST_CASE("boxes are cut along their outermost dimensions into nearly equal pieces", "[plan]") {
  const Box box{2, {10, 5}, {17, 9}};  // 7 rows of 4
  const std::vector<Box> rows = cut_box(box, 12);
  REQUIRE(rows.size() == 3);  // 3, 2, 2 rows
  CHECK(rows[0].extent(0) == 3);
  CHECK(rows[2].lo[0] == 15);
  CHECK(cut_box(box, 28).size() == 1);
  const std::vector<Box> parts = cut_box(box, 3);  // every row in 2 and 2
  REQUIRE(parts.size() == 14);
  CHECK(parts[1].lo[1] == 7);
  CHECK(cut_box(box, 1).size() == 28);
  CHECK(cut_box(Box{}, 1).size() == 1);
}

TEST_CASE("chunks of any size that is asked for are cut from one bundle", "[plan]") {
  // 20 rows of 6 elements of 4 bytes, and a small box that has the same ranks.
  const Layout from = layout({1}, 0, {kReplicate});
  const Layout to = layout({1}, 1, {kReplicate});
  const std::vector<Problem> problems{{{20, 6}, 4, from, to}, {{5}, 4, from, to}};
  const Demand found = intersect_layouts(problems);
  const std::vector<Bundle> bundles = bundle_tasks(found.tasks, problems);
  REQUIRE(bundles.size() == 1);
  const Network network(uniform_topology(1, 1, kTenGbit, 1, kTenGbit, 0), {0, 1});
  Drafter drafter(found.tasks, problems, network);
  UnitCutter cutter(bundles[0], found.tasks, problems, 24);
  CHECK(cutter.next(72, &drafter) == 0);  // three rows, one box
  CHECK(cutter.next(1, &drafter) == 1);   // at least a row
  CHECK(cutter.next(60, &drafter) == 2);  // two and a half: three
  CHECK(cutter.next(59, &drafter) == 3);  // less: two
  CHECK(cutter.next(1000, &drafter) == 4);
  CHECK(cutter.done());
  const Draft draft = drafter.take();
  const std::vector<int64_t> sizes{72, 24, 72, 48, 11 * 24 + 20};
  int64_t row = 0;
  for (size_t i = 0; i < sizes.size(); ++i) {
    CHECK(draft.chunks[i].nbytes == sizes[i]);
    const ChunkPiece& piece = draft.pieces[static_cast<size_t>(draft.chunks[i].piece_begin)];
    CHECK(piece.box.lo[0] == row);
    row = piece.box.hi[0];
    CHECK(draft.chunks[i].piece_end - draft.chunks[i].piece_begin == (i == 4 ? 2 : 1));
  }
  CHECK(row == 20);
}

TEST_CASE("small boxes with equal holders and receivers share chunks", "[plan]") {
  std::vector<Problem> batch(10, {{16}, 4, layout({1}, 0, {kReplicate}), layout({1}, 1, {kReplicate})});
  batch.push_back({{1000}, 4, layout({1}, 0, {kReplicate}), layout({1}, 1, {kReplicate})});
  const Topology topology = uniform_topology(1, 1, kTenGbit, 1, kTenGbit, 0);
  const Plan plan = make_plan(batch, topology, {Strategy::SendRecv, Balance::None, 256, 0});
  // 64 bytes each: four to a chunk, the last two alone, then 4000 bytes in 16 pieces.
  REQUIRE(plan.chunks.size() == 3 + 16);
  CHECK(plan.chunks[0].piece_end - plan.chunks[0].piece_begin == 4);
  CHECK(plan.chunks[2].nbytes == 128);
  CHECK(plan.hops.size() == 19);
}
