#include "layout/layout.h"

#include <string>
#include <vector>

#include "catch.h"
#include "common/error.h"
#include "plan/cases.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

// Elements of a 1-d shard in the order of its local tensor.
std::vector<int64_t> elements(const Shard& shard) {
  std::vector<int64_t> out(static_cast<size_t>(shard.local_shape[0]), -1);
  for (const ShardPiece& piece : shard.pieces) {
    for (int64_t i = 0; i < piece.box.extent(0); ++i)
      out.at(static_cast<size_t>(piece.local[0] + i)) = piece.box.lo[0] + i;
  }
  return out;
}

std::string error_of(const Layout& layout, const std::vector<int64_t>& shape) {
  try {
    validate(layout, shape);
  } catch (const LayoutError& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("shards follow torch.chunk: rounded up, the last ones shorter or empty", "[layout]") {
  const auto sizes = [](int64_t n, int64_t parts) {
    std::vector<int64_t> out;
    for (const Shard& s : shards(layout({parts}, 0, {shard(0)}), {n})) out.push_back(s.local_shape[0]);
    return out;
  };
  CHECK(sizes(8, 4) == std::vector<int64_t>{2, 2, 2, 2});
  CHECK(sizes(7, 3) == std::vector<int64_t>{3, 3, 1});
  CHECK(sizes(5, 4) == std::vector<int64_t>{2, 2, 1, 0});
  CHECK(sizes(3, 8) == std::vector<int64_t>{1, 1, 1, 0, 0, 0, 0, 0});
  CHECK(sizes(0, 2) == std::vector<int64_t>{0, 0});
  CHECK(shards(layout({4}, 0, {shard(0)}), {5})[3].pieces.empty());
}

TEST_CASE("mesh dimensions cut from left to right", "[layout]") {
  // 10 rows in 2 parts of 5, each in 3 parts of 2, 2, 1.
  const std::vector<Shard> both = shards(layout({2, 3}, 0, {shard(0), shard(0)}), {10});
  CHECK(elements(both[0]) == std::vector<int64_t>{0, 1});
  CHECK(elements(both[2]) == std::vector<int64_t>{4});
  CHECK(elements(both[5]) == std::vector<int64_t>{9});
  const std::vector<Shard> each = shards(layout({2, 3}, 4, {shard(1), shard(0)}), {6, 4});
  CHECK(each[5].rank == 9);
  CHECK(each[5].local_shape == std::vector<int64_t>{2, 2});
  CHECK(each[5].pieces[0].box.lo[0] == 4);
  CHECK(each[5].pieces[0].box.lo[1] == 2);
}

TEST_CASE("strided shards take their part of every block", "[layout]") {
  // Values of torch.distributed.tensor's _StridedShard: 12 elements, blocks of 6, 2 ranks.
  const std::vector<Shard> even = shards(layout({2}, 0, {strided(0, 2)}), {12});
  CHECK(elements(even[0]) == std::vector<int64_t>{0, 1, 2, 6, 7, 8});
  CHECK(elements(even[1]) == std::vector<int64_t>{3, 4, 5, 9, 10, 11});
  // The documented uneven example: 9 elements in 4 ranks with split factor 2.
  const std::vector<Shard> uneven = shards(layout({4}, 0, {strided(0, 2)}), {9});
  CHECK(elements(uneven[0]) == std::vector<int64_t>{0, 1, 5});
  CHECK(elements(uneven[1]) == std::vector<int64_t>{2, 3, 6});
  CHECK(elements(uneven[2]) == std::vector<int64_t>{4, 7});
  CHECK(elements(uneven[3]) == std::vector<int64_t>{8});
  // FSDP over tensor parallelism: data parallel dimension first, but tensor parallel cut first.
  const std::vector<Shard> fsdp = shards(layout({2, 2}, 0, {strided(0, 2), shard(0)}), {8});
  CHECK(elements(fsdp[0]) == std::vector<int64_t>{0, 1});
  CHECK(elements(fsdp[1]) == std::vector<int64_t>{4, 5});
  CHECK(elements(fsdp[2]) == std::vector<int64_t>{2, 3});
  CHECK(elements(fsdp[3]) == std::vector<int64_t>{6, 7});
}

TEST_CASE("pieces that touch are one piece", "[layout]") {
  CHECK(shards(layout({1}, 0, {strided(0, 4)}), {16})[0].pieces.size() == 1);
  CHECK(shards(layout({2}, 0, {strided(0, 3)}), {12, 5})[1].pieces.size() == 3);
}

TEST_CASE("scalars and tensors without elements", "[layout]") {
  const std::vector<Shard> scalar = shards(layout({3}, 0, {kReplicate}), {});
  REQUIRE(scalar.size() == 3);
  CHECK(scalar[2].pieces.size() == 1);
  CHECK(scalar[2].pieces[0].box.volume() == 1);
  CHECK(shards(layout({2}, 0, {kReplicate}), {4, 0, 3})[0].pieces.empty());
}

TEST_CASE("bad layouts are refused by name", "[layout]") {
  CHECK(error_of(layout({2}, 0, {shard(0), shard(0)}), {4}).find("2 placements for a mesh of 1") !=
        std::string::npos);
  CHECK(error_of(layout({2}, 0, {shard(2)}), {4, 4}).find("Shard(2)") != std::string::npos);
  CHECK(error_of(layout({2}, 0, {shard(0)}), {}).find("out of range") != std::string::npos);
  CHECK(error_of(layout({2}, 0, {strided(0, 0)}), {4}).find("split_factor 0") != std::string::npos);
  CHECK(error_of(layout({2}, -1, {shard(0)}), {4}).find("negative rank -1") != std::string::npos);
  CHECK(error_of(layout({2}, 0, {shard(0)}), {-4}).find("negative dimension") != std::string::npos);
  CHECK(error_of(layout({1, 1, 1, 1, 1, 1}, 0, std::vector<Placement>(6)), {4}).find("1 to 5") !=
        std::string::npos);
  CHECK(error_of(layout({2}, 0, {kReplicate}), {int64_t{1} << 40, int64_t{1} << 40}).find("overflows") !=
        std::string::npos);
  CHECK(error_of(layout({2}, 0, {kReplicate}), std::vector<int64_t>(9, 1)).find("at most 8") !=
        std::string::npos);
  Layout twice = layout({2}, 0, {shard(0)});
  twice.mesh.ranks = {3, 3};
  CHECK(error_of(twice, {4}).find("rank 3 twice") != std::string::npos);
  Layout few = layout({2}, 0, {shard(0)});
  few.mesh.ranks = {3};
  CHECK(error_of(few, {4}).find("needs 2 ranks, got 1") != std::string::npos);
  CHECK(error_of(layout({2}, 0, {shard(0)}), {4}).empty());
}

TEST_CASE("layouts describe themselves", "[layout]") {
  CHECK(describe(layout({2, 4}, 0, {shard(0), kReplicate})) == "mesh 2x4 [0..7], S0 R");
  Layout odd = layout({3}, 0, {partial(ReduceOp::Sum)});
  odd.mesh.ranks = {5, 1, 3};
  CHECK(describe(odd) == "mesh 3 [5,1,3], P(sum)");
  odd.mesh.ranks = {INT32_MAX - 1, INT32_MAX, 0};  // no rank follows the last one there can be
  CHECK(describe(odd) == "mesh 3 [2147483646,2147483647,0], P(sum)");
  CHECK(has_partial(odd));
  CHECK_FALSE(has_partial(layout({2}, 0, {strided(1, 2)})));
}
