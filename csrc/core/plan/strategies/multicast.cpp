#include <algorithm>

#include "plan/strategies/reductions.h"
#include "plan/strategies/strategies.h"
#include "plan/strategies/tree_builder.h"

namespace meshcast {

namespace {

// Bundles that hold a limiting port for longer than the port at its other end; of these, the ones with the
// slowest such port, since they wait for the others.
std::vector<char> find_slow(const PortDemand& demand, const Network& network) {
  // Phase 1: bytes of each port over all bundles, and each bundle's fastest port per side, out and in.
  std::vector<int64_t> load(static_cast<size_t>(network.port_count()), 0);
  for (const PortItem& item : demand.items)
    for (size_t k = 0; k < item.ports.size(); ++k) load[static_cast<size_t>(item.ports[k])] += item.share[k];
  std::vector<int64_t> rates(demand.parties.size(), INT64_MAX);
  std::vector<int64_t> fastest(demand.parties.size() * 2, 0);
  const auto side = [](const PortItem& item) { return static_cast<size_t>(item.bundle) * 2 + item.into(); };
  for (const PortItem& item : demand.items) {
    if (item.inside()) continue;
    for (size_t k = 0; k < item.ports.size(); ++k)
      if (item.share[k] > 0)
        fastest[side(item)] = std::max(fastest[side(item)], network.port_rate(item.ports[k]));
  }
  // Phase 2: ports within 5 % of the bound that are slower than the port at the other end. The slow port then
  // limits the rate, and a chunk holds it longer than the fast one.
  for (const PortItem& item : demand.items) {
    if (item.inside()) continue;
    for (size_t k = 0; k < item.ports.size(); ++k) {
      const auto port = item.ports[k];
      const auto ns = transfer_ns(load[static_cast<size_t>(port)], network.port_rate(port));
      if (item.share[k] > 0 && ns > demand.bound_ns / 20 * 19 &&
          network.port_rate(port) < fastest[side(item) ^ 1]) {
        int64_t& rate = rates[static_cast<size_t>(item.bundle)];
        rate = std::min(rate, network.port_rate(port));
      }
    }
  }
  const int64_t slowest = rates.empty() ? 0 : *std::min_element(rates.begin(), rates.end());
  std::vector<char> slow(rates.size(), 0);
  for (size_t b = 0; b < rates.size(); ++b) slow[b] = rates[b] == slowest && slowest < INT64_MAX;
  return slow;
}

// The rates of the NICs that carry a share.
std::pair<int64_t, int64_t> slowest_and_fastest(const PortDemand& demand, const Network& network) {
  std::pair<int64_t, int64_t> out{INT64_MAX, 0};
  for (const PortItem& item : demand.items) {
    if (item.inside()) continue;
    for (size_t k = 0; k < item.ports.size(); ++k) {
      if (item.share[k] == 0) continue;
      out.first = std::min(out.first, network.port_rate(item.ports[k]));
      out.second = std::max(out.second, network.port_rate(item.ports[k]));
    }
  }
  return out;
}

// Units of a chunk at the highest rate: with more, chunk sizes follow the rates more closely.
constexpr int64_t kFewestUnits = 8;
constexpr int64_t kMostUnits = 32;
constexpr int64_t kUnitsInAll = 65'536;

// Chunks sized so that every hop holds its slower port for the same time, at any rates. A fast NIC that
// receives from slow ones then serves them in turn, each once in a period; with chunks of equal size the
// periods of different senders do not divide each other, and the senders wait.
Draft draft_timed(const Inputs& in, const PortDemand& demand, TreeStyle style) {
  Drafter drafter(in.tasks, in.problems, in.network);
  TreeBuilder trees(demand, in.network, style.fan);
  // Phase 1: the highest rate of each bundle, which is that of its slowest receiving host.
  std::vector<int64_t> in_rate(in.bundles.size(), INT64_MAX);  // of the slowest receiving host
  for (const PortItem& item : demand.items) {
    if (!item.into()) continue;
    int64_t rate = 0;
    for (size_t k = 0; k < item.ports.size(); ++k)
      if (item.share[k] > 0) rate = std::max(rate, in.network.port_rate(item.ports[k]));
    int64_t& slowest = in_rate[static_cast<size_t>(item.bundle)];
    slowest = std::min(slowest, rate);
  }
  // Phase 2: units. More of them follow the rates more closely, but those of all chunks together must stay few
  // enough to cut.
  int64_t chunks = 1;
  for (const Bundle& bundle : in.bundles) chunks += bundle.nbytes / in.chunk_bytes;
  const int64_t units = std::clamp(kUnitsInAll / chunks, kFewestUnits, kMostUnits);
  const int64_t fastest = slowest_and_fastest(demand, in.network).second;
  for (size_t b = 0; b < in.bundles.size(); ++b) {
    const Bundle& bundle = in.bundles[b];
    if (in.lead(bundle).reduce != ReduceOp::None) continue;
    UnitCutter cutter(bundle, in.tasks, in.problems, std::max<int64_t>(1, in.chunk_bytes / units));
    int64_t before = 0;
    while (!cutter.done()) {
      // The sender is chosen before the chunk is cut, since its rate decides the size.
      const int32_t port = trees.next_emitter(static_cast<int32_t>(b));
      const int64_t rate = port < 0 ? fastest : std::min(in.network.port_rate(port), in_rate[b]);
      const auto want = static_cast<int64_t>(static_cast<__int128>(in.chunk_bytes) * rate / fastest);
      const int32_t c = cutter.next(std::max<int64_t>(want, 1), &drafter);
      const int64_t nbytes = drafter.chunk_bytes(c);
      // Due in proportion to the bytes before it: in a steady stream the bundle ends at the bound.
      const auto due = static_cast<int64_t>(static_cast<__int128>(before) * demand.bound_ns / bundle.nbytes);
      drafter.send(c, trees.route(static_cast<int32_t>(b), bundle.nbytes, nbytes, port), -1,
                   style.steady ? due : -1);
      before += nbytes;
    }
  }
  draft_reductions(in, style.steady ? demand.bound_ns : -1, style.second_routes, &drafter);
  Draft draft = drafter.take();
  draft.patience = style.patience;
  return draft;
}

}  // namespace

bool has_slow_ports(const PortDemand& demand, const Network& network) {
  const std::vector<char> slow = find_slow(demand, network);
  return std::find(slow.begin(), slow.end(), 1) != slow.end();
}

bool has_unlike_nics(const PortDemand& demand, const Network& network) {
  return slowest_and_fastest(demand, network).first < slowest_and_fastest(demand, network).second;
}

Draft draft_multicast(const Inputs& in, const PortDemand& demand, TreeStyle style) {
  if (style.timed) return draft_timed(in, demand, style);
  Drafter drafter(in.tasks, in.problems, in.network);
  TreeBuilder trees(demand, in.network, style.fan);
  const std::vector<char> slow = style.finer > 1 ? find_slow(demand, in.network) : std::vector<char>();
  for (size_t b = 0; b < in.bundles.size(); ++b) {
    const Bundle& bundle = in.bundles[b];
    if (in.lead(bundle).reduce != ReduceOp::None) continue;
    int64_t chunk_bytes = slow.empty() || slow[b] ? in.chunk_bytes : in.chunk_bytes / style.finer;
    // 8/16 to 16/16; steps of 5 modulo 9 visit all nine sizes in nine bundles.
    if (style.uneven) chunk_bytes = chunk_bytes / 16 * (8 + static_cast<int64_t>(b) * 5 % 9);
    const Drafter::Range chunks = drafter.cut(bundle, std::max<int64_t>(chunk_bytes, 1));
    int64_t before = 0;
    for (int32_t c = chunks.first; c < chunks.last; ++c) {
      const int64_t nbytes = drafter.chunk_bytes(c);
      const auto due = static_cast<int64_t>(static_cast<__int128>(before) * demand.bound_ns / bundle.nbytes);
      drafter.send(c, trees.route(static_cast<int32_t>(b), bundle.nbytes, nbytes), -1, style.steady ? due : -1);
      before += nbytes;
    }
  }
  draft_reductions(in, style.steady ? demand.bound_ns : -1, style.second_routes, &drafter);
  Draft draft = drafter.take();
  draft.patience = style.patience;
  return draft;
}

}  // namespace meshcast
