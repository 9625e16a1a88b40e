#include <algorithm>

#include "plan/strategies/tree_builder.h"

namespace meshcast {
namespace {

bool uses(const std::vector<int32_t>& ranks, int32_t nic, const Network& network) {
  return std::any_of(ranks.begin(), ranks.end(), [&](int32_t r) { return network.nic(r) == nic; });
}

}  // namespace

// The receiver of a party on the NIC of the given port that gets the chunk late, or -1: the one that still has
// most to receive. One that passes the chunk to other hosts over this NIC must have it early. A detour inverts
// the tree: the receiver is left out of the copies on its host, and another host sends it the chunk once the
// tree is complete. So it must have no host below it in the tree.
int32_t TreeBuilder::pick_late(const Parties& parties, size_t party, int32_t port, int32_t root) const {
  const int32_t nic = port / 2;
  const int32_t holders = parties.holder_party[party];
  const bool needed =
      nic_hops_[static_cast<size_t>(nic)] > 0 &&
      (holders < 0 || !uses(parties.holders[static_cast<size_t>(holders)].ranks, nic, network_));
  int64_t early = 0;
  int32_t out = -1;
  for (const int32_t r : parties.receivers[party].ranks) {
    const auto at = static_cast<size_t>(r);
    if (network_.nic(r) != nic || is_late_[at]) continue;
    ++early;
    if (r != root && (out < 0 || due_in_[at] > due_in_[static_cast<size_t>(out)])) out = r;
  }
  return needed && early < 2 ? -1 : out;
}

// Marks the receivers of a party that get the chunk by detours, as many as owed.
void TreeBuilder::choose_late(const Parties& parties, size_t party, BundleItems* items, int32_t root,
                              int64_t nbytes) {
  const PortItem& it = item(items->detour_in[party]);
  int64_t& owed = items->owed[party];
  // Rounded: a detour carries a whole chunk, and `owed` grows by fractions of one. It may be negative by half a
  // chunk, so detours keep to their share within that.
  while (owed >= nbytes - nbytes / 2) {
    int32_t best = -1;
    int32_t best_port = -1;
    for (const int32_t port : it.ports) {
      if (best >= 0 && credits_.of(port) <= credits_.of(best_port)) continue;
      const int32_t rank = pick_late(parties, party, port, root);
      if (rank < 0) continue;
      best = rank;
      best_port = port;
    }
    if (best < 0) return;
    credits_.take(best_port, nbytes);
    // It gets the chunk too late to copy it to others inside.
    credits_.block(network_.local_out(best), true);
    owed -= nbytes;
    due_in_[static_cast<size_t>(best)] -= nbytes;
    is_late_[static_cast<size_t>(best)] = 1;
    late_.push_back({party, best, false});
  }
}

// For a host that holds the box: true if all receivers wait for the detour, and the first to get the chunk
// copies it to the others instead of the holders, whose ports have carried their part.
bool TreeBuilder::holder_waits(const Parties& parties, size_t party, const BundleItems& items) {
  const std::vector<int32_t>& ranks = parties.receivers[party].ranks;
  const std::vector<int32_t>& holders = parties.holders[static_cast<size_t>(parties.holder_party[party])].ranks;
  Late* first = nullptr;
  for (Late& late : late_) {
    if (late.party != party) continue;
    if (first == nullptr ||
        credits_.of(network_.local_out(late.rank)) > credits_.of(network_.local_out(first->rank)))
      first = &late;
  }
  if (first == nullptr) return false;
  const PortItem& it = item(items.local[party]);
  for (int32_t k = 0; k < it.emitters; ++k)
    if (credits_.of(it.ports[static_cast<size_t>(k)]) >= credits_.of(network_.local_out(first->rank)))
      return false;
  // If a NIC of the host that only receivers use sends the chunk to other hosts, one of these must have it
  // early.
  for (const int32_t r : ranks) {
    const int32_t nic = network_.nic(r);
    if (nic_hops_[static_cast<size_t>(nic)] > 0 && !uses(holders, nic, network_)) return false;
  }
  first->spreads = true;
  return true;
}

// A rank that sends a chunk over its NIC, see enter_late.
struct TreeBuilder::Sender {
  int32_t place = -1;  // in the order of ranks below; -1: none over this NIC yet
  int32_t rank = -1;
  int32_t parent = -1;
};

// The detours, once all hosts have the chunk: each from the NIC with the most credit that can send it. Among
// equal NICs, and among the ranks of a NIC, the first rank is taken: holders come first, then receivers, host
// by host.
void TreeBuilder::enter_late(const Parties& parties, const BundleItems& items, int32_t bundle, int64_t nbytes) {
  if (late_.empty()) return;
  std::stable_sort(late_.begin(), late_.end(),
                   [](const Late& a, const Late& b) { return !a.spreads && b.spreads; });
  // Phase 1: the ranks that have the chunk. There may be thousands of detours and NICs, so NICs are in a heap.
  // An entry whose credit or sender is not the current one is outdated: the current one has another entry.
  std::vector<Sender> senders(static_cast<size_t>(network_.nic_count()));
  std::vector<int32_t> places(static_cast<size_t>(network_.rank_count()), -1);  // of receivers
  struct Offer {
    int64_t credit = 0;
    int32_t place = -1;
    int32_t nic = -1;
    bool operator<(const Offer& other) const {
      return credit != other.credit ? credit < other.credit : place > other.place;
    }
  };
  std::vector<Offer> offers;
  const auto credit = [&](int32_t nic) { return credits_.of(network_.nic_out(nic)); };
  const auto serves = [&](int32_t rank, int32_t place, int32_t parent) {  // whether it is the first of its NIC
    Sender& sender = senders[static_cast<size_t>(network_.nic(rank))];
    if (sender.place >= 0 && sender.place < place) return false;
    sender = {place, rank, parent};
    return true;
  };
  int32_t place = 0;
  for (const Party& party : parties.holders)
    for (const int32_t r : party.ranks) serves(r, place++, -1);
  for (const Party& party : parties.receivers) {
    for (const int32_t r : party.ranks) {
      places[static_cast<size_t>(r)] = place++;
      const int32_t edge = arrived_[static_cast<size_t>(r)];
      if (edge >= 0) serves(r, places[static_cast<size_t>(r)], edge);
    }
  }
  for (int32_t nic = 0; nic < network_.nic_count(); ++nic) {
    const int32_t first = senders[static_cast<size_t>(nic)].place;
    if (first >= 0) offers.push_back({credit(nic), first, nic});
  }
  std::make_heap(offers.begin(), offers.end());
  const auto offer = [&](int32_t nic) {
    offers.push_back({credit(nic), senders[static_cast<size_t>(nic)].place, nic});
    std::push_heap(offers.begin(), offers.end());
  };
  // Phase 2: one after the other. NICs of the host itself wait until the next detour.
  std::vector<int32_t> own;
  for (const Late& late : late_) {
    const int32_t host = parties.receivers[late.party].host;
    int32_t nic = -1;
    while (nic < 0) {
      std::pop_heap(offers.begin(), offers.end());
      const Offer best = offers.back();
      offers.pop_back();
      const Sender& sender = senders[static_cast<size_t>(best.nic)];
      if (best.place != sender.place || best.credit != credit(best.nic)) continue;
      if (network_.host(sender.rank) == host)
        own.push_back(best.nic);
      else
        nic = best.nic;
    }
    const Sender sender = senders[static_cast<size_t>(nic)];
    credits_.take(network_.nic_out(nic), nbytes);
    const size_t before = route_.size();
    add_edge(sender.rank, late.rank, sender.parent);
    if (late.spreads)
      spread_inside(parties, late.party, items, late.rank, static_cast<int32_t>(route_.size()) - 1, bundle,
                    nbytes);
    offer(nic);
    for (const int32_t each : own) offer(each);
    own.clear();
    for (size_t edge = before; edge < route_.size(); ++edge) {
      const int32_t rank = route_[edge].dst;
      if (serves(rank, places[static_cast<size_t>(rank)], static_cast<int32_t>(edge)))
        offer(network_.nic(rank));
    }
  }
  for (const Late& late : late_) {
    is_late_[static_cast<size_t>(late.rank)] = 0;
    credits_.block(network_.local_out(late.rank), false);
  }
}

}  // namespace meshcast
