#include <algorithm>
#include <map>
#include <set>
#include <tuple>

#include "plan/bound/port_items.h"

namespace meshcast {
namespace {

// One box to be reduced among places, which are hosts or, inside one host, its ranks. Every hop goes from one
// place to another, over a port out of the first and a port into the second.
class ReduceCount {
 public:
  ReduceCount(PortItem::Kind out_kind, PortItem::Kind in_kind, int32_t bundle, int64_t nbytes)
      : out_kind_(out_kind), in_kind_(in_kind), bundle_(bundle), nbytes_(nbytes) {}

  void add_holder(int32_t place, int32_t value, int32_t out, int32_t in) {
    values_[place].insert(value);
    out_of_[place].insert(out);
    into_[place].insert(in);
  }
  void add_receiver(int32_t place, int32_t out, int32_t in) {
    needing_.insert(place);
    out_of_[place].insert(out);
    into_[place].insert(in);
    into_receivers_[place].insert(in);
  }

  // Entering ports are counted in one of two ways, each valid alone: see append_reduce_items.
  void append(int64_t all, bool whole_results, std::vector<PortItem>* out) const;

 private:
  template <typename Takes>
  void add(PortItem::Kind kind, const std::map<int32_t, std::set<int32_t>>& ports_of, int64_t copies,
           const Takes& takes, std::vector<PortItem>* out) const {
    if (copies <= 0) return;
    std::set<int32_t> ports;
    for (const auto& [place, here] : ports_of) {
      if (takes(place)) ports.insert(here.begin(), here.end());
    }
    PortItem item;
    item.kind = kind;
    item.bundle = bundle_;
    item.nbytes = nbytes_;
    item.copies = copies;
    item.emitters = static_cast<int32_t>(ports.size());
    item.ports.assign(ports.begin(), ports.end());
    out->push_back(std::move(item));
  }

  const PortItem::Kind out_kind_, in_kind_;
  const int32_t bundle_;
  const int64_t nbytes_;
  std::map<int32_t, std::set<int32_t>> values_, out_of_, into_, into_receivers_;  // by place
  std::set<int32_t> needing_;
};

// Let Q be the least number of places to visit for all values, and R the number of places that need the result
// and cannot make it alone. Then Q - 1 hops bring the values together and R hops send the result, one less if a
// place may be both the last of the first and the first of the second.
void ReduceCount::append(int64_t all, bool whole_results, std::vector<PortItem>* out) const {
  // Phase 1: Q. Hosts are sorted by their number of values: however values overlap, the first k places give at
  // most the sum of the k largest counts, so a cover has at least as many places as that sum needs to reach
  // `all`.
  std::vector<int64_t> counts;
  std::map<int32_t, std::set<int32_t>> places_of;  // value -> places
  bool does_both = false;
  for (const auto& [place, here] : values_) {
    counts.push_back(-static_cast<int64_t>(here.size()));
    for (const int32_t value : here) places_of[value].insert(place);
    does_both = does_both || needing_.count(place) != 0;
  }
  std::sort(counts.begin(), counts.end());
  int64_t visits = 0;
  for (int64_t covered = 0; covered < all; ++visits) covered -= counts[static_cast<size_t>(visits)];
  // The second count is a packing: if no place has two of a set of values, one visit serves at most one of
  // them, so each has to be fetched from a different place. Values that few places have come first. A value is
  // wanted elsewhere if a place needs the result and does not have the value.
  //
  // Example. Places A {0, 1}, B {1, 2}, C {2, 3}, D {3, 0}: counts of two, so Q is at least 2 of four values. 0
  // is at A and D, 2 at B and C: no place has both, so also two visits. If C had only {2} and D only {3}, no
  // place would have two of 2 (B, C), 3 (D) and 0 (A): three visits, while the counts 2 + 2 still give two.
  const auto wanted = [&](const std::set<int32_t>& places) {
    return std::any_of(needing_.begin(), needing_.end(), [&](int32_t p) { return places.count(p) == 0; });
  };
  std::vector<std::tuple<bool, size_t, int32_t>> rarest;
  for (const auto& [value, places] : places_of) rarest.emplace_back(!wanted(places), places.size(), value);
  std::sort(rarest.begin(), rarest.end());
  std::vector<std::set<int32_t>> apart;
  std::set<int32_t> taken;
  for (const auto& [unwanted, count, value] : rarest) {
    const std::set<int32_t>& places = places_of[value];
    if (std::any_of(places.begin(), places.end(), [&](int32_t p) { return taken.count(p) != 0; })) continue;
    taken.insert(places.begin(), places.end());
    apart.push_back(places);
  }
  // Phase 2: R, and the total hops. `does_both` may be too generous (the root need not be such a place): then
  // the count is lower than it could be, which is valid for a bound.
  visits = std::max(visits, static_cast<int64_t>(apart.size()));
  const auto alone_makes_it = [&](int32_t place) {
    const auto here = values_.find(place);
    return here != values_.end() && static_cast<int64_t>(here->second.size()) == all;
  };
  const auto has_values = [&](int32_t place) { return values_.count(place) != 0; };
  int64_t remote = 0;  // R
  for (const int32_t place : needing_) remote += !alone_makes_it(place);
  const int64_t copies = visits == 1 ? remote : visits - 1 + remote - does_both;
  if (copies == 0) return;
  // Phase 3: the ports out. Each item lists ports, one of which has to carry the hop; fewer ports make the
  // bound tighter. A value has to leave the places that have it if any other needs the result. All hops of the
  // reduction leave places that have values, and so does the result if any other place needs it.
  int64_t from_values = std::min(copies, visits == 1 ? 1 : visits - 1 + (remote > does_both));
  int64_t relayed = copies;
  for (const std::set<int32_t>& places : apart) {
    if (!wanted(places) || relayed == 0) continue;
    add(
        out_kind_, out_of_, 1, [&](int32_t place) { return places.count(place) != 0; }, out);
    --relayed;
    --from_values;
  }
  from_values = std::clamp<int64_t>(from_values, 0, relayed);
  add(out_kind_, out_of_, from_values, has_values, out);
  add(
      out_kind_, out_of_, relayed - from_values, [](int32_t) { return true; }, out);

  // Phase 4: the ports in, by one of two arguments.
  int64_t entered = 0;
  if (whole_results) {
    // All except one of the places that need the result get it whole, and only over ports of receivers.
    const auto may_end = [&](int32_t place) { return needing_.count(place) != 0 && !alone_makes_it(place); };
    add(in_kind_, into_receivers_, remote - does_both, may_end, out);
    entered = std::max<int64_t>(0, remote - does_both);
  } else {
    for (const int32_t needs : needing_) {
      if (alone_makes_it(needs)) continue;
      add(
          in_kind_, into_, 1, [needs](int32_t place) { return place == needs; }, out);
      ++entered;
    }
  }
  // The other hops of the reduction enter places that have values.
  add(in_kind_, into_, copies - entered, has_values, out);
}

}  // namespace

void append_reduce_items(int32_t bundle, int64_t nbytes, const Task& task, const Network& network,
                         bool whole_results, std::vector<PortItem>* out) {
  const int64_t all = 1 + *std::max_element(task.contribution.begin(), task.contribution.end());
  ReduceCount hosts(PortItem::Kind::NicOut, PortItem::Kind::NicIn, bundle, nbytes);
  std::map<int32_t, std::set<int32_t>> values;      // by host
  std::map<int32_t, std::vector<int32_t>> needing;  // by host
  for (size_t i = 0; i < task.holders.size(); ++i) {
    const int32_t r = network.index(task.holders[i]);
    hosts.add_holder(network.host(r), task.contribution[i], network.nic_out(network.nic(r)),
                     network.nic_in(network.nic(r)));
    values[network.host(r)].insert(task.contribution[i]);
  }
  for (const int32_t rank : task.receivers) {
    const int32_t r = network.index(rank);
    hosts.add_receiver(network.host(r), network.nic_out(network.nic(r)), network.nic_in(network.nic(r)));
    needing[network.host(r)].push_back(r);
  }
  hosts.append(all, whole_results, out);
  // Creates an empty list if there is none: that host reduces, even if no rank of it needs the result.
  if (values.size() == 1) needing[values.begin()->first];  // the only host that can reduce, needed there or not
  // A host that has every value and needs the result makes it inside: there, ranks are the places.
  for (const auto& [host, receivers] : needing) {
    const auto here = values.find(host);
    if (here == values.end() || static_cast<int64_t>(here->second.size()) < all) continue;
    ReduceCount ranks(PortItem::Kind::Local, PortItem::Kind::Local, bundle, nbytes);
    for (size_t i = 0; i < task.holders.size(); ++i) {
      const int32_t r = network.index(task.holders[i]);
      if (network.host(r) == host)
        ranks.add_holder(r, task.contribution[i], network.local_out(r), network.local_in(r));
    }
    for (const int32_t r : receivers) ranks.add_receiver(r, network.local_out(r), network.local_in(r));
    ranks.append(all, whole_results, out);
  }
}

void append_reduce_rank_items(int32_t bundle, int64_t nbytes, const Task& task, const Network& network,
                              bool whole_results, std::vector<PortItem>* out) {
  ReduceCount ranks(PortItem::Kind::Local, PortItem::Kind::Local, bundle, nbytes);
  for (size_t i = 0; i < task.holders.size(); ++i) {
    const int32_t r = network.index(task.holders[i]);
    const int32_t nic = network.nic(r);
    ranks.add_holder(r, task.contribution[i], network.local_out(r), network.local_in(r));
    ranks.add_holder(r, task.contribution[i], network.nic_out(nic), network.nic_in(nic));
  }
  for (const int32_t rank : task.receivers) {
    const int32_t r = network.index(rank);
    const int32_t nic = network.nic(r);
    ranks.add_receiver(r, network.local_out(r), network.local_in(r));
    ranks.add_receiver(r, network.nic_out(nic), network.nic_in(nic));
  }
  const int64_t all = 1 + *std::max_element(task.contribution.begin(), task.contribution.end());
  ranks.append(all, whole_results, out);
}

}  // namespace meshcast
