#include "plan/strategies/rotation.h"

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "plan/strategies/turns.h"

namespace meshcast {
namespace {

// Lets some receivers of a host get a bundle from another receiver there: as many as the ports inside can serve
// while NICs bring the rest. These are the last receivers of a turn, the same number for each sender, so that
// the other sends of the turn still do not meet.
//
// Example. In a turn, senders 0 to 3 send to host 0 with 4 NICs, sender j to rank (j + t) mod 4 in step t. If
// one of four is copied inside, step 3 is dropped: rank j, which has the chunk first, passes it on to the rank
// j - 1.
class CopiesInside {
 public:
  explicit CopiesInside(const Inputs& in) : network_(in.network) {
    // The receivers that share each NIC.
    sharing_.assign(static_cast<size_t>(network_.nic_count()), 0);
    std::vector<char> seen(static_cast<size_t>(network_.rank_count()), 0);
    for (const Bundle& bundle : in.bundles) {
      for (const int32_t receiver : in.lead(bundle).receivers) {
        const int32_t rank = network_.index(receiver);
        char& known = seen[static_cast<size_t>(rank)];
        if (known == 0) ++sharing_[static_cast<size_t>(network_.nic(rank))];
        known = 1;
      }
    }
  }

  // `sends`: of one bundle to one other host. Keeps those over NICs.
  void share_out(std::vector<Send>* sends) const {
    const auto count = static_cast<int64_t>(sends->size());
    const Send& first = sends->front();
    const double nic = static_cast<double>(network_.port_rate(first.in)) /
                       sharing_[static_cast<size_t>(network_.nic(first.dst))];
    const auto local = static_cast<double>(network_.port_rate(network_.local_in(first.dst)));
    const double each = kUsed * local / (local + nic) * static_cast<double>(count);  // copies, of a turn
    const auto until = [&](int32_t turn) { return static_cast<int64_t>(each * turn); };
    const int64_t copies = std::min(until(first.turn + 1) - until(first.turn), count / 2);
    std::sort(sends->begin(), sends->end(),
              [](const Send& a, const Send& b) { return a.turn_inside < b.turn_inside; });
    for (int64_t i = 0; i < copies; ++i)
      (*sends)[static_cast<size_t>(i)].copy_to = (*sends)[static_cast<size_t>(count - 1 - i)].dst;
    sends->resize(static_cast<size_t>(count - copies));
  }

 private:
  static constexpr double kUsed = 31.0 / 32;  // of the time of ports inside, whose first copies come late

  const Network& network_;
  std::vector<int32_t> sharing_;  // by NIC
};

void copy_inside(const Inputs& in, std::vector<Send>* sends) {
  std::map<std::pair<int32_t, int32_t>, std::vector<Send>> groups;  // bundle and host of the receivers
  std::vector<Send> out;
  for (const Send& send : *sends) {
    const int32_t host = in.network.host(send.dst);
    if (in.network.host(send.src) == host)
      out.push_back(send);
    else
      groups[{send.bundle, host}].push_back(send);
  }
  const CopiesInside inside(in);
  for (auto& [_, group] : groups) {
    inside.share_out(&group);
    out.insert(out.end(), group.begin(), group.end());
  }
  *sends = std::move(out);
}

Draft draft_rotation(const Inputs& in, bool with_copies) {
  Drafter drafter(in.tasks, in.problems, in.network);
  std::vector<Send> sends = choose_sends(in, &drafter);
  set_turns(in.network, &sends);
  if (with_copies) copy_inside(in, &sends);
  std::stable_sort(sends.begin(), sends.end(), earlier);  // equal turns keep the order of bundles
  Route route;
  for (const Send& send : sends) {
    route.assign(1, Edge{send.src, send.dst, -1});
    if (send.copy_to >= 0) route.push_back({send.dst, send.copy_to, 0});
    for (int32_t c = send.chunks.first; c < send.chunks.last; ++c) drafter.send(c, route);
  }
  return drafter.take();
}

}  // namespace

Draft draft_rotation(const Inputs& in) { return draft_rotation(in, false); }

Draft draft_rotation_with_copies(const Inputs& in) { return draft_rotation(in, true); }

}  // namespace meshcast
