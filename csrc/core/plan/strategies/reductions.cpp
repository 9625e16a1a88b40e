#include "plan/strategies/reductions.h"

#include <algorithm>

#include "plan/strategies/reduce_router.h"
#include "plan/strategies/strategies.h"

namespace meshcast {
namespace {

constexpr int kMostPasses = 12;          // over all chunks, to choose again
constexpr int64_t kMostEdges = 120'000;  // of routes chosen again, all passes together
constexpr int64_t kClose = 256;          // a busiest port within 1/256 of the bound is good enough
constexpr int64_t kGain = 256;           // the part that a pass must save for another to follow: 1/256

struct ReducedChunk {
  const Task* task = nullptr;
  const std::vector<WayPart>* ways = nullptr;
  int64_t nbytes = 0;
  int32_t turn = 0;  // among the chunks of its bundle
  int32_t way = -1;
};

// Chunks take the ways of their box in turn: each takes the one that is furthest behind its part.
class WayTurns {
 public:
  explicit WayTurns(const std::vector<WayPart>& ways) : ways_(ways), given_(ways.size(), 0) {
    for (const WayPart& way : ways) all_ += way.part;
  }
  int32_t next(int64_t nbytes) {
    if (all_ == 0) return -1;
    sent_ += nbytes;
    int32_t best = -1;
    __int128 most = 0;
    for (size_t i = 0; i < ways_.size(); ++i) {
      const __int128 behind =
          static_cast<__int128>(sent_) * ways_[i].part - static_cast<__int128>(given_[i]) * all_;
      if (best >= 0 && behind <= most) continue;
      best = static_cast<int32_t>(i);
      most = behind;
    }
    given_[static_cast<size_t>(best)] += nbytes;
    return best;
  }

 private:
  const std::vector<WayPart>& ways_;
  std::vector<int64_t> given_;  // bytes
  int64_t all_ = 0, sent_ = 0;
};

// Routes chunks in turn, one of every bundle first, then again while that helps the busiest port. With `mixed`,
// the first choice follows the mixture of ways that would be best for boxes as a whole. Phase 1 routes every
// chunk on top of those before it. Phase 2 removes each and routes it again on top of all others, since the
// first ones were chosen when the ports were still empty.
RoutedChunks choose_routes(const std::vector<ReducedChunk>& chunks, const std::vector<size_t>& order,
                           bool mixed, int64_t bound_ns, const Network& network) {
  ReduceRouter router(network);
  RoutedChunks out;
  out.routes.resize(chunks.size());
  int64_t edges = 0;
  for (const size_t i : order) {
    const ReducedChunk& chunk = chunks[i];
    out.routes[i] = router.route(*chunk.task, chunk.nbytes, *chunk.ways, mixed ? chunk.way : -1);
    edges += static_cast<int64_t>(out.routes[i].size());
  }
  int64_t before = router.busiest_ns();
  for (int pass = 1; pass <= kMostPasses && pass * edges <= kMostEdges; ++pass) {
    if (before <= bound_ns + bound_ns / kClose) break;
    if (mixed || pass > 1 || 2 * edges > kMostEdges) router.mind_the_busiest();
    bool better = false;
    for (const size_t i : order) {
      const ReducedChunk& chunk = chunks[i];
      better = router.improve(*chunk.task, chunk.nbytes, *chunk.ways, &out.routes[i]) || better;
    }
    const int64_t now = router.busiest_ns();
    if (!better && pass > 1) break;
    if (pass > 2 && now > before - before / kGain) break;
    before = now;
  }
  out.busiest_ns = router.busiest_ns();
  return out;
}

// The routes whose busiest port is done first, or the others: only a schedule shows which are better.
const RoutedChunks& find_routes(const std::vector<ReducedChunk>& chunks, bool second, const Inputs& in) {
  std::vector<size_t> order(chunks.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return chunks[a].turn < chunks[b].turn; });
  const auto find = [&](bool mixed) -> const RoutedChunks& {
    const auto [known, fresh] = in.reductions->try_emplace({in.chunk_bytes, mixed});
    if (fresh) known->second = choose_routes(chunks, order, mixed, in.bound_ns, in.network);
    return known->second;
  };
  const RoutedChunks& by_rules = find(false);
  const bool any_ways =
      std::any_of(chunks.begin(), chunks.end(), [](const ReducedChunk& chunk) { return chunk.way >= 0; });
  if (!any_ways) return by_rules;
  const bool close = by_rules.busiest_ns <= in.bound_ns + in.bound_ns / kClose;
  // Ways of the linear program are best for boxes as a whole; for single chunks the rules may be as good, and
  // they cost less time.
  const bool mixed = !close && find(true).busiest_ns < by_rules.busiest_ns;
  return find(mixed != second);
}

}  // namespace

void draft_reductions(const Inputs& in, int64_t bound_ns, bool second, Drafter* drafter) {
  std::vector<ReducedChunk> chunks;
  std::vector<int32_t> numbers;
  std::vector<int64_t> due_ns;
  for (const Bundle& bundle : in.bundles) {
    const Task& task = in.lead(bundle);
    if (task.reduce == ReduceOp::None) continue;
    const Drafter::Range range = drafter->cut(bundle, in.chunk_bytes);
    const std::vector<WayPart>& ways = in.ways[static_cast<size_t>(&bundle - in.bundles.data())];
    int64_t before = 0;
    WayTurns turns(ways);
    for (int32_t c = range.first; c < range.last; ++c) {
      const int64_t nbytes = drafter->chunk_bytes(c);
      chunks.push_back({&task, &ways, nbytes, c - range.first, turns.next(nbytes)});
      numbers.push_back(c);
      const auto due = static_cast<int64_t>(static_cast<__int128>(before) * bound_ns / bundle.nbytes);
      due_ns.push_back(bound_ns < 0 ? -1 : due);
      before += drafter->chunk_bytes(c);
    }
  }
  if (chunks.empty()) return;
  const RoutedChunks& routed = find_routes(chunks, second, in);
  for (size_t i = 0; i < chunks.size(); ++i) drafter->send(numbers[i], routed.routes[i], -1, due_ns[i]);
}

}  // namespace meshcast
