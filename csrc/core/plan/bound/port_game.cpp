#include "plan/bound/port_game.h"

#include <algorithm>

namespace meshcast {
namespace {

// Products of a time and a part of a whole stay below 2^53, regrets below 2^44, so that a regret times a whole
// fits into 62 bits.
constexpr int32_t kTimeBits = 35;
constexpr int32_t kWholeBits = 18;
constexpr int64_t kWhole = int64_t{1} << kWholeBits;
constexpr int64_t kMostRegret = int64_t{1} << 43;
constexpr int64_t kMostWeight = 1 << 10;  // of a round, so that sums fit

}  // namespace

PortGame::PortGame(size_t boxes, const Network& network, int64_t most_ns)
    : network_(network), most_ns_(std::max<int64_t>(1, most_ns)), boxes_(boxes) {
  const auto ports = static_cast<size_t>(network.port_count());
  load_.assign(ports, 0);
  regret_.assign(ports, 0);
  price_.assign(ports, kWhole / static_cast<int64_t>(std::max<size_t>(1, ports)));
  price_sum_.assign(ports, 0);
}

std::pair<size_t, bool> PortGame::add(size_t box, Use use) {
  std::vector<Way>& ways = boxes_[box];
  for (size_t i = 0; i < ways.size(); ++i)
    if (ways[i].use == use) return {i, false};
  Way way;
  for (const auto& [port, bytes] : use) {
    const int64_t ns = transfer_ns(bytes, network_.port_rate(port));
    way.time.push_back(static_cast<int64_t>((static_cast<__int128>(ns) << kTimeBits) / most_ns_));
  }
  size_ += static_cast<int64_t>(use.size());
  way.use = std::move(use);
  way.part = ways.empty() ? kWhole : 0;
  ways.push_back(std::move(way));
  return {ways.size() - 1, true};
}

void PortGame::forget() {
  round_ = 0;
  std::fill(price_sum_.begin(), price_sum_.end(), 0);
  for (std::vector<Way>& ways : boxes_)
    for (Way& way : ways) way.part_sum = 0;
}

// The regret of a way is how much cheaper it would have been than the mixture at the prices so far. Regret
// matching plus: a player takes each choice with a probability in proportion to its regret; negative regrets
// are cut at zero at once. In a zero-sum game the averages of both players approach an equilibrium as 1 /
// sqrt(rounds).
void PortGame::choose_ways(std::vector<Way>* ways) {
  if (ways->size() > 1) {
    // The present cost of the box, and the cost of each way alone, in units of the game times prices.
    int64_t paid = 0;
    int64_t most = 0;
    std::vector<int64_t> cost(ways->size());
    for (size_t i = 0; i < ways->size(); ++i) {
      const Way& way = (*ways)[i];
      for (size_t k = 0; k < way.use.size(); ++k)
        cost[i] += way.time[k] * price_[static_cast<size_t>(way.use[k].first)] >> kWholeBits;
      paid += cost[i] * way.part >> kWholeBits;
    }
    int64_t all = 0;
    for (size_t i = 0; i < ways->size(); ++i) {
      Way& way = (*ways)[i];
      way.regret = std::max<int64_t>(0, way.regret + paid - cost[i]);
      most = std::max(most, way.regret);
      all += way.regret;
    }
    for (Way& way : *ways) {
      // Without any regret the mixture is unchanged.
      if (all > 0) way.part = static_cast<int64_t>((static_cast<__int128>(way.regret) << kWholeBits) / all);
      if (most > kMostRegret) way.regret /= 2;
    }
  }
  for (Way& way : *ways) {
    way.part_sum += way.part * std::min(round_, kMostWeight);
    for (size_t k = 0; k < way.use.size(); ++k)
      load_[static_cast<size_t>(way.use[k].first)] += way.time[k] * way.part >> kWholeBits;
  }
}

void PortGame::price_ports() {
  // The ports' player gains what boxes pay: the regret of a port is its load above the mean at the present
  // prices.
  __int128 paid = 0;
  for (size_t l = 0; l < load_.size(); ++l) paid += static_cast<__int128>(load_[l]) * price_[l];
  const auto mean = static_cast<int64_t>(paid >> kWholeBits);
  int64_t all = 0;
  int64_t most = 0;
  for (size_t l = 0; l < load_.size(); ++l) {
    regret_[l] = std::max<int64_t>(0, regret_[l] + load_[l] - mean);
    most = std::max(most, regret_[l]);
    all += regret_[l];
  }
  for (size_t l = 0; l < load_.size(); ++l) {
    if (all > 0) price_[l] = static_cast<int64_t>((static_cast<__int128>(regret_[l]) << kWholeBits) / all);
    price_sum_[l] += price_[l] * std::min(round_, kMostWeight);
    if (most > kMostRegret) regret_[l] /= 2;
  }
}

// Later rounds are better, and count more.
void PortGame::play(int64_t rounds) {
  for (; rounds > 0; --rounds) {
    ++round_;
    std::fill(load_.begin(), load_.end(), 0);
    for (std::vector<Way>& ways : boxes_) choose_ways(&ways);
    price_ports();
  }
}

std::vector<int64_t> PortGame::parts(size_t box) const {
  std::vector<int64_t> out;
  for (const Way& way : boxes_[box]) out.push_back(way.part_sum);
  return out;
}

int64_t PortGame::busiest_ns() const {
  // From bytes, not from the rounded units of the game: this is the time of the mixture in a plan.
  std::vector<int64_t> busy(load_.size(), 0);
  for (const std::vector<Way>& ways : boxes_) {
    int64_t all = 0;
    for (const Way& way : ways) all += way.part_sum;
    if (all == 0) continue;
    for (const Way& way : ways) {
      for (size_t k = 0; k < way.use.size(); ++k) {
        const auto bytes = static_cast<int64_t>(static_cast<__int128>(way.use[k].second) * way.part_sum / all);
        const int32_t port = way.use[k].first;
        busy[static_cast<size_t>(port)] += transfer_ns(bytes, network_.port_rate(port));
      }
    }
  }
  return busy.empty() ? 0 : *std::max_element(busy.begin(), busy.end());
}

}  // namespace meshcast
