#include <algorithm>
#include <bit>
#include <set>

#include "catch.h"
#include "plan/bound/reduce_ways.h"
#include "plan/bound/value_cover.h"
#include "plan/cases.h"
#include "plan/random_problems.h"
#include "plan/tasks.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

// All chains of hosts that have every value and all trees after them, in words of ports: what ReduceWays
// searches.
class BruteForce {
 public:
  BruteForce(const Task& task, const Network& network, const ReduceWays::Prices& price)
      : network_(network), price_(price), hosts_(static_cast<size_t>(network.host_count())) {
    for (size_t i = 0; i < task.holders.size(); ++i) {
      Host& host = hosts_[static_cast<size_t>(network.host(network.index(task.holders[i])))];
      host.holders.push_back(network.index(task.holders[i]));
      host.values.insert(task.contribution[i]);
      all_.insert(task.contribution[i]);
    }
    for (const int32_t rank : task.receivers)
      hosts_[static_cast<size_t>(network.host(network.index(rank)))].receivers.push_back(network.index(rank));
  }

  __int128 least() {
    chain({}, {}, 0);
    return best_;
  }

 private:
  struct Host {
    std::vector<int32_t> holders, receivers;
    std::set<int32_t> values;
  };
  __int128 out(const std::vector<int32_t>& ranks) const {
    __int128 least = -1;
    for (const int32_t r : ranks) {
      const __int128 p = price_[static_cast<size_t>(network_.nic_out(network_.nic(r)))];
      if (least < 0 || p < least) least = p;
    }
    return least;
  }
  __int128 in(const std::vector<int32_t>& ranks) const {
    __int128 least = -1;
    for (const int32_t r : ranks) {
      const __int128 p = price_[static_cast<size_t>(network_.nic_in(network_.nic(r)))];
      if (least < 0 || p < least) least = p;
    }
    return least;
  }
  bool makes_it(const Host& host) const { return !host.receivers.empty() && host.values == all_; }

  void chain(const std::vector<size_t>& visited, const std::set<int32_t>& values, __int128 cost) {
    if (values == all_) serve(visited.back(), cost);
    for (size_t h = 0; h < hosts_.size(); ++h) {
      if (hosts_[h].values.empty() || std::find(visited.begin(), visited.end(), h) != visited.end()) continue;
      __int128 more = 0;
      if (!visited.empty()) more = out(hosts_[visited.back()].holders) + in(hosts_[h].holders);
      std::vector<size_t> next = visited;
      next.push_back(h);
      std::set<int32_t> all = values;
      all.insert(hosts_[h].values.begin(), hosts_[h].values.end());
      chain(next, all, cost + more);
    }
  }

  // Each further host in every order, from every host that has the result by then.
  void serve(size_t root, __int128 cost) {
    std::vector<size_t> waiting;
    std::vector<int32_t> everyone = hosts_[root].holders;
    everyone.insert(everyone.end(), hosts_[root].receivers.begin(), hosts_[root].receivers.end());
    std::vector<__int128> senders{out(everyone)};
    for (size_t h = 0; h < hosts_.size(); ++h) {
      if (hosts_[h].receivers.empty() || h == root) continue;
      if (makes_it(hosts_[h])) {
        std::vector<int32_t> here = hosts_[h].holders;
        here.insert(here.end(), hosts_[h].receivers.begin(), hosts_[h].receivers.end());
        senders.push_back(out(here));
      } else {
        waiting.push_back(h);
      }
    }
    pass_on(waiting, senders, cost);
  }
  void pass_on(const std::vector<size_t>& waiting, const std::vector<__int128>& senders, __int128 cost) {
    if (best_ >= 0 && cost >= best_) return;
    if (waiting.empty()) best_ = cost;
    for (size_t i = 0; i < waiting.size(); ++i) {
      const Host& host = hosts_[waiting[i]];
      std::vector<size_t> rest = waiting;
      rest.erase(rest.begin() + static_cast<int64_t>(i));
      std::vector<__int128> more = senders;
      more.push_back(out(host.receivers));
      pass_on(rest, more, cost + *std::min_element(senders.begin(), senders.end()) + in(host.receivers));
    }
  }

  const Network& network_;
  const ReduceWays::Prices& price_;
  std::vector<Host> hosts_;
  std::set<int32_t> all_;
  __int128 best_ = -1;
};

}  // namespace

TEST_CASE("covers are the cheapest", "[plan][reduce]") {
  for (uint64_t seed = 0; seed < 400; ++seed) {
    INFO("seed " << seed);
    Random random(seed);
    const int64_t values = random.between(1, 7);
    const int64_t sets = random.between(1, 9);
    ValueCover cover;
    std::vector<std::pair<uint64_t, int64_t>> listed;
    uint64_t wanted = 0;
    for (int64_t s = 0; s < sets; ++s) {
      const auto mask = static_cast<uint64_t>(random.between(1, (int64_t{1} << values) - 1));
      const int64_t price = random.between(0, 9);
      cover.add(mask, price, static_cast<int32_t>(s));
      listed.emplace_back(mask, price);
      wanted |= mask;
    }
    int64_t least = INT64_MAX;
    for (uint64_t chosen = 0; chosen < (uint64_t{1} << sets); ++chosen) {
      uint64_t covered = 0;
      int64_t price = 0;
      for (size_t s = 0; s < listed.size(); ++s) {
        if ((chosen >> s & 1) == 0) continue;
        covered |= listed[s].first;
        price += listed[s].second;
      }
      if (covered == wanted) least = std::min(least, price);
    }
    std::vector<int32_t> ids;
    CHECK(static_cast<int64_t>(cover.solve(wanted, &ids)) == least);
    int64_t paid = 0;
    uint64_t covered = 0;
    for (const int32_t id : ids) {
      paid += listed[static_cast<size_t>(id)].second;
      covered |= listed[static_cast<size_t>(id)].first;
    }
    CHECK(paid == least);
    CHECK(covered == wanted);
  }
}

TEST_CASE("a cover that takes too long to find is never overrated", "[plan][reduce]") {
  // 60 values in pairs and triples at random: more nodes than the budget. Each set covers at most three values.
  Random random(3);
  ValueCover cover;
  for (int32_t s = 0; s < 400; ++s) {
    uint64_t mask = 0;
    while (std::popcount(mask) < 3) mask |= uint64_t{1} << random.below(60);
    cover.add(mask, 1000 + random.below(400), s);
  }
  std::vector<int32_t> ids;
  const auto price = static_cast<int64_t>(cover.solve((uint64_t{1} << 60) - 1, &ids));
  CHECK(price <= 20 * 1400);
  CHECK(price >= 20 * 1000 / 2);
  CHECK(ids.size() >= 20);  // a cover all the same
}

TEST_CASE("the cheapest way to reduce a box is the cheapest of all chains and trees", "[plan][reduce]") {
  int64_t counted = 0;
  for (uint64_t seed = 0; counted < 300; ++seed) {
    INFO("seed " << seed);
    Random random(seed);
    const RandomCase c = random_case(random, 4000, false, true);
    const Demand demand = intersect_layouts({c.problem});
    std::vector<int32_t> ranks = c.problem.src.mesh.ranks;
    ranks.insert(ranks.end(), c.problem.dst.mesh.ranks.begin(), c.problem.dst.mesh.ranks.end());
    std::sort(ranks.begin(), ranks.end());
    ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
    const Network network(c.topology, ranks);
    if (network.host_count() > 6 || demand.tasks.empty() || demand.tasks[0].reduce == ReduceOp::None) continue;
    ReduceWays::Prices price(static_cast<size_t>(network.port_count()));
    for (__int128& p : price) p = random.between(0, 20);
    ReduceWays ways(demand.tasks[0], network);
    ReduceWay way;
    const auto found = static_cast<int64_t>(ways.cheapest(price, &way));
    int64_t paid = 0;
    for (const int32_t port : way.ports()) paid += static_cast<int64_t>(price[static_cast<size_t>(port)]);
    CHECK(paid == found);
    CHECK(found == static_cast<int64_t>(BruteForce(demand.tasks[0], network, price).least()));
    ++counted;
  }
}
