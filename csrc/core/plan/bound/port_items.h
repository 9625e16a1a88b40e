#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "plan/bound/parties.h"
#include "plan/network.h"

namespace meshcast {

// A part of the demand that ports of one kind have to share: `copies` transmissions of `nbytes` each. The
// ports [0, emitters) may take any of them and must take at least one copy's worth, since data first leaves
// its holders; the others relay at most copies - 1. DetourOut and DetourIn are for copies that come over a NIC
// although they could have come from inside the host (see detours.h).
struct PortItem {
  enum class Kind : uint8_t { NicOut, NicIn, Local, DetourOut, DetourIn };
  Kind kind = Kind::NicOut;
  int32_t bundle = -1;
  int32_t party = -1;  // index into Parties::receivers, not for NicOut
  int64_t nbytes = 0;
  int64_t copies = 0;
  int64_t detour = 0;  // bytes that detours add; negative for Local, which they relieve
  int32_t emitters = 0;
  std::vector<int32_t> ports;
  std::vector<int64_t> share;  // bytes for each port, filled by balance_ports

  int64_t total() const { return nbytes * copies + detour; }
  // Bytes that have to come from emitters. A copy that came over a NIC may be passed on instead of the
  // holder's.
  int64_t first() const { return std::max<int64_t>(0, std::min(nbytes, nbytes + detour)); }
  bool inside() const { return kind == Kind::Local; }
  bool into() const { return kind == Kind::NicIn || kind == Kind::DetourIn; }
};

// Between hosts: one item for the NIC out ports of every host that takes part, and one for the NIC in ports of
// each remote host.
void append_network_items(int32_t bundle, int64_t nbytes, const Parties& parties, const Network& network,
                          std::vector<PortItem>* out);

// Inside hosts: one item for the local out ports of each receiving host that is marked hot.
void append_local_items(int32_t bundle, int64_t nbytes, const Parties& parties, const Network& network,
                        const std::vector<char>& hot_hosts, std::vector<PortItem>* out);

// For the bound: all copies that each receiving host that is marked hot takes in. They come over NICs, if other
// hosts have a part in the box, or from ranks of the host; the latter are counted by their local ports out or,
// with `into`, by those into the receivers.
void append_arrival_items(int32_t bundle, int64_t nbytes, const Parties& parties, const Network& network,
                          const std::vector<char>& hot_hosts, bool into, std::vector<PortItem>* out);

// The NIC out ports over which hosts other than `host` can send a box that they hold or get; ascending.
std::vector<int32_t> ports_from_elsewhere(const Parties& parties, int32_t host, const Network& network);

// For the bound: the copies that the receiving hosts that are marked hot make inside, counted by their local
// ports as above. They may come from other hosts that have a part in the box instead, counted by their NICs
// out. These are in addition to the NicOut items of append_network_items, which carry the copy that each remote
// host must get.
void append_copy_items(int32_t bundle, int64_t nbytes, const Parties& parties, const Network& network,
                       const std::vector<char>& hot_hosts, bool into, std::vector<PortItem>* out);

// For a bundle to be reduced: items for the ports out of and into all that take part (see find_port_demand).
// The ports in are counted by host, each of which is entered once, or, with `whole_results`, by results: all
// receiving hosts except one get the whole result, over NICs of receivers.
void append_reduce_items(int32_t bundle, int64_t nbytes, const Task& task, const Network& network,
                         bool whole_results, std::vector<PortItem>* out);

// The same with ranks instead of hosts, whose hops take either their NIC or their local ports.
void append_reduce_rank_items(int32_t bundle, int64_t nbytes, const Task& task, const Network& network,
                              bool whole_results, std::vector<PortItem>* out);

// Splits every item over its ports so that the busiest port finishes as early as possible, then the next
// busiest, and so on. Each item in turn pours its bytes where the levels (load / rate) are lowest; as the
// items constrain only themselves and the sum of load^2 / rate falls with each step, repeating this converges
// to balanced loads. Returns the highest level, ns.
int64_t balance_ports(const Network& network, std::vector<PortItem>* items);

// Moves shares from relays to emitters while these stay below `level` ns: data from holders arrives sooner than
// forwarded data. Expects balanced items.
void prefer_emitters(const Network& network, int64_t level, std::vector<PortItem>* items);

// Gathers the shares of relays on as few ports as can take them below `level` ns, at most the box once on each:
// the trees of an item then differ little from chunk to chunk, and chains keep their order. Expects balanced
// items.
void pack_relays(const Network& network, int64_t level, std::vector<PortItem>* items);

}  // namespace meshcast
