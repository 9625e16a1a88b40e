#include "plan/bound/reduce_mix.h"

#include <algorithm>
#include <map>

#include "plan/bound/port_game.h"

namespace meshcast {
namespace {

constexpr int32_t kMostRounds = 64;         // of looking for cheapest ways
constexpr int64_t kMostVisits = 2'000'000;  // pairs of ends that are looked at, in all rounds
constexpr int64_t kMostSteps = 20'000'000;  // of the game, a port of a way each
constexpr int64_t kGameRounds = 200;        // between looks
constexpr int64_t kPriceUnit = 1 << 24;     // of the most expensive port
constexpr int64_t kClose = 500;             // a bound within 1/500 of the mixture's time is good enough

struct Flexible {  // another demand on the ports
  const PortItem* item = nullptr;
  size_t box = 0;  // of the game
};

PortGame::Use to_use(const std::vector<int32_t>& ports, int64_t nbytes) {
  std::map<int32_t, int64_t> by_port;
  for (const int32_t port : ports) by_port[port] += nbytes;
  return {by_port.begin(), by_port.end()};
}

// One emission over the cheapest port of an emitter, the other copies over the cheapest of all.
__int128 cheapest_of(const PortItem& item, const ReduceWays::Prices& price, PortGame::Use* use) {
  const auto cheapest = [&](size_t end) {
    return *std::min_element(
        item.ports.begin(), item.ports.begin() + static_cast<int64_t>(end),
        [&](int32_t a, int32_t b) { return price[static_cast<size_t>(a)] < price[static_cast<size_t>(b)]; });
  };
  const int32_t first = cheapest(static_cast<size_t>(item.emitters));
  const int32_t other = cheapest(item.ports.size());
  std::map<int32_t, int64_t> by_port{{first, item.nbytes}};
  if (item.copies > 1) by_port[other] += item.nbytes * (item.copies - 1);
  use->assign(by_port.begin(), by_port.end());
  return (price[static_cast<size_t>(first)] + (item.copies - 1) * price[static_cast<size_t>(other)]) *
         item.nbytes;
}

}  // namespace

// Let every port have a price per nanosecond, and T be the time of a plan. Its ports are busy for T at most, so
// its cost is at most T times the sum of all prices. Its cost is at least that of the cheapest way of every
// box; hence T is at least the one divided by the other, for any prices. By linear programming duality the
// right prices make this as large as mixtures of ways allow. Both are found by column generation: boxes are
// divided among the ways known so far (PortGame), and the cheapest ways at the resulting prices are added.
//
// Example. Two boxes of 10 s each can go over port A or port B. Prices 1 and 1: each box costs 10 on any way,
// 20 in all, over a sum of prices of 2: no plan takes less than 10 s. Prices 1 and 0: the cheapest way of both
// is B at no cost, so the bound is 0: true, but useless. Regret matching finds prices of the first kind.
ReduceMix find_reduce_mix(const std::vector<const Task*>& tasks, const std::vector<int64_t>& nbytes,
                          const std::vector<PortItem>& items, const Network& network) {
  const auto ports = 2 * static_cast<size_t>(network.nic_count());
  std::vector<ReduceWays> ways;
  int64_t visits = 0;
  int64_t slowest = INT64_MAX;
  for (size_t l = 0; l < ports; ++l) slowest = std::min(slowest, network.port_rate(static_cast<int32_t>(l)));
  // Above the time of any mixture, so that times in the game are fractions of it below one.
  int64_t most_ns = 0;
  for (size_t b = 0; b < tasks.size(); ++b) {
    ways.emplace_back(*tasks[b], network);
    visits += ways.back().size();
    const auto ranks = static_cast<int64_t>(tasks[b]->holders.size() + tasks[b]->receivers.size());
    most_ns += transfer_ns(nbytes[b], slowest) * ranks;
  }
  std::vector<Flexible> others;
  for (const PortItem& item : items) {
    if (item.kind == PortItem::Kind::Local || item.copies == 0) continue;
    others.push_back({&item, ways.size() + others.size()});
    most_ns += transfer_ns(item.nbytes, slowest) * item.copies;
  }
  ReduceMix out;
  out.ways.resize(ways.size());
  PortGame game(ways.size() + others.size(), network, most_ns);
  std::vector<int64_t> worth(ports, kPriceUnit);
  ReduceWays::Prices price(ports);
  int64_t steps = 0;
  // Phases of a round: price the ports, look for the cheapest way of every box, take the bound, play the
  // game.
  for (int32_t round = 1; round <= kMostRounds && round * visits <= kMostVisits; ++round) {
    // Per byte: worth / rate, in fixed point, rounded down, so that the cost of ways is never overestimated.
    __int128 all = 0;
    for (size_t l = 0; l < ports; ++l) {
      price[l] = (static_cast<__int128>(worth[l]) << 32) / network.port_rate(static_cast<int32_t>(l));
      all += worth[l];
    }
    __int128 value = 0;
    bool fresh = false;
    ReduceWay way;
    for (size_t b = 0; b < ways.size(); ++b) {
      value += ways[b].cheapest(price, &way) * nbytes[b];
      if (way.chain.empty()) continue;
      const auto [number, is_new] = game.add(b, to_use(way.ports(), nbytes[b]));
      if (is_new) out.ways[b].push_back({way, 0});
      fresh = fresh || is_new;
    }
    PortGame::Use use;
    for (const Flexible& other : others) {
      value += cheapest_of(*other.item, price, &use);
      fresh = game.add(other.box, use).second || fresh;
    }
    // Shifted by 16 bits before and after, since value * 10^9 could pass 127 bits; both shifts round the
    // bound down.
    if (all > 0)
      out.bound_ns = std::max(out.bound_ns, static_cast<int64_t>(((value >> 16) * 1000000000 / all) >> 16));
    if (game.size() == 0) break;
    // The mixture takes at least the optimum of the linear program, the bound is at most that. If they meet,
    // neither can improve.
    if (!fresh && out.bound_ns >= game.busiest_ns() - game.busiest_ns() / kClose) break;
    const int64_t rounds = fresh ? kGameRounds : 2 * kGameRounds;
    steps += rounds * game.size();
    if (round > 1 && steps > kMostSteps) break;
    // Averages over rounds without the new ways would keep their parts too small.
    if (fresh) game.forget();
    game.play(rounds);
    const int64_t most =
        *std::max_element(game.prices().begin(), game.prices().begin() + static_cast<int64_t>(ports));
    if (most == 0) break;
    for (size_t l = 0; l < ports; ++l)
      worth[l] = static_cast<int64_t>(static_cast<__int128>(game.prices()[l]) * kPriceUnit / most);
  }
  for (size_t b = 0; b < ways.size(); ++b) {
    const std::vector<int64_t> parts = game.parts(b);
    for (size_t i = 0; i < out.ways[b].size(); ++i) out.ways[b][i].part = parts[i];
  }
  return out;
}

}  // namespace meshcast
