#include <tuple>

#include "plan/strategies/reductions.h"
#include "plan/strategies/senders.h"
#include "plan/strategies/strategies.h"

namespace meshcast {

int32_t SenderLoads::choose(const std::vector<int32_t>& holders, int32_t receiver, int64_t nbytes) {
  int32_t out = -1;
  std::tuple<bool, int64_t, int64_t> best;
  for (const int32_t holder : holders) {
    const int32_t h = network_.index(holder);
    const bool far = network_.host(h) != network_.host(receiver);
    const std::tuple<bool, int64_t, int64_t> load{
        far, far ? nic_load_[static_cast<size_t>(network_.nic(h))] : 0, rank_load_[static_cast<size_t>(h)]};
    if (out < 0 || load < best) {
      out = h;
      best = load;
    }
  }
  rank_load_[static_cast<size_t>(out)] += nbytes;
  if (std::get<0>(best)) nic_load_[static_cast<size_t>(network_.nic(out))] += nbytes;
  return out;
}

Draft draft_send_recv(const Inputs& in) {
  Drafter drafter(in.tasks, in.problems, in.network);
  SenderLoads loads(in.network);
  for (const Bundle& bundle : in.bundles) {
    const Task& task = in.lead(bundle);
    if (task.reduce != ReduceOp::None) continue;
    const Drafter::Range chunks = drafter.cut(bundle, in.chunk_bytes);
    for (const int32_t receiver : task.receivers) {
      const int32_t dst = in.network.index(receiver);
      const int32_t src = loads.choose(task.holders, dst, bundle.nbytes);
      for (int32_t c = chunks.first; c < chunks.last; ++c) drafter.send(c, {Edge{src, dst, -1}});
    }
  }
  draft_reductions(in, -1, false, &drafter);
  return drafter.take();
}

}  // namespace meshcast
