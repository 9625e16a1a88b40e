#include "plan/reduce_router.h"
#include "plan/strategies.h"
#include "plan/tree_builder.h"

namespace meshcast {

Draft draft_multicast(const Inputs& in, const LaneDemand& demand, TreeStyle style) {
  Drafter drafter(in.tasks, in.problems, in.network);
  TreeBuilder trees(demand, in.network, style.fan);
  for (size_t b = 0; b < in.bundles.size(); ++b) {
    const Bundle& bundle = in.bundles[b];
    if (in.lead(bundle).reduce != ReduceOp::None) continue;
    const Drafter::Range chunks = drafter.cut(bundle, in.chunk_bytes);
    int64_t before = 0;
    for (int32_t c = chunks.first; c < chunks.last; ++c) {
      const int64_t nbytes = drafter.chunk_bytes(c);
      const auto due = static_cast<int64_t>(static_cast<__int128>(before) * demand.bound_ns / bundle.nbytes);
      drafter.send(c, trees.route(static_cast<int32_t>(b), bundle.nbytes, nbytes), -1, style.steady ? due : -1);
      before += nbytes;
    }
  }
  draft_reductions(in.tasks, in.bundles, in.network, in.chunk_bytes, &drafter);
  return drafter.take();
}

}  // namespace meshcast
