#include "plan/strategies/turns.h"

#include <algorithm>
#include <utility>

#include "plan/disjoint_sets.h"
#include "plan/strategies/senders.h"

namespace meshcast {
namespace {

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

}  // namespace

std::vector<Send> choose_sends(const Inputs& in, Drafter* drafter) {
  SenderLoads loads(in.network);
  std::vector<Send> out;
  for (size_t b = 0; b < in.bundles.size(); ++b) {
    const Bundle& bundle = in.bundles[b];
    const Task& task = in.lead(bundle);
    const Drafter::Range chunks = drafter->cut(bundle, in.chunk_bytes);
    for (const int32_t receiver : task.receivers) {
      Send send;
      send.bundle = static_cast<int32_t>(b);
      send.dst = in.network.index(receiver);
      send.src = loads.choose(task.holders, send.dst, bundle.nbytes);
      const Network::Link link = in.network.link(send.src, send.dst);
      send.out = link.out;
      send.in = link.in;
      send.chunks = chunks;
      out.push_back(send);
    }
  }
  return out;
}

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

}  // namespace meshcast
