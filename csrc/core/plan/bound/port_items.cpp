#include "plan/bound/port_items.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "plan/bound/sort_unique.h"
#include "plan/stable_order.h"

namespace meshcast {
namespace {

constexpr int kMaxPasses = 64;
constexpr int64_t kMaxSteps = 20'000'000;  // port visits of all passes together
constexpr size_t kFewLevels = 32;          // up to so many are sorted directly
constexpr int64_t kLongSteps = 1'000'000;  // port visits: some 20 ms

// As transfer_ns, for sums over ports.
int64_t ns_rounded_up(__int128 nbytes, __int128 rate) {
  if (nbytes < kFitsNs && rate < INT64_MAX)
    return transfer_ns(static_cast<int64_t>(nbytes), static_cast<int64_t>(rate));
  return static_cast<int64_t>((nbytes * 1000000000 + rate - 1) / rate);
}

// First `first`, then the ports of `second` that are not in it. Both are sorted and made unique. The order is
// part of the plan: all ranks must see the same ports in the same places. So both parts ascend, and a port in
// both counts as an emitter, which may do more.
void join(std::vector<int32_t> first, std::vector<int32_t> second, PortItem* item) {
  sort_unique(&first);
  sort_unique(&second);
  item->emitters = static_cast<int32_t>(first.size());
  item->ports = first;
  std::set_difference(second.begin(), second.end(), first.begin(), first.end(),
                      std::back_inserter(item->ports));
}

// Water-filling, item by item. With the load of every other item fixed, one item is placed best if the levels
// (load / rate, in ns) of all ports that take some of it are equal and no other port is lower. That lowers the
// sum of load^2 / rate over all ports, whose derivative by a port's load is twice its level. The sum is convex
// and each item has only its own constraints. So placing them in turns (block coordinate descent) ends at its
// minimum, where the busiest port is done as early as possible.
//
// Worked example. 70 bytes are poured over ports A (10 bytes/s, 20 bytes on it, level 2 s), B (20 bytes/s,
// empty, level 0 s) and C (10 bytes/s, 90 bytes, level 9 s). From the lowest level on:
//   B alone   (70 + 0) / 20            = 3.5 s, above A's level: A joins
//   B and A   (70 + 0 + 20) / (20 + 10) = 3 s, below C's level: C stays out
// B is filled to 3 * 20 = 60 bytes and gets 60; A is filled to 3 * 10 = 30 and gets 10. Both end at 3 s.
class Balancer {
 public:
  Balancer(const Network& network, std::vector<PortItem>* items)
      : network_(network), items_(*items), load_(static_cast<size_t>(network.port_count()), 0) {}

  int64_t run() {
    // Phase 1: empty shares, and the order in which items are placed.
    int64_t entries = 0;
    for (PortItem& item : items_) {
      item.share.assign(item.ports.size(), 0);
      entries += static_cast<int64_t>(item.ports.size());
    }
    // Items without a choice first, so that the others see their load at once. The order is stable, so that
    // items of one length keep the order of the bundles on every platform.
    std::vector<int64_t> lengths;
    lengths.reserve(items_.size());
    for (const PortItem& item : items_) lengths.push_back(static_cast<int64_t>(item.ports.size()));
    order_ = stable_order(lengths);
    // Phase 2: passes over all items until shares no longer change. Both limits bound the work only; a split
    // that is not quite balanced is still valid, and only costs time on the busiest port. Levels are whole
    // nanoseconds, so the bytes of one nanosecond of a port may move to and fro for ever. Long work ignores
    // those.
    int64_t in_a_ns = 0;
    for (int32_t port = 0; port < network_.port_count(); ++port)
      in_a_ns += network_.port_rate(port) / 1000000000;
    int64_t before = INT64_MAX;
    for (int pass = 0; pass < kMaxPasses && pass * entries < kMaxSteps; ++pass) {
      int64_t moved = 0;
      int64_t total = 0;
      for (const int32_t i : order_) moved += place(&items_[static_cast<size_t>(i)], &total);
      const int64_t now = highest();
      // Bytes may still move between ports that are not the busiest; a thousandth of them does not matter.
      const int64_t idle = total / 1000 + (pass * entries > kLongSteps ? in_a_ns : 0);
      if (moved <= idle && before - now <= now / 10000) break;
      before = now;
    }
    return highest();
  }

 private:
  // Nanoseconds until the port has carried its load, rounded down.
  int64_t level(int32_t port) const {
    const int64_t load = load_[static_cast<size_t>(port)];
    if (load >= 0 && load < kFitsNs) return load * 1000000000 / network_.port_rate(port);
    return static_cast<int64_t>(static_cast<__int128>(load) * 1000000000 / network_.port_rate(port));
  }

  int64_t highest() const {
    int64_t out = 0;
    for (int32_t port = 0; port < network_.port_count(); ++port) out = std::max(out, level(port));
    return out;
  }

  // If items pour over the same ports repeatedly, most levels already ascend. The few others are taken out,
  // each with a neighbour that may be the one out of place, sorted, and merged into the rest (Cook and Kim,
  // 1980).
  void sort_levels() {
    if (levels_.size() < kFewLevels) {
      std::sort(levels_.begin(), levels_.end());
      return;
    }
    apart_.clear();
    size_t kept = 0;
    for (const auto& each : levels_) {
      if (kept > 0 && each < levels_[kept - 1]) {
        apart_.push_back(levels_[--kept]);
        apart_.push_back(each);
      } else {
        levels_[kept++] = each;
      }
    }
    std::sort(apart_.begin(), apart_.end());
    // From the end, so that nothing is overwritten before it has moved.
    for (size_t at = levels_.size(); !apart_.empty(); --at) {
      if (kept > 0 && apart_.back() < levels_[kept - 1]) {
        levels_[at - 1] = levels_[--kept];
      } else {
        levels_[at - 1] = apart_.back();
        apart_.pop_back();
      }
    }
  }

  // Adds `amount` to the ports [begin, end) of an item so that the highest of them stays lowest.
  void pour(PortItem* item, size_t begin, size_t end, int64_t amount) {
    // Phase 1: ports by level, the lower index first among equals, so that all ranks pour in the same way.
    levels_.clear();
    for (size_t i = begin; i < end; ++i) levels_.emplace_back(level(item->ports[i]), static_cast<int32_t>(i));
    sort_levels();
    // Phase 2: the final level. Ports below the final level: the longest prefix whose common level passes its
    // own highest member. Products are compared, since the level itself would take a division for each port.
    __int128 bytes = amount;
    __int128 rate = 0;
    size_t used = 0;
    while (used < levels_.size()) {
      if (used > 0 && levels_[used].first * rate >= bytes * 1000000000) break;
      const int32_t port = item->ports[static_cast<size_t>(levels_[used].second)];
      bytes += load_[static_cast<size_t>(port)];
      rate += network_.port_rate(port);
      ++used;
    }
    const int64_t final_level = used > 0 ? ns_rounded_up(bytes, rate) : 0;
    // Phase 3: fill each of them up to it. The level was rounded up and the room is rounded down, so a few
    // bytes are left over; the last port takes them, since shares must add up to the item exactly.
    int64_t left = amount;
    int64_t rate_before = -1;
    int64_t full = 0;  // bytes that fill a port of that rate
    for (size_t k = 0; k < used; ++k) {
      const auto i = static_cast<size_t>(levels_[k].second);
      const int32_t port = item->ports[i];
      const int64_t its_rate = network_.port_rate(port);
      if (std::exchange(rate_before, its_rate) != its_rate) {
        full = static_cast<int64_t>(static_cast<__int128>(final_level) * its_rate / 1000000000);
      }
      int64_t take = std::clamp<int64_t>(full - load_[static_cast<size_t>(port)], 0, left);
      if (k + 1 == used) take = left;
      item->share[i] += take;
      load_[static_cast<size_t>(port)] += take;
      left -= take;
    }
  }

  void withdraw(PortItem* item) {
    for (size_t i = 0; i < item->ports.size(); ++i) {
      load_[static_cast<size_t>(item->ports[i])] -= item->share[i];
      item->share[i] = 0;
    }
  }

  // Takes the item out and pours it in again. Returns the bytes that ended on another port. There is one
  // constraint: emitters take at least first() bytes, since data leaves its holders before any port can relay
  // it. If the free optimum violates that, the optimum under it has exactly first() bytes on the emitters, as
  // the sum is convex. Both groups are then poured separately.
  //
  // Example. 100 bytes go to three remote hosts: 300 bytes on emitter E and relays R, S of equal rates, E
  // with 200 bytes of other items. Poured freely, R and S get 150 each and E nothing, since it lies at 200.
  // But the box has to be emitted once: E gets 100 (level 300), R and S share the other 200 as 100 each.
  int64_t place(PortItem* item, int64_t* total) {
    if (item->ports.size() == 1 && item->emitters == 1) {  // there is no choice
      const int64_t more = item->total() - item->share[0];
      item->share[0] += more;
      load_[static_cast<size_t>(item->ports[0])] += more;
      *total += item->total();
      return more;
    }
    old_ = item->share;
    withdraw(item);
    const int64_t all = item->total();
    const auto emitters = static_cast<size_t>(item->emitters);
    pour(item, 0, item->ports.size(), all);
    int64_t emitted = 0;
    for (size_t i = 0; i < emitters; ++i) emitted += item->share[i];
    if (emitted < item->first() && emitters < item->ports.size()) {
      withdraw(item);
      pour(item, 0, emitters, item->first());
      pour(item, emitters, item->ports.size(), all - item->first());
    }
    int64_t moved = 0;
    for (size_t i = 0; i < old_.size(); ++i) moved += std::max<int64_t>(0, item->share[i] - old_[i]);
    *total += all;
    return moved;
  }

  const Network& network_;
  std::vector<PortItem>& items_;
  std::vector<int64_t> load_;
  std::vector<int32_t> order_;
  std::vector<std::pair<int64_t, int32_t>> levels_;
  std::vector<std::pair<int64_t, int32_t>> apart_;  // part of levels_, in sort_levels()
  std::vector<int64_t> old_;
};

}  // namespace

// The NIC that takes a box into a remote host is chosen per host (one NicIn item each); the NIC that sends it
// there is not, so all emissions and relays of a box are one NicOut item of one copy per remote host.
void append_network_items(int32_t bundle, int64_t nbytes, const Parties& parties, const Network& network,
                          std::vector<PortItem>* out) {
  if (parties.remote_hosts == 0) return;
  PortItem item;
  item.bundle = bundle;
  item.nbytes = nbytes;
  // A receiver on a host that holds the box gets it locally, so its NIC may send, like the holder's.
  std::vector<int32_t> emit, relay;
  for (const Party& party : parties.holders) {
    for (const int32_t r : party.ranks) emit.push_back(network.nic_out(network.nic(r)));
  }
  for (size_t p = 0; p < parties.receivers.size(); ++p) {
    for (const int32_t r : parties.receivers[p].ranks) {
      (parties.remote(p) ? relay : emit).push_back(network.nic_out(network.nic(r)));
    }
  }
  item.kind = PortItem::Kind::NicOut;
  item.copies = parties.remote_hosts;
  // A relay sends to another remote host: with only one remote host there is none.
  if (item.copies == 1) relay.clear();
  join(std::move(emit), std::move(relay), &item);
  out->push_back(item);
  item.kind = PortItem::Kind::NicIn;
  item.copies = 1;
  for (size_t p = 0; p < parties.receivers.size(); ++p) {
    if (!parties.remote(p)) continue;
    item.party = static_cast<int32_t>(p);
    std::vector<int32_t> enter;
    for (const int32_t r : parties.receivers[p].ranks) enter.push_back(network.nic_in(network.nic(r)));
    join(std::move(enter), {}, &item);
    out->push_back(item);
  }
}

void append_local_items(int32_t bundle, int64_t nbytes, const Parties& parties, const Network& network,
                        const std::vector<char>& hot_hosts, std::vector<PortItem>* out) {
  PortItem item;
  item.kind = PortItem::Kind::Local;
  item.bundle = bundle;
  item.nbytes = nbytes;
  for (size_t p = 0; p < parties.receivers.size(); ++p) {
    const Party& party = parties.receivers[p];
    if (!hot_hosts[static_cast<size_t>(party.host)]) continue;
    item.party = static_cast<int32_t>(p);
    std::vector<int32_t> relay, emit;
    for (const int32_t r : party.ranks) relay.push_back(network.local_out(r));
    item.copies = static_cast<int64_t>(party.ranks.size());
    // A host of k receivers copies k times inside, or k - 1 times if the box comes over a NIC to one of them.
    // In the latter case any receiver may be that one, so all of them are emitters.
    if (parties.remote(p)) {  // the box enters at one rank, and the others get it from inside
      --item.copies;
      emit = relay;
    } else {
      for (const int32_t r : parties.holders[static_cast<size_t>(parties.holder_party[p])].ranks) {
        emit.push_back(network.local_out(r));
      }
      if (item.copies == 1) relay.clear();
    }
    join(std::move(emit), std::move(relay), &item);
    if (item.copies > 0) out->push_back(item);
  }
}

void append_arrival_items(int32_t bundle, int64_t nbytes, const Parties& parties, const Network& network,
                          const std::vector<char>& hot_hosts, bool into, std::vector<PortItem>* out) {
  PortItem item;
  item.kind = PortItem::Kind::Local;
  item.bundle = bundle;
  item.nbytes = nbytes;
  for (size_t p = 0; p < parties.receivers.size(); ++p) {
    const Party& party = parties.receivers[p];
    if (!hot_hosts[static_cast<size_t>(party.host)]) continue;
    item.party = static_cast<int32_t>(p);
    item.copies = static_cast<int64_t>(party.ranks.size());
    // Every receiver takes one copy in. Counting by senders and counting by receivers are two relaxations of
    // the same problem: each leaves the other direction free, so the bound may take the larger time of the two.
    std::vector<int32_t> first, later;  // ports that may bring the first copy, and ports for other copies only
    for (const int32_t r : party.ranks) {
      if (!parties.one_host) first.push_back(network.nic_in(network.nic(r)));
      if (!into) {
        later.push_back(network.local_out(r));
      } else if (parties.remote(p)) {
        later.push_back(network.local_in(r));
      } else {  // by receiver: each has one NIC and one local port
        PortItem mine = item;
        mine.copies = 1;
        first.push_back(network.local_in(r));
        join(std::move(first), {}, &mine);
        out->push_back(std::move(mine));
        first.clear();
      }
    }
    if (into && !parties.remote(p)) continue;
    if (!parties.remote(p)) {
      for (const int32_t r : parties.holders[static_cast<size_t>(parties.holder_party[p])].ranks)
        first.push_back(network.local_out(r));
    }
    if (item.copies == 1) later.clear();
    join(std::move(first), std::move(later), &item);
    out->push_back(item);
  }
}

std::vector<int32_t> ports_from_elsewhere(const Parties& parties, int32_t host, const Network& network) {
  std::vector<int32_t> out;
  for (const std::vector<Party>* some : {&parties.holders, &parties.receivers}) {
    for (const Party& other : *some) {
      if (other.host == host) continue;
      for (const int32_t r : other.ranks) out.push_back(network.nic_out(network.nic(r)));
    }
  }
  sort_unique(&out);
  return out;
}

void append_copy_items(int32_t bundle, int64_t nbytes, const Parties& parties, const Network& network,
                       const std::vector<char>& hot_hosts, bool into, std::vector<PortItem>* out) {
  // An item of append_local_items, with the NICs of other hosts as further ports that may send a copy. They
  // are emitters, since another host needs no copy from this one before it sends.
  std::vector<PortItem> inside;
  append_local_items(bundle, nbytes, parties, network, hot_hosts, &inside);
  for (PortItem& item : inside) {
    const auto p = static_cast<size_t>(item.party);
    const Party& party = parties.receivers[p];
    const auto emitters = item.ports.begin() + item.emitters;
    std::vector<int32_t> first(item.ports.begin(), emitters), later(emitters, item.ports.end());
    std::vector<int32_t> away = ports_from_elsewhere(parties, party.host, network);
    if (!into) {
      first.insert(first.end(), away.begin(), away.end());
      join(std::move(first), std::move(later), &item);
      out->push_back(std::move(item));
    } else if (parties.remote(p)) {  // the box enters at any one of the ranks
      for (const int32_t r : party.ranks) away.push_back(network.local_in(r));
      join(std::move(away), {}, &item);
      out->push_back(std::move(item));
    } else {
      item.copies = 1;
      for (const int32_t r : party.ranks) {
        std::vector<int32_t> mine = away;
        mine.push_back(network.local_in(r));
        join(std::move(mine), {}, &item);
        out->push_back(item);
      }
    }
  }
}

// Sums stay exact throughout: bytes move only within an item, which keeps its total().
void prefer_emitters(const Network& network, int64_t level, std::vector<PortItem>* items) {
  std::vector<int64_t> load(static_cast<size_t>(network.port_count()), 0);
  for (const PortItem& item : *items) {
    for (size_t k = 0; k < item.ports.size(); ++k) load[static_cast<size_t>(item.ports[k])] += item.share[k];
  }
  for (PortItem& item : *items) {
    const auto emitters = static_cast<size_t>(item.emitters);
    int64_t relayed = 0;
    for (size_t k = emitters; k < item.ports.size(); ++k) relayed += item.share[k];
    if (relayed == 0) continue;
    // Phase 1: the bytes of relays, and the room of the emitters, in bytes.
    __int128 room = 0;  // of all emitters up to the level
    const auto room_of = [&](size_t k) {
      const auto port = item.ports[k];
      const auto most =
          static_cast<int64_t>(static_cast<__int128>(level) * network.port_rate(port) / 1000000000);
      return std::max<int64_t>(0, most - load[static_cast<size_t>(port)]);
    };
    for (size_t k = 0; k < emitters; ++k) room += room_of(k);
    if (room == 0) continue;
    // Phase 2: emitters take the smaller of the two.
    const auto moved = static_cast<int64_t>(std::min<__int128>(room, relayed));
    int64_t left = moved;
    for (size_t k = 0; k < emitters; ++k) {  // in proportion to the room, so that emitters stay level
      const int64_t mine =
          k + 1 == emitters
              ? left
              : std::min(left, static_cast<int64_t>(room_of(k) * static_cast<__int128>(moved) / room));
      item.share[k] += mine;
      load[static_cast<size_t>(item.ports[k])] += mine;
      left -= mine;
    }
    // Phase 3: relays give the same bytes. They are visited from the last to the first, which settles the
    // rounding.
    left = moved;
    for (size_t k = item.ports.size(); k-- > emitters;) {  // all relays give in proportion to what they have
      const int64_t share = item.share[k];
      const int64_t mine = k == emitters ? std::min(left, share)
                                         : static_cast<int64_t>(static_cast<__int128>(share) * moved / relayed);
      item.share[k] -= mine;
      load[static_cast<size_t>(item.ports[k])] -= mine;
      left -= mine;
    }
    if (left > 0)
      item.share[0] -= left, load[static_cast<size_t>(item.ports[0])] -= left;  // rounding: sums stay exact
  }
}

// First fit in the order of ports. Balanced shares spread the relays' work thinly over many ports, so that
// every chunk would take a different tree; packed, a few ports relay every chunk.
void pack_relays(const Network& network, int64_t level, std::vector<PortItem>* items) {
  std::vector<int64_t> load(static_cast<size_t>(network.port_count()), 0);
  for (const PortItem& item : *items) {
    for (size_t k = 0; k < item.ports.size(); ++k) load[static_cast<size_t>(item.ports[k])] += item.share[k];
  }
  for (PortItem& item : *items) {
    // Phase 1: relays give up their shares; `left` is the sum to be placed again.
    int64_t left = 0;
    for (auto k = static_cast<size_t>(item.emitters); k < item.ports.size(); ++k) {
      left += item.share[k];
      load[static_cast<size_t>(item.ports[k])] -= item.share[k];
      item.share[k] = 0;
    }
    // Phase 2: at most one box on each port, since a second copy from the same port makes a bush out of a
    // chain. Without that limit, the rest fits as before.
    for (const int64_t most : {item.nbytes, INT64_MAX}) {
      for (auto k = static_cast<size_t>(item.emitters); k < item.ports.size() && left > 0; ++k) {
        int64_t& here = load[static_cast<size_t>(item.ports[k])];
        const __int128 full = static_cast<__int128>(level) * network.port_rate(item.ports[k]) / 1000000000;
        const __int128 room = std::min<__int128>(full - here, most - item.share[k]);
        const auto take = static_cast<int64_t>(std::clamp<__int128>(room, 0, left));
        item.share[k] += take;
        here += take;
        left -= take;
      }
    }
    if (left == 0) continue;  // rounding
    item.share.back() += left;
    load[static_cast<size_t>(item.ports.back())] += left;
  }
}

int64_t balance_ports(const Network& network, std::vector<PortItem>* items) {
  return Balancer(network, items).run();
}

}  // namespace meshcast
