#include "plan/strategies/port_credits.h"

#include <algorithm>

namespace meshcast {

PortCredits::PortCredits(const Network& network, int64_t fan)
    : fan_(std::max<int64_t>(fan, 1)),
      star_(fan == kStar),
      credit_(static_cast<size_t>(network.port_count()), 0),
      blocked_(static_cast<size_t>(network.port_count()), 0),
      nic_host_(static_cast<size_t>(network.nic_count()), -1),
      host_copies_(static_cast<size_t>(network.host_count()), 0) {
  for (int32_t r = 0; r < network.rank_count(); ++r)
    nic_host_[static_cast<size_t>(network.nic(r))] = network.host(r);
}

void PortCredits::accrue(const PortItem& item, int64_t bundle_bytes, int64_t nbytes) {
  for (size_t k = 0; k < item.ports.size(); ++k) {
    // Rounded down, so a port may end a byte per chunk behind its share, as may all ports of an item.
    credit_[static_cast<size_t>(item.ports[k])] += part_of(item.share[k], nbytes, bundle_bytes);
  }
}

void PortCredits::add(const std::vector<int64_t>& credit) {
  for (size_t port = 0; port < credit.size(); ++port) credit_[port] += credit[port];
}

const std::vector<int32_t>& PortCredits::pick(const PortItem& item, int64_t copies, int64_t nbytes,
                                              int32_t first_port) {
  count_.assign(item.ports.size(), 0);
  const bool between_hosts = item.kind == PortItem::Kind::NicOut;
  const auto copies_of_host = [&](size_t k) -> int64_t& {
    return host_copies_[static_cast<size_t>(nic_host_[static_cast<size_t>(item.ports[k] / 2)])];
  };
  const auto take = [&](size_t k) {
    ++count_[k];
    credit_[static_cast<size_t>(item.ports[k])] -= nbytes;
    if (between_hosts) ++copies_of_host(k);
  };
  // A host loses one chunk of credit for each copy that its other NICs send: its NICs then take turns with
  // different chunks instead of all sending the same one, which would make a bush and not a chain.
  const auto rank_port = [&](size_t k) {
    const int64_t others = between_hosts ? copies_of_host(k) - count_[k] : 0;
    return credit_[static_cast<size_t>(item.ports[k])] - others * nbytes;
  };
  const auto blocked = [&](size_t k) { return blocked_[static_cast<size_t>(item.ports[k])] != 0; };
  size_t first = 0;
  if (first_port >= 0) {
    while (item.ports[first] != first_port) ++first;
  } else {
    while (blocked(first)) ++first;
    for (size_t k = first + 1; k < static_cast<size_t>(item.emitters); ++k)
      if (!blocked(k) && of(item.ports[k]) > of(item.ports[first])) first = k;
  }
  // In a star the first port sends all copies inside its host; the first differs from chunk to chunk.
  int64_t n = 0;
  for (const int64_t all = star_ && item.kind == PortItem::Kind::Local ? copies : 1; n < all; ++n) take(first);
  if (copies > n) {
    // Ports without a share have none because others are better; a heap keeps the rest in order of credit,
    // lower index first among equals.
    heap_.clear();
    for (size_t k = 0; k < item.ports.size(); ++k) {
      if ((item.share[k] > 0 && !blocked(k)) || k == first)
        heap_.emplace_back(rank_port(k), -static_cast<int32_t>(k));
    }
    std::make_heap(heap_.begin(), heap_.end());
    while (n < copies) {
      std::pop_heap(heap_.begin(), heap_.end());
      const auto k = static_cast<size_t>(-heap_.back().second);
      // An outdated entry is pushed back with its current key. Keys only fall, so a current top is the largest.
      const int64_t key = rank_port(k);
      if (key == heap_.back().first) {
        for (int64_t times = std::min(fan_, copies - n); times > 0; --times, ++n) take(k);
      }
      heap_.back().first = rank_port(k);  // if not taken: other ports of its host have been taken
      std::push_heap(heap_.begin(), heap_.end());
    }
  }
  if (between_hosts) {
    for (size_t k = 0; k < item.ports.size(); ++k) copies_of_host(k) = 0;
  }
  return count_;
}

}  // namespace meshcast
