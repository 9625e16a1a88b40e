#include "layout/box_tiles.h"

#include <algorithm>
#include <map>
#include <string>

#include "common/error.h"
#include "layout/box_index.h"
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
  // boxes: those that will be added.
  explicit TileSet(const std::vector<Box>& boxes) : index_(boxes) {}

  void add(const Box& box, std::pair<int32_t, int32_t> holder) {
    if (box.empty()) return;
    const auto known = by_box_.find(box);
    if (known != by_box_.end()) {
      tiles_[known->second].holders.push_back(holder);
      return;
    }
    std::vector<Box> left{box};
    const size_t known_before = tiles_.size();
    for (const size_t t : index_.near(box)) meet(t, holder, &left);
    // Parts that were cut off.
    for (size_t t = known_before; t < tiles_.size() && !left.empty(); ++t) meet(t, holder, &left);
    for (const Box& part : left) insert({part, {holder}});
  }

  std::vector<BoxTile> take() {
    for (BoxTile& tile : tiles_) std::sort(tile.holders.begin(), tile.holders.end());
    std::sort(tiles_.begin(), tiles_.end(),
              [](const BoxTile& a, const BoxTile& b) { return before(a.box, b.box); });
    return std::move(tiles_);
  }

 private:
  // left: parts of a box of the holder; those in the tile are taken out.
  void meet(size_t tile, std::pair<int32_t, int32_t> holder, std::vector<Box>* left) {
    std::vector<Box> still;
    for (const Box& part : *left) {
      const Box common = intersect(part, tiles_[tile].box);
      if (common.empty()) {
        still.push_back(part);
        continue;
      }
      if (common != tiles_[tile].box) cut(tile, common);
      tiles_[tile].holders.push_back(holder);
      subtract(part, common, &still);
    }
    *left = std::move(still);
  }

  void cut(size_t index, const Box& inner) {
    std::vector<Box> rest;
    subtract(tiles_[index].box, inner, &rest);
    by_box_.erase(tiles_[index].box);
    index_.erase(tiles_[index].box, index);
    tiles_[index].box = inner;
    by_box_[inner] = index;
    index_.insert(inner, index);
    for (const Box& part : rest) insert({part, tiles_[index].holders});
  }

  void insert(BoxTile tile) {
    if (tiles_.size() == kMaxTiles)
      throw LayoutError("the boxes of a layout cut the tensor into more than " + std::to_string(kMaxTiles) +
                        " parts");
    by_box_[tile.box] = tiles_.size();
    index_.insert(tile.box, tiles_.size());
    tiles_.push_back(std::move(tile));
  }

  std::vector<BoxTile> tiles_;
  std::map<Box, size_t, Before> by_box_;
  BoxIndex index_;
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

// Of tiles, or of the pieces of a shard.
template <class Row>
BoxIndex index_of(const std::vector<Row>& rows) {
  std::vector<Box> boxes;
  boxes.reserve(rows.size());
  for (const Row& row : rows) boxes.push_back(row.box);
  BoxIndex index(boxes);
  for (size_t i = 0; i < boxes.size(); ++i) index.insert(boxes[i], i);
  return index;
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
  std::vector<Box> boxes;
  for (const Shard& shard : layout.by_boxes) {
    for (const ShardPiece& piece : shard.pieces) boxes.push_back(piece.box);
  }
  TileSet tiles(boxes);
  for (const Shard& shard : layout.by_boxes) {
    for (const ShardPiece& piece : shard.pieces) tiles.add(piece.box, {shard.rank, 0});
  }
  return tiles.take();
}

std::vector<TileMeeting> meet_tiles(const std::vector<BoxTile>& held, const std::vector<BoxTile>& wanted) {
  std::vector<TileMeeting> out;
  const BoxIndex index = index_of(held);
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
    for (const size_t h : index.near(box)) {
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

std::vector<CountedBox> counted_boxes(const Layout& source, const Layout& destination,
                                      const std::vector<int64_t>& shape, int32_t rank) {
  std::vector<CountedBox> out;
  const std::vector<BoxTile> held = box_tiles(source, shape), wanted = box_tiles(destination, shape);
  const std::vector<Shard> all = shards(source, shape);
  const auto own = std::find_if(all.begin(), all.end(), [&](const Shard& shard) { return shard.rank == rank; });
  if (own == all.end()) return out;
  const BoxIndex index = index_of(own->pieces);
  for (const TileMeeting& meeting : meet_tiles(held, wanted)) {
    if (held[meeting.held].holders.front().first != rank) continue;
    for (const size_t p : index.near(meeting.box)) {
      const Box common = intersect(own->pieces[p].box, meeting.box);
      if (!common.empty()) out.push_back({common, p, wanted[meeting.wanted].holders.size()});
    }
  }
  return out;
}

}  // namespace meshcast
