#include "layout/box_tiles.h"

#include <algorithm>
#include <map>
#include <string>

#include "common/error.h"
#include "layout/tiling.h"

namespace meshcast {
namespace {

constexpr size_t kMaxTiles = size_t{1} << 18;

bool before(const Box& a, const Box& b) { return a.lo != b.lo ? a.lo < b.lo : a.hi < b.hi; }

struct Before {
  bool operator()(const Box& a, const Box& b) const { return before(a, b); }
};

// The rest of `box` without `inner`, which it contains: at most two boxes for each dimension.
void subtract(Box box, const Box& inner, std::vector<Box>* out) {
  for (int d = 0; d < box.ndim; ++d) {
    if (box.lo[d] < inner.lo[d]) {
      Box low = box;
      low.hi[d] = inner.lo[d];
      out->push_back(low);
      box.lo[d] = inner.lo[d];
    }
    if (inner.hi[d] < box.hi[d]) {
      Box high = box;
      high.lo[d] = inner.hi[d];
      out->push_back(high);
      box.hi[d] = inner.hi[d];
    }
  }
}

// Boxes that do not overlap; adding one cuts those that it overlaps.
class TileSet {
 public:
  void add(const Box& box, std::pair<int32_t, int32_t> holder) {
    if (box.empty()) return;
    const auto known = by_box_.find(box);
    if (known != by_box_.end()) {
      tiles_[known->second].holders.push_back(holder);
      return;
    }
    std::vector<Box> left{box};
    // Parts that are cut off are appended, and the loop reaches them later.
    for (size_t t = 0; t < tiles_.size() && !left.empty(); ++t) {
      std::vector<Box> still;
      for (const Box& part : left) {
        const Box common = intersect(part, tiles_[t].box);
        if (common.empty()) {
          still.push_back(part);
          continue;
        }
        if (common != tiles_[t].box) cut(t, common);
        tiles_[t].holders.push_back(holder);
        subtract(part, common, &still);
      }
      left = std::move(still);
    }
    for (const Box& part : left) insert({part, {holder}});
  }

  std::vector<BoxTile> take() {
    for (BoxTile& tile : tiles_) std::sort(tile.holders.begin(), tile.holders.end());
    std::sort(tiles_.begin(), tiles_.end(),
              [](const BoxTile& a, const BoxTile& b) { return before(a.box, b.box); });
    return std::move(tiles_);
  }

 private:
  void cut(size_t index, const Box& inner) {
    std::vector<Box> rest;
    subtract(tiles_[index].box, inner, &rest);
    by_box_.erase(tiles_[index].box);
    tiles_[index].box = inner;
    by_box_[inner] = index;
    for (const Box& part : rest) insert({part, tiles_[index].holders});
  }

  void insert(BoxTile tile) {
    if (tiles_.size() == kMaxTiles)
      throw LayoutError("the boxes of a layout cut the tensor into more than " + std::to_string(kMaxTiles) +
                        " parts");
    by_box_[tile.box] = tiles_.size();
    tiles_.push_back(std::move(tile));
  }

  std::vector<BoxTile> tiles_;
  std::map<Box, size_t, Before> by_box_;
};

std::vector<BoxTile> placed_tiles(const Layout& layout, const std::vector<int64_t>& shape) {
  const Tiling tiling = tile_layout(layout, shape);
  const size_t ndim = shape.size();
  std::vector<BoxTile> out;
  std::vector<size_t> part(ndim, 0);
  for (size_t tile = 0; tile < tiling.holders.size(); ++tile) {
    size_t rest = tile;
    int64_t count = 1;
    for (size_t d = ndim; d-- > 0;) {
      part[d] = rest % tiling.axes[d].parts.size();
      rest /= tiling.axes[d].parts.size();
      count *= static_cast<int64_t>(tiling.axes[d].parts[part[d]].size());
    }
    std::vector<std::pair<int32_t, int32_t>> holders;
    for (size_t i = 0; i < tiling.holders[tile].size(); ++i)
      holders.emplace_back(tiling.holders[tile][i], tiling.contribution[tile][i]);
    std::sort(holders.begin(), holders.end());
    for (int64_t n = 0; n < count; ++n) {
      BoxTile each{{static_cast<int>(ndim), {}, {}}, holders};
      int64_t index = n;
      for (size_t d = ndim; d-- > 0;) {
        const auto& intervals = tiling.axes[d].parts[part[d]];
        const auto size = static_cast<int64_t>(intervals.size());
        each.box.lo[d] = intervals[static_cast<size_t>(index % size)].lo;
        each.box.hi[d] = intervals[static_cast<size_t>(index % size)].hi;
        index /= size;
      }
      if (out.size() == kMaxTiles)
        throw LayoutError("the layout " + describe(layout) + " cuts the tensor into more than " +
                          std::to_string(kMaxTiles) + " parts");
      out.push_back(std::move(each));
    }
  }
  std::sort(out.begin(), out.end(), [](const BoxTile& a, const BoxTile& b) { return before(a.box, b.box); });
  return out;
}

std::string sides_text(const Box& box) {
  std::string out;
  for (int d = 0; d < box.ndim; ++d)
    out += (d ? ", " : "") + std::to_string(box.lo[d]) + ":" + std::to_string(box.hi[d]);
  return "[" + out + "]";
}

std::string wanted_text(const BoxTile& tile) {
  std::string out = sides_text(tile.box) + " is wanted by rank";
  out += tile.holders.size() == 1 ? " " : "s ";
  for (size_t i = 0; i < tile.holders.size() && i < 8; ++i)
    out += (i ? ", " : "") + std::to_string(tile.holders[i].first);
  return out + (tile.holders.size() > 8 ? ", ..." : "");
}

}  // namespace

std::vector<BoxTile> box_tiles(const Layout& layout, const std::vector<int64_t>& shape) {
  if (layout.by_boxes.empty()) return placed_tiles(layout, shape);
  TileSet tiles;
  for (const Shard& shard : layout.by_boxes) {
    for (const ShardPiece& piece : shard.pieces) tiles.add(piece.box, {shard.rank, 0});
  }
  return tiles.take();
}

std::vector<TileMeeting> meet_tiles(const std::vector<BoxTile>& held, const std::vector<BoxTile>& wanted) {
  std::vector<TileMeeting> out;
  for (size_t w = 0; w < wanted.size(); ++w) {
    const Box& box = wanted[w].box;
    // No bytes would ever come to the second place, while the call waits for them.
    const auto& ranks = wanted[w].holders;
    const auto twice = std::adjacent_find(ranks.begin(), ranks.end(),
                                          [](const auto& a, const auto& b) { return a.first == b.first; });
    if (twice != ranks.end())
      throw LayoutError("rank " + std::to_string(twice->first) + " wants the box " + sides_text(box) +
                        " at two places of its memory, but gets each element of a tensor once: give the source "
                        "another name for each further place");
    int64_t missing = box.volume();
    for (size_t h = 0; h < held.size() && missing > 0; ++h) {
      // Both lists are in row-major order: no later one begins before the end of `box`.
      if (box.ndim > 0 && held[h].box.lo[0] >= box.hi[0]) break;
      const Box common = intersect(held[h].box, box);
      if (common.empty()) continue;
      missing -= common.volume();
      out.push_back({common, h, w});
    }
    if (missing > 0)
      throw LayoutError("the box " + wanted_text(wanted[w]) + " of the destination, but " +
                        std::to_string(missing) + " of its elements are held by no rank of the source");
  }
  std::sort(out.begin(), out.end(),
            [](const TileMeeting& a, const TileMeeting& b) { return before(a.box, b.box); });
  return out;
}

}  // namespace meshcast
