#include "plan/tree_builder.h"

#include <algorithm>
#include <tuple>

namespace meshcast {
namespace {

// One of the ranks of a party that use the given NIC; which one differs from bundle to bundle, so that the
// ranks of a host share the work, and stays the same within one, so that few pairs of ranks talk.
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

TreeBuilder::TreeBuilder(const LaneDemand& demand, const Network& network, int64_t fan)
    : demand_(demand),
      network_(network),
      fan_(fan),
      by_bundle_(demand.parties.size()),
      credit_(static_cast<size_t>(network.lane_count()), 0),
      emitted_(static_cast<size_t>(network.lane_count()), 0),
      local_in_(static_cast<size_t>(network.rank_count()), 0),
      arrived_(static_cast<size_t>(network.rank_count()), -1),
      nic_host_(static_cast<size_t>(network.nic_count()), -1),
      host_copies_(static_cast<size_t>(network.host_count()), 0) {
  for (int32_t r = 0; r < network.rank_count(); ++r)
    nic_host_[static_cast<size_t>(network.nic(r))] = network.host(r);
  for (size_t b = 0; b < demand.parties.size(); ++b) {
    by_bundle_[b].in.assign(demand.parties[b].receivers.size(), -1);
    by_bundle_[b].local.assign(demand.parties[b].receivers.size(), -1);
  }
  for (size_t i = 0; i < demand.items.size(); ++i) {
    const LaneItem& item = demand.items[i];
    BundleItems& mine = by_bundle_[static_cast<size_t>(item.bundle)];
    const auto index = static_cast<int32_t>(i);
    switch (item.kind) {
      case LaneItem::Kind::NicOut: mine.out = index; break;
      case LaneItem::Kind::NicIn: mine.in[static_cast<size_t>(item.party)] = index; break;
      case LaneItem::Kind::Local: mine.local[static_cast<size_t>(item.party)] = index; break;
    }
  }
}

void TreeBuilder::add_edge(int32_t src, int32_t dst, int32_t parent) {
  arrived_[static_cast<size_t>(dst)] = static_cast<int32_t>(route_.size());
  route_.push_back({src, dst, parent});
}

void TreeBuilder::accrue(int32_t item, int64_t bundle_bytes, int64_t nbytes) {
  const LaneItem& it = demand_.items[static_cast<size_t>(item)];
  for (size_t k = 0; k < it.lanes.size(); ++k) {
    const auto part = static_cast<__int128>(it.share[k]) * nbytes / bundle_bytes;
    credit_[static_cast<size_t>(it.lanes[k])] += static_cast<int64_t>(part);
  }
}

const std::vector<int32_t>& TreeBuilder::pick(int32_t item, int64_t nbytes, int32_t first_lane) {
  const LaneItem& it = demand_.items[static_cast<size_t>(item)];
  count_.assign(it.lanes.size(), 0);
  const bool between_hosts = it.kind == LaneItem::Kind::NicOut;
  const auto copies_of_host = [&](size_t k) -> int64_t& {
    return host_copies_[static_cast<size_t>(nic_host_[static_cast<size_t>(it.lanes[k] / 2)])];
  };
  const auto take = [&](size_t k) {
    ++count_[k];
    credit_[static_cast<size_t>(it.lanes[k])] -= nbytes;
    if (between_hosts) ++copies_of_host(k);
  };
  // A host whose other NICs send the chunk already comes later by a chunk for each time: its NICs then take
  // turns with different chunks instead of all sending the same one, which would be a bush and not a chain.
  const auto rank_lane = [&](size_t k) {
    const int64_t others = between_hosts ? copies_of_host(k) - count_[k] : 0;
    return credit_[static_cast<size_t>(it.lanes[k])] - others * nbytes;
  };
  size_t first = 0;
  for (size_t k = 0; k < it.lanes.size(); ++k) {
    if (first_lane >= 0
            ? it.lanes[k] == first_lane
            : k < static_cast<size_t>(it.emitters) &&
                  credit_[static_cast<size_t>(it.lanes[k])] > credit_[static_cast<size_t>(it.lanes[first])]) {
      first = k;
    }
  }
  take(first);
  if (it.copies > 1) {
    // Lanes without a share have none because others are better; a heap keeps the rest in order of credit,
    // lower index first among equals.
    heap_.clear();
    for (size_t k = 0; k < it.lanes.size(); ++k) {
      if (it.share[k] > 0 || k == first) heap_.emplace_back(rank_lane(k), -static_cast<int32_t>(k));
    }
    std::make_heap(heap_.begin(), heap_.end());
    for (int64_t n = 1; n < it.copies;) {
      std::pop_heap(heap_.begin(), heap_.end());
      const auto k = static_cast<size_t>(-heap_.back().second);
      const int64_t key = rank_lane(k);
      if (key == heap_.back().first) {
        for (int64_t times = std::min(fan_, it.copies - n); times > 0; --times, ++n) take(k);
      }
      heap_.back().first = rank_lane(k);  // of a lane that was not taken: what others of its host were since
      std::push_heap(heap_.begin(), heap_.end());
    }
  }
  if (between_hosts) {
    for (size_t k = 0; k < it.lanes.size(); ++k) copies_of_host(k) = 0;
  }
  return count_;
}

// The rank at which the chunk enters a remote host.
int32_t TreeBuilder::enter(const Parties& parties, size_t party, const BundleItems& items, int32_t bundle,
                           int64_t nbytes) {
  const LaneItem& it = demand_.items[static_cast<size_t>(items.in[party])];
  const std::vector<int32_t>& counts = pick(items.in[party], nbytes, -1);
  const auto k = static_cast<size_t>(std::find(counts.begin(), counts.end(), 1) - counts.begin());
  const int32_t nic = it.lanes[k] / 2;
  const std::vector<int32_t>& ranks = parties.receivers[party].ranks;
  int32_t root = rank_on_nic(ranks, nic, bundle, network_);
  if (items.local[party] >= 0) {
    // What enters at a rank it need not take in over its local lane: the one with most of that gets it.
    for (const int32_t r : ranks) {
      if (network_.nic(r) == nic && local_in_[static_cast<size_t>(r)] > local_in_[static_cast<size_t>(root)])
        root = r;
    }
    for (const int32_t r : ranks) local_in_[static_cast<size_t>(r)] += r == root ? 0 : nbytes;
  }
  return root;
}

// Copies the chunk to all receivers of a host. `root` has it already (a rank of a remote host), or is -1 on a
// host that holds it.
void TreeBuilder::spread_inside(const Parties& parties, size_t party, const BundleItems& items, int32_t root,
                                int32_t root_parent, int32_t bundle, int64_t nbytes) {
  const std::vector<int32_t>& ranks = parties.receivers[party].ranks;
  const int32_t item = items.local[party];
  const std::vector<int32_t>* holders =
      root < 0 ? &parties.holders[static_cast<size_t>(parties.holder_party[party])].ranks : nullptr;
  if (item < 0) {  // a host with time to spare, or nothing to copy: always the same chain
    int32_t at = root < 0 ? (*holders)[static_cast<size_t>(bundle) % holders->size()] : root;
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
  const LaneItem& it = demand_.items[static_cast<size_t>(item)];
  const std::vector<int32_t>& counts = pick(item, nbytes, root < 0 ? -1 : network_.local_out(root));
  std::deque<Slot> slots;
  std::vector<std::pair<int32_t, int32_t>> waiting;  // (-hops, rank): those that pass it on come first
  const int32_t base = network_.local_out(0);
  for (size_t k = 0; k < it.lanes.size(); ++k) {
    const int32_t rank = (it.lanes[k] - base) / 2;
    if (holders != nullptr && k < static_cast<size_t>(it.emitters)) {
      if (counts[k] > 0) slots.push_back({rank, -1, counts[k]});
    } else if (rank == root) {
      slots.push_back({rank, root_parent, counts[k]});
    } else {
      waiting.emplace_back(-counts[k], rank);
    }
  }
  // A receiver whose lane is not in the item (a single copy per holder) passes nothing on.
  for (const int32_t r : ranks) {
    const bool listed = std::find(it.lanes.begin(), it.lanes.end(), network_.local_out(r)) != it.lanes.end();
    if (!listed) waiting.emplace_back(0, r);
  }
  std::sort(waiting.begin(), waiting.end());
  for (const auto& [hops, rank] : waiting) {
    Slot& slot = slots.front();
    add_edge(slot.rank, rank, slot.parent);
    if (--slot.count == 0) slots.pop_front();
    if (hops < 0) slots.push_back({rank, static_cast<int32_t>(route_.size()) - 1, -hops});
  }
}

int32_t TreeBuilder::next_emitter(int32_t bundle) const {
  const int32_t out = by_bundle_[static_cast<size_t>(bundle)].out;
  if (out < 0) return -1;
  const LaneItem& item = demand_.items[static_cast<size_t>(out)];
  int32_t best = -1;
  __int128 best_emitted = 0;
  __int128 best_share = 1;
  for (size_t k = 0; k < static_cast<size_t>(item.emitters); ++k) {
    const int32_t lane = item.lanes[k];
    if (item.share[k] == 0) continue;
    const int64_t emitted = emitting_bundle_ == bundle ? emitted_[static_cast<size_t>(lane)] : 0;
    // Least emitted / share; multiplied out.
    if (best < 0 || emitted * best_share < best_emitted * item.share[k]) {
      best = lane;
      best_emitted = emitted;
      best_share = item.share[k];
    }
  }
  return best;
}

const Route& TreeBuilder::route(int32_t bundle, int64_t bundle_bytes, int64_t nbytes, int32_t first_lane) {
  const Parties& parties = demand_.parties[static_cast<size_t>(bundle)];
  const BundleItems& items = by_bundle_[static_cast<size_t>(bundle)];
  route_.clear();
  if (items.out >= 0) accrue(items.out, bundle_bytes, nbytes);
  for (size_t p = 0; p < parties.receivers.size(); ++p) {
    if (items.in[p] >= 0) accrue(items.in[p], bundle_bytes, nbytes);
    if (items.local[p] >= 0) accrue(items.local[p], bundle_bytes, nbytes);
    if (!parties.remote(p)) spread_inside(parties, p, items, -1, -1, bundle, nbytes);
  }
  if (items.out < 0) return route_;

  const LaneItem& out = demand_.items[static_cast<size_t>(items.out)];
  if (first_lane >= 0) {
    if (emitting_bundle_ != bundle) {
      for (const int32_t lane : out.lanes) emitted_[static_cast<size_t>(lane)] = 0;
      emitting_bundle_ = bundle;
    }
    emitted_[static_cast<size_t>(first_lane)] += nbytes;
  }
  const std::vector<int32_t> counts = pick(items.out, nbytes, first_lane);
  // Which host a NIC belongs to follows from any rank that uses it.
  std::vector<std::pair<int32_t, int32_t>> hops_of;  // (NIC, hops), NICs ascending
  for (size_t k = 0; k < out.lanes.size(); ++k) {
    if (counts[k] > 0) hops_of.emplace_back(out.lanes[k] / 2, counts[k]);
  }
  std::sort(hops_of.begin(), hops_of.end());
  const auto hops_on = [&](int32_t nic) {
    const auto found = std::lower_bound(hops_of.begin(), hops_of.end(), std::pair<int32_t, int32_t>{nic, 0});
    return found != hops_of.end() && found->first == nic ? found->second : 0;
  };
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
      const int32_t hops = hops_on(nic);
      if (hops == 0) continue;
      if (holders != nullptr) {
        const int32_t holder = rank_on_nic(*holders, nic, bundle, network_);
        if (holder >= 0) {
          slots.push_back({holder, -1, hops});
          continue;
        }
      }
      // The rank at which the chunk entered passes it on itself where it uses that NIC.
      int32_t sender = -1;
      for (const int32_t r : party.ranks) {
        if (network_.nic(r) != nic) continue;
        if (sender < 0 || arrived_[static_cast<size_t>(r)] < arrived_[static_cast<size_t>(sender)]) sender = r;
      }
      slots.push_back({sender, arrived_[static_cast<size_t>(sender)], hops});
    }
  };
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
  // Round the hosts from the sender on, so that where every host is a sender they form a ring.
  std::vector<std::tuple<int32_t, int32_t, int32_t>> waiting;  // (-hops, ring, party)
  for (size_t p = 0; p < parties.receivers.size(); ++p) {
    if (!parties.remote(p)) continue;
    int32_t hops = 0;
    nics.clear();
    for (const int32_t r : parties.receivers[p].ranks) nics.push_back(network_.nic(r));
    std::sort(nics.begin(), nics.end());
    nics.erase(std::unique(nics.begin(), nics.end()), nics.end());
    for (const int32_t nic : nics) hops += hops_on(nic);
    const int32_t host = parties.receivers[p].host;
    waiting.emplace_back(-hops, host < home ? host + network_.host_count() : host, static_cast<int32_t>(p));
  }
  std::sort(waiting.begin(), waiting.end());
  for (const auto& [hops, ring, p] : waiting) {
    const auto party = static_cast<size_t>(p);
    Slot& slot = slots.front();
    const int32_t root = enter(parties, party, items, bundle, nbytes);
    add_edge(slot.rank, root, slot.parent);
    if (--slot.count == 0) slots.pop_front();
    spread_inside(parties, party, items, root, static_cast<int32_t>(route_.size()) - 1, bundle, nbytes);
    if (hops < 0) open_slots(parties.receivers[party], nullptr);
  }
  return route_;
}

}  // namespace meshcast
