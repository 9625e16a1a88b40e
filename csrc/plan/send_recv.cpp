#include <tuple>

#include "plan/strategies.h"

namespace meshcast {

Draft draft_send_recv(const Inputs& in) {
  Drafter drafter(in.tasks, in.problems, in.network);
  std::vector<int64_t> rank_load(static_cast<size_t>(in.network.rank_count()), 0);
  std::vector<int64_t> nic_load(static_cast<size_t>(in.network.nic_count()), 0);
  for (const Bundle& bundle : in.bundles) {
    const Task& task = in.lead(bundle);
    const Drafter::Range chunks = drafter.cut(bundle, in.chunk_bytes);
    for (const int32_t receiver : task.receivers) {
      const int32_t dst = in.network.index(receiver);
      int32_t src = -1;
      std::tuple<bool, int64_t, int64_t> best;
      for (const int32_t holder : task.holders) {
        const int32_t h = in.network.index(holder);
        const bool far = in.network.host(h) != in.network.host(dst);
        const std::tuple<bool, int64_t, int64_t> load{far, far ? nic_load[static_cast<size_t>(in.network.nic(h))] : 0,
                                                      rank_load[static_cast<size_t>(h)]};
        if (src < 0 || load < best) {
          src = h;
          best = load;
        }
      }
      rank_load[static_cast<size_t>(src)] += bundle.nbytes;
      if (std::get<0>(best)) nic_load[static_cast<size_t>(in.network.nic(src))] += bundle.nbytes;
      for (int32_t c = chunks.first; c < chunks.last; ++c) drafter.send(c, {Edge{src, dst}});
    }
  }
  return drafter.take();
}

}  // namespace meshcast
