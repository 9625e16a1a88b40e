#include "plan/reductions.h"

#include <algorithm>

#include "plan/reduce_router.h"
#include "plan/strategies.h"

namespace meshcast {
namespace {

constexpr int kMostPasses = 4;          // over all chunks, choosing again
constexpr int64_t kMostEdges = 40'000;  // of routes chosen again, all passes together

struct ReducedChunk {
  const Task* task = nullptr;
  int64_t nbytes = 0;
  int32_t turn = 0;  // among the chunks of its bundle
};

// Chosen in turn, a chunk of every bundle first, then again while the sum of squared lane loads falls.
std::vector<Route> choose_routes(const std::vector<ReducedChunk>& chunks, const Network& network) {
  std::vector<size_t> order(chunks.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return chunks[a].turn < chunks[b].turn; });
  ReduceRouter router(network);
  std::vector<Route> out(chunks.size());
  int64_t edges = 0;
  for (const size_t i : order) {
    out[i] = router.route(*chunks[i].task, chunks[i].nbytes);
    edges += static_cast<int64_t>(out[i].size());
  }
  for (int pass = 1; pass <= kMostPasses && pass * edges <= kMostEdges; ++pass) {
    if (pass > 1 || 2 * edges > kMostEdges) router.mind_the_busiest();
    bool better = false;
    for (const size_t i : order) better = router.improve(*chunks[i].task, chunks[i].nbytes, &out[i]) || better;
    if (!better && pass > 1) break;
  }
  return out;
}

}  // namespace

void draft_reductions(const Inputs& in, int64_t bound_ns, Drafter* drafter) {
  std::vector<ReducedChunk> chunks;
  std::vector<int32_t> numbers;
  std::vector<int64_t> due_ns;
  for (const Bundle& bundle : in.bundles) {
    const Task& task = in.lead(bundle);
    if (task.reduce == ReduceOp::None) continue;
    const Drafter::Range range = drafter->cut(bundle, in.chunk_bytes);
    int64_t before = 0;
    for (int32_t c = range.first; c < range.last; ++c) {
      chunks.push_back({&task, drafter->chunk_bytes(c), c - range.first});
      numbers.push_back(c);
      const auto due = static_cast<int64_t>(static_cast<__int128>(before) * bound_ns / bundle.nbytes);
      due_ns.push_back(bound_ns < 0 ? -1 : due);
      before += drafter->chunk_bytes(c);
    }
  }
  if (chunks.empty()) return;
  const auto [known, fresh] = in.reductions->try_emplace(in.chunk_bytes);
  if (fresh) known->second = choose_routes(chunks, in.network);
  for (size_t i = 0; i < chunks.size(); ++i) drafter->send(numbers[i], known->second[i], -1, due_ns[i]);
}

}  // namespace meshcast
