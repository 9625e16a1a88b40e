#include "layout/box_tiles.h"

#include <random>
#include <string>
#include <vector>

#include "catch.h"
#include "common/error.h"
#include "plan/cases.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

Box box_of(std::vector<std::pair<int64_t, int64_t>> sides) {
  Box box;
  box.ndim = static_cast<int>(sides.size());
  for (size_t d = 0; d < sides.size(); ++d) {
    box.lo[d] = sides[d].first;
    box.hi[d] = sides[d].second;
  }
  return box;
}

// Rank r holds boxes[r], one after the other in a local tensor of one dimension.
Layout by_boxes(const std::vector<std::vector<Box>>& boxes) {
  Layout layout;
  layout.mesh.shape = {static_cast<int64_t>(boxes.size())};
  for (size_t rank = 0; rank < boxes.size(); ++rank) {
    layout.mesh.ranks.push_back(static_cast<int32_t>(rank));
    Shard shard;
    shard.rank = static_cast<int32_t>(rank);
    int64_t at = 0;
    for (const Box& box : boxes[rank]) {
      ShardPiece piece{box, {}};
      piece.local[0] = at;
      BoxPlace place;
      int64_t step = 1;
      for (int d = box.ndim; d-- > 0;) {
        place.step[d] = step;
        step *= box.extent(d);
      }
      at += box.volume();
      shard.pieces.push_back(piece);
      shard.places.push_back(place);
    }
    shard.local_shape = {at};
    layout.by_boxes.push_back(shard);
  }
  return layout;
}

std::string problem_of(const Layout& layout, const std::vector<int64_t>& shape) {
  try {
    validate(layout, shape);
  } catch (const LayoutError& e) {
    return e.what();
  }
  return "";
}

}  // namespace

TEST_CASE("tiles do not overlap and name every holder") {
  std::mt19937 random(7);
  for (int round = 0; round < 60; ++round) {
    const int64_t rows = round % 3 ? 7 : 70;
    const std::vector<int64_t> shape{rows, 6};
    std::vector<std::vector<Box>> boxes(round % 3 ? 4 : 25);
    for (auto& each : boxes) {
      const auto side = [&](int64_t size) {
        const int64_t lo = static_cast<int64_t>(random() % static_cast<uint64_t>(size));
        return std::pair{lo, lo + 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(size - lo))};
      };
      each.push_back(box_of({side(rows), side(6)}));
    }
    const Layout layout = by_boxes(boxes);
    REQUIRE(problem_of(layout, shape).empty());
    const auto tiles = box_tiles(layout, shape);
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < 6; ++j) {
        const Box at = box_of({{i, i + 1}, {j, j + 1}});
        std::vector<int32_t> expected;
        for (size_t r = 0; r < boxes.size(); ++r) {
          if (boxes[r][0].contains(at)) expected.push_back(static_cast<int32_t>(r));
        }
        std::vector<int32_t> found;
        int count = 0;
        for (const BoxTile& tile : tiles) {
          if (!tile.box.contains(at)) continue;
          ++count;
          for (const auto& holder : tile.holders) found.push_back(holder.first);
        }
        CHECK(count == (expected.empty() ? 0 : 1));
        CHECK(found == expected);
      }
    }
  }
}

TEST_CASE("placements as tiles") {
  const auto tiles = box_tiles(layout({2, 2}, 0, {shard(0), kReplicate}), {5, 3});
  REQUIRE(tiles.size() == 2);
  CHECK(tiles[0].box == box_of({{0, 3}, {0, 3}}));
  CHECK(tiles[0].holders == std::vector<std::pair<int32_t, int32_t>>{{0, 0}, {1, 0}});
  CHECK(tiles[1].holders == std::vector<std::pair<int32_t, int32_t>>{{2, 0}, {3, 0}});
  CHECK(box_tiles(layout({3}, 0, {kReplicate}), {}).size() == 1);
}

TEST_CASE("what is wanted and not held is named") {
  const Layout source = by_boxes({{box_of({{0, 2}})}, {box_of({{3, 5}})}});
  const Layout wanted = by_boxes({{box_of({{1, 4}})}});
  const auto meet = [&](const Layout& from, const Layout& to) {
    return meet_tiles(box_tiles(from, {5}), box_tiles(to, {5}));
  };
  CHECK_THROWS_WITH(meet(source, wanted),
                    "the box [1:4] is wanted by rank 0 of the destination, but 1 of its "
                    "elements are held by no rank of the source");
  const auto found = meet(source, by_boxes({{box_of({{3, 4}}), box_of({{0, 1}})}}));
  REQUIRE(found.size() == 2);
  CHECK(found[0].box == box_of({{0, 1}}));
  CHECK(found[1].box == box_of({{3, 4}}));
}

TEST_CASE("what one rank wants twice is named") {
  const Layout whole = layout({2}, 0, {kReplicate});
  const auto meet = [&](const Layout& to) {
    return meet_tiles(box_tiles(whole, {4, 5}), box_tiles(to, {4, 5}));
  };
  const Box low = box_of({{0, 3}, {0, 5}}), high = box_of({{2, 4}, {1, 5}});
  CHECK(meet(by_boxes({{low}, {high}})).size() > 2);  // of two ranks
  try {
    meet(by_boxes({{low}, {low, high}}));
    FAIL("nothing was refused");
  } catch (const LayoutError& error) {
    CHECK(std::string(error.what()).find("rank 1 wants the box [2:3, 1:5] at two places") == 0);
  }
  // What a rank holds twice may leave from either place.
  CHECK_NOTHROW(
      meet_tiles(box_tiles(by_boxes({{low, low, high}}), {4, 5}), box_tiles(by_boxes({{low}}), {4, 5})));
  const auto scalar = [](size_t times) { return by_boxes({std::vector<Box>(times, box_of({}))}); };
  CHECK_NOTHROW(meet_tiles(box_tiles(scalar(1), {}), box_tiles(scalar(1), {})));
  CHECK_THROWS_AS(meet_tiles(box_tiles(scalar(1), {}), box_tiles(scalar(2), {})), LayoutError);
}

TEST_CASE("what a rank counts lies in its pieces, as often as ranks want it") {
  const Layout source = by_boxes({{box_of({{4, 8}}), box_of({{0, 2}})}, {box_of({{0, 4}})}});
  const Layout wanted = by_boxes({{box_of({{1, 5}})}, {box_of({{0, 3}})}});
  const auto first = counted_boxes(source, wanted, {8}, 0);
  REQUIRE(first.size() == 3);
  CHECK(first[0].box == box_of({{0, 1}}));
  CHECK((first[0].piece == 1 && first[0].times == 1));
  CHECK(first[1].box == box_of({{1, 2}}));
  CHECK((first[1].piece == 1 && first[1].times == 2));
  CHECK(first[2].box == box_of({{4, 5}}));
  CHECK((first[2].piece == 0 && first[2].times == 1));
  CHECK(counted_boxes(source, wanted, {8}, 1).size() == 2);  // [2:3] and [3:4]
  CHECK(counted_boxes(source, wanted, {8}, 2).empty());
  const Layout scalar = by_boxes({{box_of({})}});
  CHECK(counted_boxes(scalar, scalar, {}, 0).size() == 1);
}

TEST_CASE("boxes outside of the tensor or of the local tensor are refused") {
  Layout layout = by_boxes({{box_of({{0, 2}, {0, 3}})}});
  CHECK(problem_of(layout, {2, 3}).empty());
  CHECK(problem_of(layout, {2, 2}).find("is not inside a tensor of shape (2, 2)") != std::string::npos);
  CHECK(problem_of(layout, {2, 3, 1}).find("not inside") != std::string::npos);
  layout.by_boxes[0].local_shape = {5};
  CHECK(problem_of(layout, {2, 3}).find("its local tensor of shape (5)") != std::string::npos);
  layout.by_boxes[0].local_shape = {6};
  layout.by_boxes[0].pieces[0].local[0] = 1;
  CHECK(problem_of(layout, {2, 3}).find("local tensor") != std::string::npos);
  layout.by_boxes[0].pieces[0].local[0] = 0;
  layout.by_boxes[0].places[0].axis[1] = 1;
  CHECK(problem_of(layout, {2, 3}).find("local tensor") != std::string::npos);
  layout.by_boxes[0].places.clear();
  CHECK(!problem_of(layout, {2, 3}).empty());
}
