#pragma once

#include <cstdint>
#include <utility>
#include <vector>

#include "layout/layout.h"

namespace meshcast {

// A box with all ranks that hold it, ascending, each with the number of its partial value (0 without Partial).
struct BoxTile {
  Box box;
  std::vector<std::pair<int32_t, int32_t>> holders;
};

// Any valid layout as boxes that do not overlap, in row-major order. Overlapping boxes of several ranks are
// cut. Throws LayoutError beyond the largest number of boxes.
std::vector<BoxTile> box_tiles(const Layout& layout, const std::vector<int64_t>& shape);

// The intersection of a held and a wanted box, with their indices.
struct TileMeeting {
  Box box;
  size_t held = 0;
  size_t wanted = 0;
};

// All intersections, in row-major order. Throws LayoutError naming a box that is wanted and not held, or wanted
// twice by one rank.
std::vector<TileMeeting> meet_tiles(const std::vector<BoxTile>& held, const std::vector<BoxTile>& wanted);

// A box that lies in a piece of a rank's shard, and the number of ranks that want it.
struct CountedBox {
  Box box;
  size_t piece = 0;
  size_t times = 0;
};

// What a rank is the first holder of, and others want. Throws LayoutError naming a box that is wanted and not
// held by any rank.
std::vector<CountedBox> counted_boxes(const Layout& source, const Layout& destination,
                                      const std::vector<int64_t>& shape, int32_t rank);

}  // namespace meshcast
