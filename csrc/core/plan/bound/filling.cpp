#include "plan/bound/filling.h"

#include <algorithm>
#include <limits>
#include <map>
#include <set>
#include <vector>

#include "plan/bound/parties.h"
#include "plan/draft.h"
#include "plan/network.h"

namespace meshcast {
namespace {

constexpr int64_t kSecond = 1'000'000'000;  // nanoseconds

using Nics = std::set<int32_t>;

void add_nics(const Party& party, const Network& network, Nics* nics) {
  for (const int32_t index : party.ranks) nics->insert(network.nic(index));
}

// The smallest chunk of each bundle, bytes. A chunk has pieces of one bundle only.
std::vector<int64_t> smallest_chunks(const Plan& plan, const std::vector<Bundle>& bundles) {
  std::vector<int32_t> bundle_of(plan.tasks.size());
  for (size_t b = 0; b < bundles.size(); ++b)
    for (const int32_t task : bundles[b].tasks) bundle_of[static_cast<size_t>(task)] = static_cast<int32_t>(b);
  std::vector<int64_t> out(bundles.size(), std::numeric_limits<int64_t>::max());
  for (const Chunk& chunk : plan.chunks) {
    const ChunkPiece& piece = plan.pieces[static_cast<size_t>(chunk.piece_begin)];
    int64_t& least = out[static_cast<size_t>(bundle_of[static_cast<size_t>(piece.task)])];
    least = std::min(least, chunk.nbytes);
  }
  return out;
}

int64_t floor_ns(__int128 nbytes, int64_t rate) { return static_cast<int64_t>(nbytes * kSecond / rate); }

// The least time in which the receivers of a host take in all of it: once over its NICs, the rest over any
// port.
int64_t taking_in_ns(const Party& party, const Nics& nics, int64_t nbytes, const Network& network) {
  int64_t over_nics = 0, over_all = 0;
  for (const int32_t nic : nics) over_nics += network.port_rate(network.nic_in(nic));
  over_all = over_nics;
  for (const int32_t index : party.ranks) over_all += network.port_rate(network.local_in(index));
  const auto copies = static_cast<__int128>(party.ranks.size());
  return std::max(floor_ns(nbytes, over_nics), floor_ns(copies * nbytes, over_all));
}

int64_t filling_of(const Parties& parties, int64_t nbytes, int64_t chunk_bytes, const Network& network) {
  Nics holding, all;  // receivers on a holder's host also send, once they have a copy
  for (const Party& party : parties.holders) add_nics(party, network, &holding);
  size_t ports = 0;
  int64_t taking_in = std::numeric_limits<int64_t>::max();
  for (size_t p = 0; p < parties.receivers.size(); ++p) {
    const Party& party = parties.receivers[p];
    if (!parties.remote(p)) {
      add_nics(party, network, &holding);
      continue;
    }
    Nics nics;
    add_nics(party, network, &nics);
    ports = std::max(ports, nics.size());
    taking_in = std::min(taking_in, taking_in_ns(party, nics, nbytes, network));
    all.merge(nics);
  }
  const auto holding_ports = static_cast<int64_t>(holding.size());
  all.merge(holding);
  int64_t fastest = 0;
  for (const int32_t nic : all) fastest = std::max(fastest, network.port_rate(network.nic_out(nic)));
  const int64_t begin = last_begin_ns(holding_ports, parties.remote_hosts, static_cast<int64_t>(ports),
                                      transfer_ns(chunk_bytes, fastest), network.latency_ns());
  return begin + taking_in + network.latency_ns();
}

// The bytes that the ranks of one host take in, of the bundles that none of them holds.
struct Arrivals {
  __int128 nbytes = 0;
  int64_t first_ns = std::numeric_limits<int64_t>::max();  // the least time until the host has a whole chunk
  Nics nics;
  std::set<int32_t> ranks;
};

void add_arrivals(const Parties& parties, int64_t nbytes, int64_t chunk_bytes, const Network& network,
                  std::map<int32_t, Arrivals>* hosts) {
  for (size_t p = 0; p < parties.receivers.size(); ++p) {
    if (!parties.remote(p)) continue;
    const Party& party = parties.receivers[p];
    Arrivals& at = (*hosts)[party.host];
    at.nbytes += static_cast<__int128>(party.ranks.size()) * nbytes;
    at.ranks.insert(party.ranks.begin(), party.ranks.end());
    add_nics(party, network, &at.nics);
    for (const int32_t index : party.ranks) {
      const int64_t rate = network.port_rate(network.nic_in(network.nic(index)));
      at.first_ns = std::min(at.first_ns, floor_ns(chunk_bytes, rate) + network.latency_ns());
    }
  }
}

// The time over NICs alone, or with copies from the first whole chunk on.
int64_t copying_in_ns(const Arrivals& at, const Network& network) {
  int64_t nics = 0, local = 0;
  for (const int32_t nic : at.nics) nics += network.port_rate(network.nic_in(nic));
  for (const int32_t rank : at.ranks) local += network.port_rate(network.local_in(rank));
  const __int128 missed = static_cast<__int128>(at.first_ns) * local / kSecond;  // bytes
  return std::min(floor_ns(at.nbytes, nics), floor_ns(at.nbytes + missed, nics + local)) + network.latency_ns();
}

}  // namespace

int64_t last_begin_ns(int64_t holding, int64_t hosts, int64_t ports, int64_t hold_ns, int64_t latency_ns) {
  std::map<int64_t, int64_t> free{{0, holding}};  // time -> ports that become free then
  while (true) {
    const auto [now, count] = *free.begin();
    if (hosts <= count) return now;
    hosts -= count;
    free.erase(free.begin());
    free[now + hold_ns] += count;
    free[now + hold_ns + latency_ns] += count * ports;
  }
}

int64_t filling_bound_ns(const Plan& plan) {
  const Network network(plan.topology, plan.ranks);
  const std::vector<Bundle> bundles = bundle_tasks(plan.tasks, plan.problems);
  const std::vector<int64_t> smallest = smallest_chunks(plan, bundles);
  int64_t bound = plan.lower_bound_ns;
  std::map<int32_t, Arrivals> hosts;
  for (size_t b = 0; b < bundles.size(); ++b) {
    const Task& lead = plan.tasks[static_cast<size_t>(bundles[b].tasks.front())];
    // This bound does not cover reductions.
    if (lead.reduce != ReduceOp::None || lead.receivers.empty() || bundles[b].nbytes == 0) continue;
    const Parties parties = find_parties(lead, network);
    if (parties.remote_hosts == 0) continue;
    bound = std::max(bound, filling_of(parties, bundles[b].nbytes, smallest[b], network));
    add_arrivals(parties, bundles[b].nbytes, smallest[b], network, &hosts);
  }
  for (const auto& [_, arrivals] : hosts) bound = std::max(bound, copying_in_ns(arrivals, network));
  return bound;
}

}  // namespace meshcast
