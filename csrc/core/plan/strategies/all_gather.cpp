#include <algorithm>

#include "plan/strategies/reductions.h"
#include "plan/strategies/senders.h"
#include "plan/strategies/strategies.h"

namespace meshcast {
namespace {

// Chunk `i` of `n` belongs to part i * parts / n: parts differ by at most one chunk, and none is empty if there
// are enough chunks. Bytes need not divide by the number of receivers.
size_t part_of(int32_t i, int32_t n, size_t parts) {
  return static_cast<size_t>(static_cast<int64_t>(i) * static_cast<int64_t>(parts) / n);
}

// Passes the chunk once round `ring`, starting after the member that got it by the route's last edge.
void pass_round(const std::vector<int32_t>& ring, size_t start, Route* route) {
  for (size_t k = 1; k < ring.size(); ++k) {
    const int32_t src = ring[(start + k - 1) % ring.size()];
    const int32_t dst = ring[(start + k) % ring.size()];
    route->push_back({src, dst, static_cast<int32_t>(route->size()) - 1});
  }
}

// Small enough for each receiver to get its own part.
int64_t part_bytes(const Inputs& in, const Bundle& bundle, size_t parts) {
  const int64_t part = bundle.nbytes / static_cast<int64_t>(parts);
  return std::max<int64_t>(1, std::min(in.chunk_bytes, part));
}

}  // namespace

// The scatter is in the first edge of each route, the ring in the others: part p of the box goes to member p,
// and from there round the ring. With k members every link of the ring carries (k - 1) / k of the box.
Draft draft_local_all_gather(const Inputs& in) {
  Drafter drafter(in.tasks, in.problems, in.network);
  SenderLoads loads(in.network);
  for (const Bundle& bundle : in.bundles) {
    const Task& task = in.lead(bundle);
    if (task.reduce != ReduceOp::None) continue;
    const Parties parties = find_parties(task, in.network);
    size_t most = 1;
    for (const Party& party : parties.receivers) most = std::max(most, party.ranks.size());
    const Drafter::Range chunks = drafter.cut(bundle, part_bytes(in, bundle, most));
    const int32_t n = chunks.last - chunks.first;
    for (const Party& party : parties.receivers) {
      const size_t parts = party.ranks.size();
      std::vector<int32_t> sender(parts, -1);
      for (int32_t i = 0; i < n; ++i) {
        const size_t part = part_of(i, n, parts);
        if (sender[part] < 0) {
          sender[part] =
              loads.choose(task.holders, party.ranks[part], bundle.nbytes / static_cast<int64_t>(parts));
        }
        Route route{{sender[part], party.ranks[part], -1}};
        pass_round(party.ranks, part, &route);
        drafter.send(chunks.first + i, route);
      }
    }
  }
  draft_reductions(in, -1, false, &drafter);
  return drafter.take();
}

Draft draft_global_all_gather(const Inputs& in) {
  Drafter drafter(in.tasks, in.problems, in.network);
  SenderLoads loads(in.network);
  for (const Bundle& bundle : in.bundles) {
    const Task& task = in.lead(bundle);
    if (task.reduce != ReduceOp::None) continue;
    std::vector<int32_t> ring;  // host by host
    for (const Party& party : find_parties(task, in.network).receivers) {
      ring.insert(ring.end(), party.ranks.begin(), party.ranks.end());
    }
    const Drafter::Range chunks = drafter.cut(bundle, part_bytes(in, bundle, ring.size()));
    const int32_t n = chunks.last - chunks.first;
    std::vector<int32_t> sender(ring.size(), -1);
    for (int32_t i = 0; i < n; ++i) {
      const size_t part = part_of(i, n, ring.size());
      if (sender[part] < 0) {
        sender[part] =
            loads.choose(task.holders, ring[part], bundle.nbytes / static_cast<int64_t>(ring.size()));
      }
      Route route{{sender[part], ring[part], -1}};
      pass_round(ring, part, &route);
      drafter.send(chunks.first + i, route);
    }
  }
  draft_reductions(in, -1, false, &drafter);
  return drafter.take();
}

}  // namespace meshcast
