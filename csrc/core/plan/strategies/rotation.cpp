#include "plan/strategies/rotation.h"

#include <algorithm>
#include <numeric>
#include <tuple>
#include <utility>

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
  int32_t turn = 0;         // of the receiver's host
  int32_t turn_inside = 0;  // of the receiver among those of its host
};

// The ports that are linked with each other by sends: sets that have no port in common.
class LinkedPorts {
 public:
  explicit LinkedPorts(int32_t ports) : parent_(static_cast<size_t>(ports)) {
    std::iota(parent_.begin(), parent_.end(), 0);
  }

  int32_t find(int32_t port) {
    while (parent_[static_cast<size_t>(port)] != port) {
      int32_t& above = parent_[static_cast<size_t>(port)];
      above = parent_[static_cast<size_t>(above)];
      port = above;
    }
    return port;
  }

  void link(int32_t a, int32_t b) {
    const int32_t root = find(a);
    parent_[static_cast<size_t>(find(b))] = root;
  }

 private:
  std::vector<int32_t> parent_;
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
  LinkedPorts sets(network.port_count());
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

}  // namespace

Draft draft_rotation(const Inputs& in) {
  // Phase 1: who sends what to whom, as send_recv has it.
  Drafter drafter(in.tasks, in.problems, in.network);
  SenderLoads loads(in.network);
  std::vector<Send> sends;
  for (const Bundle& bundle : in.bundles) {
    const Task& task = in.lead(bundle);
    const Drafter::Range chunks = drafter.cut(bundle, in.chunk_bytes);
    for (const int32_t receiver : task.receivers) {
      Send send;
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
  std::stable_sort(sends.begin(), sends.end(), [](const Send& a, const Send& b) {
    return std::tie(a.turn, a.turn_inside) < std::tie(b.turn, b.turn_inside);
  });
  for (const Send& send : sends)
    for (int32_t c = send.chunks.first; c < send.chunks.last; ++c)
      drafter.send(c, {Edge{send.src, send.dst, -1}});
  return drafter.take();
}

}  // namespace meshcast
