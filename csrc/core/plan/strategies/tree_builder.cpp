#include "plan/strategies/tree_builder.h"

#include <algorithm>
#include <tuple>

namespace meshcast {
namespace {

// One of the ranks of a party that use the given NIC. It differs from bundle to bundle, so that the ranks of a
// host share the work, and is the same within a bundle, so that few pairs of ranks communicate.
int32_t rank_on_nic(const std::vector<int32_t>& ranks, int32_t nic, int32_t bundle, const Network& network) {
  int32_t count = 0;
  for (const int32_t r : ranks) count += network.nic(r) == nic;
  if (count == 0) return -1;
  int32_t skip = bundle % count;
  for (const int32_t r : ranks) {
    if (network.nic(r) == nic && skip-- == 0) return r;
  }
  return -1;
}

}  // namespace

// Worked example. Host 0 holds a box that hosts 1, 2 and 3 need; all have one NIC of one rate, and the box is
// three chunks of c bytes. Each chunk is sent three times, 9 c in all. Host 0 has to emit all of it (3 c),
// the others relay 2 c each. So every chunk adds c to the credit of NIC 0 and 2/3 c to those of the others; a
// send takes c off.
//   chunk 1   credits 1, 2/3, 2/3, 2/3   senders 0, 1, 2   chain 0 -> 1 -> 2 -> 3
//   chunk 2   credits 1, 1/3, 1/3, 4/3   senders 0, 3, 1   chain 0 -> 1 -> 3 -> 2
//   chunk 3   credits 1,   0,   1,   1   senders 0, 2, 3   chain 0 -> 2 -> 3 -> 1
// Those that send come first, those that do not come last. In the end all credits are 0: each relay has sent
// two chunks of three, and all four NICs have carried their shares.
TreeBuilder::TreeBuilder(const PortDemand& demand, const Network& network, int64_t fan)
    : demand_(demand),
      network_(network),
      credits_(network, fan),
      by_bundle_(demand.parties.size()),
      emitted_(static_cast<size_t>(network.port_count()), 0),
      local_in_(static_cast<size_t>(network.rank_count()), 0),
      due_in_(static_cast<size_t>(network.rank_count()), 0),
      arrived_(static_cast<size_t>(network.rank_count()), -1),
      nic_hops_(static_cast<size_t>(network.nic_count()), 0),
      is_late_(static_cast<size_t>(network.rank_count()), 0) {
  for (size_t b = 0; b < demand.parties.size(); ++b) {
    BundleItems& mine = by_bundle_[b];
    for (auto* by_party : {&mine.in, &mine.local, &mine.detour_in, &mine.detour_out})
      by_party->assign(demand.parties[b].receivers.size(), -1);
    mine.owed.assign(demand.parties[b].receivers.size(), 0);
  }
  for (size_t i = 0; i < demand.items.size(); ++i) {
    const PortItem& it = demand.items[i];
    BundleItems& mine = by_bundle_[static_cast<size_t>(it.bundle)];
    const auto index = static_cast<int32_t>(i);
    const auto p = static_cast<size_t>(std::max(it.party, 0));
    mine.entries += it.ports.size();
    switch (it.kind) {
      case PortItem::Kind::NicOut: mine.out = index; break;
      case PortItem::Kind::NicIn: mine.in[p] = index; break;
      case PortItem::Kind::Local:
        mine.local[p] = index;
        for (const int32_t r : demand.parties[static_cast<size_t>(it.bundle)].receivers[p].ranks)
          due_in_[static_cast<size_t>(r)] += it.nbytes;
        break;
      case PortItem::Kind::DetourOut: mine.detour_out[p] = index; break;
      case PortItem::Kind::DetourIn:
        mine.detour_in[p] = index;
        mine.detours = true;
        break;
    }
  }
}

// Edges are added parents first, as Route requires: a sender is in arrived_ or holds the chunk.
void TreeBuilder::add_edge(int32_t src, int32_t dst, int32_t parent) {
  arrived_[static_cast<size_t>(dst)] = static_cast<int32_t>(route_.size());
  route_.push_back({src, dst, parent});
}

// The rank at which the chunk enters a remote host.
int32_t TreeBuilder::enter(const Parties& parties, size_t party, const BundleItems& items, int32_t bundle,
                           int64_t nbytes) {
  // One copy enters, so one port of the item has a count of 1.
  const PortItem& it = item(items.in[party]);
  const std::vector<int32_t>& counts = pick(items.in[party], nbytes, -1);
  const auto k = static_cast<size_t>(std::find(counts.begin(), counts.end(), 1) - counts.begin());
  const int32_t nic = it.ports[k] / 2;
  const std::vector<int32_t>& ranks = parties.receivers[party].ranks;
  int32_t root = rank_on_nic(ranks, nic, bundle, network_);
  if (items.local[party] >= 0) {
    // The rank where the chunk enters need not receive it over its local port: choose the one with most local
    // bytes.
    for (const int32_t r : ranks) {
      if (network_.nic(r) == nic && local_in_[static_cast<size_t>(r)] > local_in_[static_cast<size_t>(root)])
        root = r;
    }
    for (const int32_t r : ranks) local_in_[static_cast<size_t>(r)] += r == root ? 0 : nbytes;
  }
  return root;
}

// Copies the chunk to the receivers of a host that do not get it by detours. `root` has it from another host,
// or is -1 if only the holders of this one have it.
void TreeBuilder::spread_inside(const Parties& parties, size_t party, const BundleItems& items, int32_t root,
                                int32_t root_parent, int32_t bundle, int64_t nbytes) {
  const std::vector<int32_t>& ranks = parties.receivers[party].ranks;
  const std::vector<int32_t>* holders =
      parties.remote(party) ? nullptr
                            : &parties.holders[static_cast<size_t>(parties.holder_party[party])].ranks;
  // Phase 1: a host whose ports do not limit the plan. A chain in ring order of ranks, always the same one,
  // keeps pairs of ranks few and each rank's load at one copy in and one out.
  if (items.local[party] < 0) {  // a host with time to spare, or nothing to copy
    int32_t at = root;
    if (root < 0 && holders != nullptr) at = (*holders)[static_cast<size_t>(bundle) % holders->size()];
    int32_t parent = root_parent;
    const auto begin = static_cast<size_t>(std::upper_bound(ranks.begin(), ranks.end(), at) - ranks.begin());
    for (size_t i = 0; i < ranks.size(); ++i) {
      const int32_t next = ranks[(begin + i) % ranks.size()];
      if (next == root) continue;
      add_edge(at, next, parent);
      at = next;
      parent = static_cast<int32_t>(route_.size()) - 1;
    }
    return;
  }
  // Phase 2: a hot host. Credits give how often each rank copies the chunk to another.
  const PortItem& it = item(items.local[party]);
  const auto has_or_is_late = [&](int32_t r) { return r == root || is_late_[static_cast<size_t>(r)] != 0; };
  const int64_t copies =
      static_cast<int64_t>(ranks.size()) - std::count_if(ranks.begin(), ranks.end(), has_or_is_late);
  if (copies == 0) return;
  const std::vector<int32_t>& counts =
      credits_.pick(it, copies, nbytes, root < 0 ? -1 : network_.local_out(root));
  std::deque<Slot> slots;
  std::vector<std::pair<int32_t, int32_t>> waiting;  // (-hops, rank): ranks that pass it on come first
  // The ports of a rank are a pair, out and in: see Network.
  const int32_t base = network_.local_out(0);
  for (size_t k = 0; k < it.ports.size(); ++k) {
    const int32_t rank = (it.ports[k] - base) / 2;
    if (holders != nullptr && k < static_cast<size_t>(it.emitters)) {
      if (counts[k] > 0) slots.push_back({rank, -1, counts[k]});
    } else if (rank == root) {
      slots.push_front({rank, root_parent, counts[k]});
    } else if (!has_or_is_late(rank)) {
      waiting.emplace_back(-counts[k], rank);
    }
  }
  // A receiver whose port is not in the item (a single copy per holder) passes nothing on.
  for (const int32_t r : ranks) {
    const bool listed = std::find(it.ports.begin(), it.ports.end(), network_.local_out(r)) != it.ports.end();
    if (!listed && !has_or_is_late(r)) waiting.emplace_back(0, r);
  }
  // Phase 3: distribute the chunk, first to ranks that pass it on most often. There is always a slot: counts
  // add up to the receivers, and the first sender has at least one. If all slots were used up early, the counts
  // so far would equal the receivers so far. One of them is the first sender's, so the last of these receivers
  // would have none, nor would any after it, and the sum would be too small.
  std::sort(waiting.begin(), waiting.end());
  for (const auto& [hops, rank] : waiting) {
    Slot& slot = slots.front();
    add_edge(slot.rank, rank, slot.parent);
    if (--slot.count == 0) slots.pop_front();
    if (hops < 0) slots.push_back({rank, static_cast<int32_t>(route_.size()) - 1, -hops});
  }
}

// Deficit counting: the port that is furthest behind its share of the bundle. emitted / share is compared by
// cross-multiplication, exact in 128 bits.
int32_t TreeBuilder::next_emitter(int32_t bundle) const {
  const int32_t out = by_bundle_[static_cast<size_t>(bundle)].out;
  if (out < 0) return -1;
  const PortItem& it = item(out);
  int32_t best = -1;
  __int128 best_emitted = 0;
  __int128 best_share = 1;
  for (size_t k = 0; k < static_cast<size_t>(it.emitters); ++k) {
    const int32_t port = it.ports[k];
    if (it.share[k] == 0) continue;
    const int64_t emitted = emitting_bundle_ == bundle ? emitted_[static_cast<size_t>(port)] : 0;
    // Least emitted / share; multiplied out.
    if (best < 0 || emitted * best_share < best_emitted * it.share[k]) {
      best = port;
      best_emitted = emitted;
      best_share = it.share[k];
    }
  }
  return best;
}

// Adds the chunk to the credits, and to the bytes that detours owe. Detours of every host may leave over the
// NICs of all others, so ports occur often; chunks of equal size add the same, so the sums are kept.
void TreeBuilder::accrue(int32_t bundle, int64_t bundle_bytes, int64_t nbytes) {
  BundleItems& mine = by_bundle_[static_cast<size_t>(bundle)];
  const bool keeps = mine.entries > 2 * static_cast<size_t>(network_.port_count());
  if (keeps && last_.bundle == bundle && last_.nbytes == nbytes) {
    credits_.add(last_.credit);
  } else {
    if (keeps) last_ = {bundle, nbytes, credits_.all()};
    if (mine.out >= 0) credits_.accrue(item(mine.out), bundle_bytes, nbytes);
    for (size_t p = 0; p < mine.in.size(); ++p)
      for (const auto* by_party : {&mine.in, &mine.local, &mine.detour_in, &mine.detour_out})
        if ((*by_party)[p] >= 0) credits_.accrue(item((*by_party)[p]), bundle_bytes, nbytes);
    if (keeps) {
      for (size_t port = 0; port < last_.credit.size(); ++port)
        last_.credit[port] = credits_.all()[port] - last_.credit[port];
    }
  }
  if (!mine.detours) return;
  for (size_t p = 0; p < mine.in.size(); ++p)
    if (mine.detour_in[p] >= 0) mine.owed[p] += part_of(item(mine.detour_in[p]).detour, nbytes, bundle_bytes);
}

const Route& TreeBuilder::route(int32_t bundle, int64_t bundle_bytes, int64_t nbytes, int32_t first_port) {
  const Parties& parties = demand_.parties[static_cast<size_t>(bundle)];
  BundleItems& items = by_bundle_[static_cast<size_t>(bundle)];
  route_.clear();
  // Phase 1: the chunk's part of all shares becomes credit.
  accrue(bundle, bundle_bytes, nbytes);
  // Phase 2: which NICs send it, and how often: nic_hops_, for build_tree.
  if (items.out >= 0) {
    const PortItem& out = item(items.out);
    if (first_port >= 0) {
      if (emitting_bundle_ != bundle) {
        for (const int32_t port : out.ports) emitted_[static_cast<size_t>(port)] = 0;
        emitting_bundle_ = bundle;
      }
      emitted_[static_cast<size_t>(first_port)] += nbytes;
    }
    const std::vector<int32_t>& counts = pick(items.out, nbytes, first_port);
    for (size_t k = 0; k < out.ports.size(); ++k) nic_hops_[static_cast<size_t>(out.ports[k] / 2)] = counts[k];
  }
  // Phase 3: hosts that hold the chunk, which need nothing from outside; then the tree through the others.
  if (items.detours) {
    late_.clear();
    for (const Party& party : parties.receivers)
      for (const int32_t r : party.ranks) arrived_[static_cast<size_t>(r)] = -1;
  }
  for (size_t p = 0; p < parties.receivers.size(); ++p) {
    if (parties.remote(p)) continue;
    if (items.detour_in[p] >= 0) choose_late(parties, p, &items, -1, nbytes);
    if (items.detour_in[p] < 0 || !holder_waits(parties, p, items))
      spread_inside(parties, p, items, -1, -1, bundle, nbytes);
  }
  if (items.out >= 0) {
    build_tree(bundle, nbytes);
    for (const int32_t port : item(items.out).ports) nic_hops_[static_cast<size_t>(port / 2)] = 0;
  }
  // Phase 4: detours last. No other host waits for their receivers, so the tree comes first.
  if (items.detours) enter_late(parties, items, bundle, nbytes);
  return route_;
}

// Adds the edges from the holders to all remote hosts, and inside these.
void TreeBuilder::build_tree(int32_t bundle, int64_t nbytes) {
  const Parties& parties = demand_.parties[static_cast<size_t>(bundle)];
  BundleItems& items = by_bundle_[static_cast<size_t>(bundle)];
  std::deque<Slot> slots;
  std::vector<int32_t> nics;
  const auto open_slots = [&](const Party& party, const std::vector<int32_t>* holders) {
    nics.clear();
    for (const int32_t r : party.ranks) nics.push_back(network_.nic(r));
    if (holders != nullptr) {
      for (const int32_t r : *holders) nics.push_back(network_.nic(r));
    }
    std::sort(nics.begin(), nics.end());
    nics.erase(std::unique(nics.begin(), nics.end()), nics.end());
    for (const int32_t nic : nics) {
      const int32_t hops = nic_hops_[static_cast<size_t>(nic)];
      if (hops == 0) continue;
      if (holders != nullptr) {
        const int32_t holder = rank_on_nic(*holders, nic, bundle, network_);
        if (holder >= 0) {
          slots.push_back({holder, -1, hops});
          continue;
        }
      }
      // The rank at which the chunk entered passes it on itself if it uses that NIC.
      int32_t sender = -1;
      for (const int32_t r : party.ranks) {
        if (network_.nic(r) != nic || is_late_[static_cast<size_t>(r)]) continue;
        if (sender < 0 || arrived_[static_cast<size_t>(r)] < arrived_[static_cast<size_t>(sender)]) sender = r;
      }
      slots.push_back({sender, arrived_[static_cast<size_t>(sender)], hops});
    }
  };
  // Phase 1: slots of the hosts that hold the chunk. At a NIC of several ranks a holder sends, else a
  // receiver that got it inside.
  const Party nobody;
  for (size_t h = 0; h < parties.holders.size(); ++h) {
    const auto local =
        std::find(parties.holder_party.begin(), parties.holder_party.end(), static_cast<int32_t>(h));
    const Party& receivers = local == parties.holder_party.end()
                                 ? nobody
                                 : parties.receivers[static_cast<size_t>(local - parties.holder_party.begin())];
    open_slots(receivers, &parties.holders[h].ranks);
  }
  const int32_t home = network_.host(slots.front().rank);
  // Phase 2: the order in which hosts get the chunk: those that send most often come first, which keeps the
  // tree shallow and slots available (as inside a host, spread_inside). Hosts are taken in ring order after the
  // sender, so that they form a ring if every host is a sender.
  std::vector<std::tuple<int32_t, int32_t, int32_t>> waiting;  // (-hops, ring, party)
  for (size_t p = 0; p < parties.receivers.size(); ++p) {
    if (!parties.remote(p)) continue;
    int32_t hops = 0;
    nics.clear();
    for (const int32_t r : parties.receivers[p].ranks) nics.push_back(network_.nic(r));
    std::sort(nics.begin(), nics.end());
    nics.erase(std::unique(nics.begin(), nics.end()), nics.end());
    for (const int32_t nic : nics) hops += nic_hops_[static_cast<size_t>(nic)];
    const int32_t host = parties.receivers[p].host;
    waiting.emplace_back(-hops, host < home ? host + network_.host_count() : host, static_cast<int32_t>(p));
  }
  // Phase 3: each host becomes a child of the first open slot, spreads the chunk inside and opens the slots of
  // its own NICs. Slots are first in, first out: the tree grows in breadth.
  std::sort(waiting.begin(), waiting.end());
  for (const auto& [hops, ring, p] : waiting) {
    const auto party = static_cast<size_t>(p);
    Slot& slot = slots.front();
    const int32_t root = enter(parties, party, items, bundle, nbytes);
    add_edge(slot.rank, root, slot.parent);
    if (--slot.count == 0) slots.pop_front();
    if (items.detour_in[party] >= 0) choose_late(parties, party, &items, root, nbytes);
    spread_inside(parties, party, items, root, static_cast<int32_t>(route_.size()) - 1, bundle, nbytes);
    if (hops < 0) open_slots(parties.receivers[party], nullptr);
  }
}

}  // namespace meshcast
