#include "boxes/host_launch.h"

#include <algorithm>
#include <numeric>

namespace meshcast::cuda::testing {
namespace {

// Lays the extents out in memory: in random order with margins, or packed. Gives the bytes from the first to
// past the last, and moves the view's start to its offset inside them.
size_t lay_out(std::mt19937& rng, StridedView* view, bool packed, bool aligned) {
  std::vector<int> order(static_cast<size_t>(view->ndim));
  std::iota(order.rbegin(), order.rend(), 0);  // the last dimension first
  if (!packed && rng() % 2 == 0) std::shuffle(order.begin(), order.end(), rng);
  int64_t stride = view->element_bytes;
  int64_t offset = aligned ? 16 * static_cast<int64_t>(rng() % 3) : static_cast<int64_t>(rng() % 40);
  if (!packed && !aligned && rng() % 4 == 0) stride += static_cast<int64_t>(rng() % 7);
  int margins = 2;  // more of them would make regions of gigabytes
  for (const int d : order) {
    const bool wide = !packed && margins > 0 && rng() % 2 == 0;
    const auto margin = wide ? (1 + static_cast<int64_t>(rng() % 2)) * (aligned ? 16 : 1) : 0;
    if (wide) --margins;
    view->stride[d] = stride;
    offset += static_cast<int64_t>(rng() % static_cast<uint64_t>(margin + 1)) * stride;
    stride *= view->extent[d] + margin;
  }
  view->data = reinterpret_cast<std::byte*>(offset);
  int64_t end = offset + view->element_bytes;
  for (int d = 0; d < view->ndim; ++d) end += std::max<int64_t>(view->extent[d] - 1, 0) * view->stride[d];
  return static_cast<size_t>(end);
}

}  // namespace

RandomPair random_pair(std::mt19937& rng, int64_t from_bytes, int64_t to_bytes, bool aligned) {
  RandomPair out;
  out.from.ndim = out.to.ndim = static_cast<int>(rng() % (kMaxDims + 1));
  out.from.element_bytes = from_bytes;
  out.to.element_bytes = to_bytes;
  int64_t budget = 600;  // elements
  for (int d = out.from.ndim - 1; d >= 0; --d) {
    // One long dimension now and then, and sizes of one and none.
    const int64_t most = rng() % 4 == 0 ? 100 : 5;
    int64_t extent = 1 + static_cast<int64_t>(rng() % static_cast<uint64_t>(std::min(most, budget)));
    if (aligned && d == out.from.ndim - 1) extent = std::min<int64_t>(16 * extent, 160);
    if (rng() % 60 == 0) extent = 0;
    out.from.extent[d] = out.to.extent[d] = extent;
    budget = std::max<int64_t>(budget / std::max<int64_t>(extent, 1), 1);
  }
  const auto packed = rng() % 3;  // pack, unpack, or neither side packed
  out.from_size = lay_out(rng, &out.from, packed == 0, aligned);
  out.to_size = lay_out(rng, &out.to, packed == 1, aligned);
  return out;
}

std::vector<std::byte*> element_addresses(const StridedView& view) {
  std::vector<std::byte*> out{view.data};
  for (int d = 0; d < view.ndim; ++d) {
    std::vector<std::byte*> next;
    for (std::byte* base : out) {
      for (int64_t i = 0; i < view.extent[d]; ++i) next.push_back(base + i * view.stride[d]);
    }
    out = std::move(next);
  }
  return out;
}

}  // namespace meshcast::cuda::testing
