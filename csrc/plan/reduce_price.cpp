#include "plan/reduce_price.h"

#include <algorithm>
#include <map>

namespace meshcast {
namespace {

constexpr int32_t kMostRounds = 96;
constexpr int64_t kMostVisits = 2'000'000;  // pairs of ends that are looked at, all rounds together
constexpr int64_t kPriceUnit = 1 << 20;     // of the busiest lane

void sort_unique(std::vector<int32_t>* values) {
  std::sort(values->begin(), values->end());
  values->erase(std::unique(values->begin(), values->end()), values->end());
}

int32_t cheapest_lane(const std::vector<int32_t>& lanes, const ReduceWays::Prices& price) {
  return *std::min_element(lanes.begin(), lanes.end(), [&](int32_t a, int32_t b) {
    return price[static_cast<size_t>(a)] < price[static_cast<size_t>(b)];
  });
}

}  // namespace

ReduceWays::ReduceWays(const Task& task, const Network& network) {
  std::map<int32_t, Site> sites;
  for (size_t i = 0; i < task.holders.size(); ++i) {
    const int32_t r = network.index(task.holders[i]);
    Site& site = sites[network.host(r)];
    if (task.contribution[i] >= 64) {
      countable_ = false;
      return;
    }
    site.values |= uint64_t{1} << task.contribution[i];
    site.out.push_back(network.nic_out(network.nic(r)));
    site.in.push_back(network.nic_in(network.nic(r)));
    all_ |= site.values;
  }
  for (const int32_t rank : task.receivers) {
    const int32_t r = network.index(rank);
    Site& site = sites[network.host(r)];
    site.needs = true;
    site.need_out.push_back(network.nic_out(network.nic(r)));
    site.need_in.push_back(network.nic_in(network.nic(r)));
  }
  for (auto& [host, site] : sites) {
    site.root_out = site.out;
    site.root_out.insert(site.root_out.end(), site.need_out.begin(), site.need_out.end());
    for (std::vector<int32_t>* lanes : {&site.out, &site.in, &site.need_out, &site.need_in, &site.root_out})
      sort_unique(lanes);
    travels_ = travels_ || (site.needs && site.values != all_);
    site.complete = site.values == all_;
    sites_.push_back(std::move(site));
  }
}

__int128 ReduceWays::cheapest(const Prices& price, std::vector<int32_t>* lanes) {
  lanes->clear();
  if (!travels_ || !countable_) return 0;
  const auto at = [&](int32_t lane) { return price[static_cast<size_t>(lane)]; };
  int32_t relay = -1;  // out of any host that gets the result or makes it alone
  int32_t alone = -1;  // out of hosts that make it alone
  __int128 results = 0;
  int32_t results_count = 0;  // as if every host that needs the result took it in
  cover_.clear();
  for (size_t h = 0; h < sites_.size(); ++h) {
    Site& site = sites_[h];
    if (site.values != 0) {
      site.cheapest_out = cheapest_lane(site.out, price);
      site.cheapest_in = cheapest_lane(site.in, price);
      site.cheapest_root_out = cheapest_lane(site.root_out, price);
      cover_.add(site.values, at(site.cheapest_out) + at(site.cheapest_in), static_cast<int32_t>(h));
    }
    if (!site.needs) continue;
    const int32_t out = site.makes_it() ? site.cheapest_root_out : cheapest_lane(site.need_out, price);
    if (relay < 0 || at(out) < at(relay)) relay = out;
    if (site.makes_it()) {
      if (alone < 0 || at(out) < at(alone)) alone = out;
      continue;
    }
    site.cheapest_need_in = cheapest_lane(site.need_in, price);
    results += at(site.cheapest_need_in);
    ++results_count;
  }
  const auto emit = [&](const Site& root) {
    const int32_t own = root.cheapest_root_out;
    return alone >= 0 && at(alone) < at(own) ? alone : own;
  };
  __int128 best = -1;
  size_t best_root = 0, best_first = 0;
  std::vector<int32_t> best_others;
  std::map<uint64_t, std::pair<__int128, std::vector<int32_t>>> covers;  // by what is missing at both ends
  for (size_t z = 0; z < sites_.size(); ++z) {
    const Site& root = sites_[z];
    if (root.values == 0) continue;
    __int128 sent = results;
    int32_t count = results_count;
    if (root.needs && !root.makes_it()) {
      sent -= at(root.cheapest_need_in);
      --count;
    }
    if (count > 0) {
      const __int128 first = at(emit(root));
      sent += first + (count - 1) * std::min(first, at(relay));
    }
    if (root.values == all_) {
      if (best < 0 || sent < best) {
        best = sent;
        best_root = best_first = z;
        best_others.clear();
      }
      continue;
    }
    for (size_t f = 0; f < sites_.size(); ++f) {
      const Site& first = sites_[f];
      if (f == z || first.values == 0) continue;
      __int128 cost = sent + at(root.cheapest_in) + at(first.cheapest_out);
      if (best >= 0 && cost >= best) continue;
      const uint64_t missing = all_ & ~root.values & ~first.values;
      const auto [known, fresh] = covers.try_emplace(missing);
      if (fresh) known->second.first = cover_.solve(missing, &known->second.second);
      cost += known->second.first;
      if (best >= 0 && cost >= best) continue;
      best = cost;
      best_root = z;
      best_first = f;
      best_others = known->second.second;
    }
  }
  const Site& root = sites_[best_root];
  if (best_first != best_root) {
    lanes->push_back(root.cheapest_in);
    lanes->push_back(sites_[best_first].cheapest_out);
  }
  for (const int32_t h : best_others) {
    lanes->push_back(sites_[static_cast<size_t>(h)].cheapest_out);
    lanes->push_back(sites_[static_cast<size_t>(h)].cheapest_in);
  }
  int32_t count = 0;
  for (size_t h = 0; h < sites_.size(); ++h) {
    const Site& site = sites_[h];
    if (!site.needs || site.makes_it() || h == best_root) continue;
    lanes->push_back(site.cheapest_need_in);
    const int32_t own = emit(root);
    lanes->push_back(count++ == 0 || at(own) <= at(relay) ? own : relay);
  }
  return best;
}

// Let every lane have a price per nanosecond, and T be the time of a plan. Its lanes are busy for T at most, so
// all that it uses is worth at most T times the sum of all prices. It is worth at least what the cheapest way
// of every box costs; hence T is at least the one divided by the other. By linear programming duality the right
// prices make this as large as mixtures of ways allow. They are sought by fictitious play: lanes that the
// cheapest ways so far have used most are raised.
int64_t reduce_price_bound(const std::vector<const Task*>& tasks, const std::vector<int64_t>& nbytes,
                           const std::vector<LaneItem>& items, const Network& network) {
  const auto lanes = 2 * static_cast<size_t>(network.nic_count());
  std::vector<ReduceWays> ways;
  int64_t visits = 0;
  for (const Task* task : tasks) {
    ways.emplace_back(*task, network);
    visits += ways.back().size();
  }
  int64_t best = 0;
  std::vector<int64_t> busy(lanes, 0);  // ns, of all rounds together
  std::vector<int64_t> worth(lanes, kPriceUnit);
  ReduceWays::Prices price(lanes);
  std::vector<int32_t> used;
  for (int32_t round = 1; round <= kMostRounds && round * visits <= kMostVisits; ++round) {
    // Per byte: worth / rate, in fixed point, rounded down, so that what ways cost is never overrated.
    __int128 all = 0;
    for (size_t l = 0; l < lanes; ++l) {
      price[l] = (static_cast<__int128>(worth[l]) << 32) / network.lane_rate(static_cast<int32_t>(l));
      all += worth[l];
    }
    __int128 value = 0;
    const auto use = [&](int32_t lane, int64_t bytes) {
      busy[static_cast<size_t>(lane)] += transfer_ns(bytes, network.lane_rate(lane)) / kMostRounds;
    };
    for (size_t b = 0; b < ways.size(); ++b) {
      value += ways[b].cheapest(price, &used) * nbytes[b];
      for (const int32_t lane : used) use(lane, nbytes[b]);
    }
    for (const LaneItem& item : items) {
      if (item.kind == LaneItem::Kind::Local || item.copies == 0) continue;
      const auto cheapest = [&](size_t end) {
        size_t at = 0;
        for (size_t k = 1; k < end; ++k)
          if (price[static_cast<size_t>(item.lanes[k])] < price[static_cast<size_t>(item.lanes[at])]) at = k;
        return item.lanes[at];
      };
      const int32_t first = cheapest(static_cast<size_t>(item.emitters));
      const int32_t other = cheapest(item.lanes.size());
      value += (price[static_cast<size_t>(first)] + (item.copies - 1) * price[static_cast<size_t>(other)]) *
               item.nbytes;
      use(first, item.nbytes);
      if (item.copies > 1) use(other, item.nbytes * (item.copies - 1));
    }
    if (all > 0) best = std::max(best, static_cast<int64_t>(((value >> 16) * 1000000000 / all) >> 16));
    const int64_t most = *std::max_element(busy.begin(), busy.end());
    if (most == 0) break;
    // Higher powers as the loads settle: prices then gather on the lanes that limit. Their sum over the rounds
    // counts, since from round to round they swing between lanes that can stand in for each other.
    const int32_t power = 2 + round / 2;
    for (size_t l = 0; l < lanes; ++l) {
      const auto level = static_cast<int64_t>(static_cast<__int128>(busy[l]) * kPriceUnit / most);
      int64_t raised = kPriceUnit;
      for (int32_t k = 0; k < power; ++k) raised = raised * level / kPriceUnit;
      worth[l] = round == 1 ? raised : worth[l] + raised;
    }
  }
  return best;
}

}  // namespace meshcast
