#include "boxes/batches.h"

namespace meshcast::cuda::testing {

Batch random_batch(std::mt19937& rng, size_t boxes, int64_t from_bytes, int64_t to_bytes, bool aligned) {
  Batch out;
  std::vector<RandomPair> drawn;
  size_t from_size = 64;
  size_t to_size = 64;
  const auto place = [&](StridedView* view, size_t size, size_t* end) {
    view->data = reinterpret_cast<std::byte*>(reinterpret_cast<uintptr_t>(view->data) + *end);
    *end += (size + 31) / 16 * 16;
  };
  for (size_t i = 0; i < boxes; ++i) {
    RandomPair pair = random_pair(rng, from_bytes, to_bytes, aligned);
    place(&pair.from, pair.from_size, &from_size);
    place(&pair.to, pair.to_size, &to_size);
    drawn.push_back(pair);
  }
  out.arenas.emplace_back(from_size);
  out.arenas.emplace_back(to_size);
  for (auto& b : out.source().bytes) b = static_cast<std::byte>(rng());
  for (auto& b : out.destination().bytes) b = static_cast<std::byte>(rng());
  for (RandomPair& pair : drawn) {
    pair.from.data = out.source().begin() + reinterpret_cast<uintptr_t>(pair.from.data);
    pair.to.data = out.destination().begin() + reinterpret_cast<uintptr_t>(pair.to.data);
    out.pairs.push_back({pair.from, pair.to});
  }
  return out;
}

std::vector<uint8_t> owned_bytes(const Arena& arena, const std::vector<BoxPair>& pairs, bool from) {
  std::vector<uint8_t> owned(arena.bytes.size());
  for (const BoxPair& pair : pairs) {
    const StridedView& view = from ? pair.from : pair.to;
    if (view.nbytes() == 0) continue;
    for (const std::byte* at : element_addresses(view)) {
      for (int64_t i = 0; i < view.element_bytes; ++i) ++owned[arena.index(at + i)];
    }
  }
  return owned;
}

Limits random_limits(std::mt19937& rng) {
  Limits limits;
  if (rng() % 3 == 0) limits.most_pieces = 5 + static_cast<int64_t>(rng() % 100);
  if (rng() % 2 == 0) limits.many_pieces = 1;
  return limits;
}

}  // namespace meshcast::cuda::testing
