#include "plan/draft.h"

#include <algorithm>
#include <string>
#include <unordered_map>

#include "common/checked.h"
#include "common/error.h"
#include "plan/hash.h"

namespace meshcast {
namespace {

bool same_ranks(const Task& a, const Task& b) {
  return a.holders == b.holders && a.receivers == b.receivers && a.reduce == b.reduce &&
         a.contribution == b.contribution;
}

}  // namespace

// Boxes that touch in one dimension and are equal in all others form a box.
bool join_boxes(const Box& next, Box* box) {
  int differs = -1;
  for (int d = 0; d < box->ndim; ++d) {
    if (box->lo[d] == next.lo[d] && box->hi[d] == next.hi[d]) continue;
    if (differs >= 0 || box->hi[d] != next.lo[d]) return false;
    differs = d;
  }
  if (differs < 0) return false;
  box->hi[differs] = next.hi[differs];
  return true;
}

// A hash finds candidates, and their ranks are compared in full: tasks of one bundle share all routes, so a
// collision would send a box to ranks that do not need it.
std::vector<Bundle> bundle_tasks(const std::vector<Task>& tasks, const std::vector<Problem>& problems) {
  std::vector<Bundle> out;
  std::unordered_map<uint64_t, std::vector<int32_t>> seen;  // hash of the rank sets -> bundles
  for (size_t t = 0; t < tasks.size(); ++t) {
    const Task& task = tasks[t];
    Hasher hasher;
    hasher.add(static_cast<int64_t>(task.reduce));
    for (const RankList* ranks : {&task.holders, &task.receivers, &task.contribution})
      hasher.add(static_cast<int64_t>(ranks->word()));
    // Pending values are combined element by element, so elements of different size never share a chunk.
    if (task.reduce != ReduceOp::None) hasher.add(problems[static_cast<size_t>(task.tensor)].element_bytes);
    int32_t found = -1;
    for (const int32_t b : seen[hasher.word()]) {
      const Task& other = tasks[static_cast<size_t>(out[static_cast<size_t>(b)].tasks.front())];
      const bool elements =
          task.reduce == ReduceOp::None || problems[static_cast<size_t>(task.tensor)].element_bytes ==
                                               problems[static_cast<size_t>(other.tensor)].element_bytes;
      if (elements && same_ranks(task, other)) found = b;
    }
    if (found < 0) {
      found = static_cast<int32_t>(out.size());
      seen[hasher.word()].push_back(found);
      out.emplace_back();
    }
    out[static_cast<size_t>(found)].tasks.push_back(static_cast<int32_t>(t));
    out[static_cast<size_t>(found)].nbytes =
        checked_add(out[static_cast<size_t>(found)].nbytes, task.nbytes, "bytes of a batch");
  }
  return out;
}

std::vector<Box> cut_box(const Box& box, int64_t max_elements) {
  // Example. A box of 6 x 10 elements in pieces of 25: a row has 10, so 2 rows fit, and 6 rows make 3 parts
  // of 2 x 10. In pieces of 4 not even a row fits: first 6 parts of one row each, then each row in 3 parts,
  // which is 10 / 4 rounded up, of 4, 3 and 3 elements.
  std::vector<Box> open{box};
  for (int d = 0; d < box.ndim && !open.empty(); ++d) {
    if (open.front().volume() <= max_elements) break;
    // All open boxes have one row in the dimensions before d, so they are cut in the same way.
    const int64_t extent = box.extent(d);
    const int64_t row = open.front().volume() / extent;
    const int64_t rows = std::clamp<int64_t>(max_elements / row, 1, extent);
    const int64_t parts = ceil_div(extent, rows);
    std::vector<Box> next;
    next.reserve(open.size() * static_cast<size_t>(parts));
    for (const Box& b : open) {
      int64_t lo = box.lo[d];
      for (int64_t p = 0; p < parts; ++p) {
        const int64_t size = extent / parts + (p < extent % parts);
        Box piece = b;
        piece.lo[d] = lo;
        piece.hi[d] = lo + size;
        lo += size;
        next.push_back(piece);
      }
    }
    open = std::move(next);
  }
  return open;
}

void Drafter::close_chunk(int32_t first_piece, int64_t nbytes) {
  draft_.chunks.push_back({first_piece, static_cast<int32_t>(draft_.pieces.size()), nbytes});
}

// Small boxes of a bundle fill a chunk together, in the order of their tasks. A box above the size is cut, and
// its parts share chunks with nothing else: then most chunks are one box, which a rank may send without
// packing.
Drafter::Range Drafter::cut(const Bundle& bundle, int64_t chunk_bytes) {
  Range range;
  range.first = static_cast<int32_t>(draft_.chunks.size());
  auto open_piece = static_cast<int32_t>(draft_.pieces.size());
  int64_t open_bytes = 0;
  for (const int32_t t : bundle.tasks) {
    const Task& task = tasks_[static_cast<size_t>(t)];
    if (open_bytes > 0 && open_bytes + task.nbytes > chunk_bytes) {
      close_chunk(open_piece, open_bytes);
      open_piece = static_cast<int32_t>(draft_.pieces.size());
      open_bytes = 0;
    }
    const int64_t element = problems_[static_cast<size_t>(task.tensor)].element_bytes;
    if (task.nbytes / chunk_bytes > kMaxHops) {
      throw LayoutError("chunks of " + std::to_string(chunk_bytes) + " bytes cut a box of " +
                        std::to_string(task.nbytes) + " bytes into more than " + std::to_string(kMaxHops) +
                        " chunks: choose larger chunks");
    }
    const std::vector<Box> boxes = cut_box(task.box, std::max<int64_t>(1, chunk_bytes / element));
    for (const Box& box : boxes) {
      draft_.pieces.push_back({task.tensor, t, box});
      open_bytes += box.volume() * element;
      // A box that had to be cut fills its chunks alone; only small ones share.
      if (boxes.size() > 1) {
        close_chunk(open_piece, open_bytes);
        open_piece = static_cast<int32_t>(draft_.pieces.size());
        open_bytes = 0;
      }
    }
  }
  if (open_bytes > 0) close_chunk(open_piece, open_bytes);
  range.last = static_cast<int32_t>(draft_.chunks.size());
  return range;
}

int32_t Drafter::add_chunk(const ChunkPiece* begin, const ChunkPiece* end, int64_t nbytes) {
  const auto first = static_cast<int32_t>(draft_.pieces.size());
  draft_.pieces.insert(draft_.pieces.end(), begin, end);
  close_chunk(first, nbytes);
  return static_cast<int32_t>(draft_.chunks.size()) - 1;
}

UnitCutter::UnitCutter(const Bundle& bundle, const std::vector<Task>& tasks,
                       const std::vector<Problem>& problems, int64_t unit_bytes) {
  for (const int32_t t : bundle.tasks) {
    const Task& task = tasks[static_cast<size_t>(t)];
    const int64_t element = problems[static_cast<size_t>(task.tensor)].element_bytes;
    for (const Box& box : cut_box(task.box, std::max<int64_t>(1, unit_bytes / element))) {
      units_.push_back({task.tensor, t, box});
      unit_bytes_.push_back(box.volume() * element);
    }
  }
}

int32_t UnitCutter::next(int64_t nbytes, Drafter* drafter) {
  joined_.clear();
  int64_t have = 0;
  // A unit that would exceed the size by more than half of the unit is left for the next chunk.
  while (!done() && (have == 0 || have + unit_bytes_[at_] / 2 <= nbytes)) {
    if (joined_.empty() || joined_.back().task != units_[at_].task ||
        !join_boxes(units_[at_].box, &joined_.back().box)) {
      joined_.push_back(units_[at_]);
    }
    have += unit_bytes_[at_++];
  }
  return drafter->add_chunk(joined_.data(), joined_.data() + joined_.size(), have);
}

void Drafter::check_room(size_t hops) const {
  if (static_cast<int64_t>(draft_.hops.size() + hops) <= kMaxHops) return;
  throw LayoutError("the plan needs more than " + std::to_string(kMaxHops) +
                    " hops: choose larger chunks or move the tensor in several steps");
}

void Drafter::pass_on(int32_t chunk, int32_t src, int32_t dst, int32_t after) {
  check_room(1);
  draft_.hops.push_back({network_.rank(src), network_.rank(dst), chunk, after});
}

void Drafter::send(int32_t chunk, const Route& route, int64_t order, int64_t due_ns) {
  const auto first = static_cast<int32_t>(draft_.hops.size());
  check_room(route.size());
  for (const Edge& edge : route) {
    Hop hop;
    hop.src = network_.rank(edge.src);
    hop.dst = network_.rank(edge.dst);
    hop.chunk = chunk;
    hop.after = edge.parent < 0 ? -1 : first + edge.parent;
    hop.reduce = edge.reduce;
    hop.last_reduce = edge.last_reduce;
    draft_.hops.push_back(hop);
    if (order >= 0) {
      draft_.order.resize(draft_.hops.size() - 1, 0);
      draft_.order.push_back(order);
    }
    if (due_ns >= 0) {
      draft_.due_ns.resize(draft_.hops.size() - 1, 0);
      draft_.due_ns.push_back(due_ns);
    }
  }
}

}  // namespace meshcast
