#include "plan/strategies/rotation.h"

#include <algorithm>
#include <map>
#include <tuple>
#include <utility>
#include <vector>

#include "plan/disjoint_sets.h"
#include "plan/strategies/senders.h"

namespace meshcast {
namespace {

// All chunks of a bundle from one rank to one other.
struct Send {
  int32_t src = -1;  // dense rank indices
  int32_t dst = -1;
  int32_t out = -1;  // ports
  int32_t in = -1;
  Drafter::Range chunks;
  int32_t bundle = -1;
  int32_t copy_to = -1;     // another rank of that host, to which the receiver passes them on
  int32_t turn = 0;         // of the receiver's host
  int32_t turn_inside = 0;  // of the receiver among those of its host
};

// Numbers values within their groups, in ascending order: of (group, value) pairs added before.
class Numbers {
 public:
  void add(int64_t group, int32_t value) { all_.emplace_back(group, value); }

  void sort() {
    std::sort(all_.begin(), all_.end());
    all_.erase(std::unique(all_.begin(), all_.end()), all_.end());
  }

  int32_t count(int64_t group) const {
    const auto last = std::upper_bound(all_.begin(), all_.end(), std::pair{group, INT32_MAX});
    return static_cast<int32_t>(last - first(group));
  }

  int32_t number(int64_t group, int32_t value) const {
    return static_cast<int32_t>(std::lower_bound(all_.begin(), all_.end(), std::pair{group, value}) -
                                first(group));
  }

 private:
  std::vector<std::pair<int64_t, int32_t>>::const_iterator first(int64_t group) const {
    return std::lower_bound(all_.begin(), all_.end(), std::pair{group, INT32_MIN});
  }

  std::vector<std::pair<int64_t, int32_t>> all_;
};

// Example. Senders 0 to 5 send to all ranks of hosts 0 and 1 with 3 NICs each. In turn 0 the senders 0, 2 and 4
// send to host 0 and the others to host 1; in turn 1 the other way round. Within a turn, sender 2 is the second
// of those that send to its host: it begins with the second NIC there, and goes on to the third and the first.
void set_turns(const Network& network, std::vector<Send>* sends) {
  DisjointSets sets(network.port_count());  // ports that sends link with each other
  for (const Send& s : *sends) sets.link(s.out, s.in);
  // A host may have receivers in several sets.
  const auto place = [&](const Send& s) {
    return static_cast<int64_t>(sets.find(s.out)) * network.host_count() + network.host(s.dst);
  };
  Numbers senders, hosts, receivers;
  for (const Send& s : *sends) {
    senders.add(sets.find(s.out), s.out);
    hosts.add(sets.find(s.out), network.host(s.dst));
    receivers.add(place(s), s.in);
  }
  for (Numbers* each : {&senders, &hosts, &receivers}) each->sort();
  for (Send& s : *sends) {
    const int32_t set = sets.find(s.out);
    const int32_t sender = senders.number(set, s.out);
    const int32_t many = hosts.count(set);
    s.turn = (hosts.number(set, network.host(s.dst)) + many - sender % many) % many;
    const int32_t inside = receivers.count(place(s));
    s.turn_inside = (receivers.number(place(s), s.in) + inside - sender / many % inside) % inside;
  }
}

// Lets some receivers of a host get a bundle from another one there: as many as the ports inside can serve
// while NICs bring the rest. These are the last receivers of a turn, as many for each sender, so that the other
// sends of the turn still do not meet.
//
// Example. In a turn, senders 0 to 3 send to host 0 with 4 NICs, sender j to rank (j + t) mod 4 in step t.
// Where one of four is copied inside, step 3 falls away: rank j, which has the chunk first, passes it on to j
// - 1.
class CopiesInside {
 public:
  explicit CopiesInside(const Inputs& in) : network_(in.network) {
    // The NIC of a rank is shared by those that use it and take something in.
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

  // `sends`: of one bundle to one other host. Leaves those over NICs.
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
  static constexpr double kUsed = 31.0 / 32;  // of the time of ports inside: their first copies come late

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
  // Phase 1: who sends what to whom, as send_recv has it.
  Drafter drafter(in.tasks, in.problems, in.network);
  SenderLoads loads(in.network);
  std::vector<Send> sends;
  for (size_t b = 0; b < in.bundles.size(); ++b) {
    const Bundle& bundle = in.bundles[b];
    const Task& task = in.lead(bundle);
    const Drafter::Range chunks = drafter.cut(bundle, in.chunk_bytes);
    for (const int32_t receiver : task.receivers) {
      Send send;
      send.bundle = static_cast<int32_t>(b);
      send.dst = in.network.index(receiver);
      send.src = loads.choose(task.holders, send.dst, bundle.nbytes);
      const Network::Link link = in.network.link(send.src, send.dst);
      send.out = link.out;
      send.in = link.in;
      send.chunks = chunks;
      sends.push_back(send);
    }
  }
  // Phase 2: the order. Equal turns keep the order of bundles.
  set_turns(in.network, &sends);
  if (with_copies) copy_inside(in, &sends);
  std::stable_sort(sends.begin(), sends.end(), [](const Send& a, const Send& b) {
    return std::tie(a.turn, a.turn_inside) < std::tie(b.turn, b.turn_inside);
  });
  for (const Send& send : sends) {
    Route route{Edge{send.src, send.dst, -1}};
    if (send.copy_to >= 0) route.push_back({send.dst, send.copy_to, 0});
    for (int32_t c = send.chunks.first; c < send.chunks.last; ++c) drafter.send(c, route);
  }
  return drafter.take();
}

}  // namespace

Draft draft_rotation(const Inputs& in) { return draft_rotation(in, false); }

Draft draft_rotation_with_copies(const Inputs& in) { return draft_rotation(in, true); }

}  // namespace meshcast
