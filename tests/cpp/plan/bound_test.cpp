#include "plan/bound/bound.h"

#include <algorithm>
#include <numeric>

#include "catch.h"
#include "plan/bound/port_items.h"
#include "plan/cases.h"
#include "plan/random_problems.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

// Hosts of `per_host` ranks, 1 byte/ns per NIC, no latency, so that a bound is a number of bytes.
Plan bytes_plan(int64_t n, Layout src, Layout dst, int64_t per_host, int64_t nics = 1, int64_t local = 1000) {
  const int32_t last = std::max(src.mesh.ranks.back(), dst.mesh.ranks.back());
  const Topology topology = uniform_topology(last, per_host, 1'000'000'000, nics, local * 1'000'000'000, 0);
  return make_plan({{{n}, 1, std::move(src), std::move(dst)}}, topology,
                   {Strategy::Multicast, Balance::None, n / 100, 0});
}

}  // namespace

TEST_CASE("the bound of one sender is one emission, whoever forwards", "[plan]") {
  CHECK(bytes_plan(6000, layout({1}, 0, {kReplicate}), layout({1}, 1, {kReplicate}), 1).lower_bound_ns == 6000);
  CHECK(bytes_plan(6000, layout({1}, 0, {kReplicate}), layout({5}, 1, {kReplicate}), 1).lower_bound_ns == 6000);
}

TEST_CASE("replicas of the source share what they send", "[plan]") {
  // Two holders, one receiver host with two NICs: half through each.
  const Plan two = bytes_plan(6000, layout({2}, 0, {kReplicate}), layout({2}, 2, {kReplicate}), 1);
  CHECK(two.lower_bound_ns == 6000);  // each receiver takes in everything
  const Plan wide = bytes_plan(6000, layout({4}, 0, {kReplicate}), layout({2}, 4, {shard(0)}), 2, 2);
  CHECK(wide.lower_bound_ns == 3000);  // a half enters each of the two NICs
}

TEST_CASE("a host with several NICs takes in over those that its receivers use", "[plan]") {
  CHECK(bytes_plan(6000, layout({2}, 0, {kReplicate}), layout({2}, 2, {kReplicate}), 2, 2).lower_bound_ns ==
        3000);
  CHECK(bytes_plan(6000, layout({2}, 0, {kReplicate}), layout({1}, 2, {kReplicate}), 2, 2).lower_bound_ns ==
        6000);
}

TEST_CASE("outgoing ports bind where senders hold different parts", "[plan]") {
  // Rank 0 holds all rows, four receivers of a quarter each on hosts of their own: 6000 leave rank 0.
  CHECK(bytes_plan(6000, layout({1}, 0, {kReplicate}), layout({4}, 1, {shard(0)}), 1).lower_bound_ns == 6000);
  // An all-gather of four hosts: each takes in three quarters.
  CHECK(bytes_plan(8000, layout({4}, 0, {shard(0)}), layout({4}, 0, {kReplicate}), 1).lower_bound_ns == 6000);
}

TEST_CASE("inside a host the local ports bind", "[plan]") {
  // One holder, three receivers on its host, 2 bytes/ns: a chain takes 3000.
  CHECK(bytes_plan(6000, layout({1}, 0, {kReplicate}), layout({3}, 1, {kReplicate}), 4, 1, 2).lower_bound_ns ==
        3000);
}

TEST_CASE("a box that another host gets as well may come back from there", "[plan]") {
  // Two ranks a host; 4 bytes/ns between hosts, 1 inside. Rank 0 holds the box.
  const auto plan = [](Layout dst) {
    const Topology topology = uniform_topology(3, 2, 4'000'000'000, 1, 1'000'000'000, 0);
    return make_plan({{{6000}, 1, layout({1}, 0, {kReplicate}), std::move(dst)}}, topology,
                     {Strategy::GlobalAllGather, Balance::None, 60, 0});
  };
  CHECK(plan(layout({1}, 1, {kReplicate})).lower_bound_ns == 6000);  // nobody else has it
  const Plan both = plan(layout({2}, 1, {kReplicate}));
  CHECK(both.lower_bound_ns == 1500);  // it enters host 1 over 4 bytes/ns; rank 1 has 5 bytes/ns
  CHECK(both.makespan_ns >= both.lower_bound_ns);
  CHECK(both.makespan_ns < 6000);  // half of it reaches rank 1 by way of rank 2
}

TEST_CASE("what comes over NICs has to leave those of others", "[plan]") {
  // Ranks 1 and 2 hold the box beside 3 and 4, who need it; so does rank 0, on a host of its own, whose NIC
  // sends at 1 byte/ns while theirs takes in 10. Inside, ports carry 1.
  Topology topology = uniform_topology(4, 4, 10'000'000'000, 1, 1'000'000'000, 0);
  topology.hosts[0].ranks = {0};
  topology.hosts[0].nics[0].out_rate = 1'000'000'000;
  topology.hosts[1].ranks = {1, 2, 3, 4};
  const Plan plan = make_plan({{{6000}, 1, layout({3}, 0, {kReplicate}), layout({2}, 3, {kReplicate})}},
                              topology, {Strategy::Multicast, Balance::None, 60, 0});
  CHECK(plan.lower_bound_ns == 4000);  // two ports in and rank 0's NIC for 12,000
  CHECK(plan.makespan_ns < 4400);
}

TEST_CASE("reductions are bound by reduce-then-multicast", "[plan]") {
  const Layout pending = layout({4}, 0, {partial(ReduceOp::Sum)});
  // All-reduce of four hosts: 3 hops to the root and 3 back, shared by four NICs.
  CHECK(bytes_plan(8000, pending, layout({4}, 0, {kReplicate}), 1).lower_bound_ns == 12000);
  // To one other host: each of the four sends once.
  CHECK(bytes_plan(8000, pending, layout({1}, 4, {kReplicate}), 1).lower_bound_ns == 8000);
  // A host that has all values and needs the result takes nothing from the network.
  const Plan inside = bytes_plan(8000, pending, layout({4}, 0, {kReplicate}), 4, 1, 8);
  CHECK(inside.lower_bound_ns == 1500);
}

TEST_CASE("a plan that moves nothing has a bound and a makespan of zero", "[plan]") {
  const Plan plan = bytes_plan(100, layout({2}, 0, {shard(0)}), layout({2}, 0, {shard(0)}), 1);
  CHECK(plan.lower_bound_ns == 0);
  CHECK(plan.makespan_ns == 0);
  CHECK(plan.hops.empty());
}

TEST_CASE("an item is poured over many ports up to one level", "[plan]") {
  // 200 NICs of 1 byte/ns. Each has a load of its own, mostly the same one; one item may take any of them.
  const int32_t ports = 200;
  std::vector<int32_t> ranks(static_cast<size_t>(ports));
  std::iota(ranks.begin(), ranks.end(), 0);
  const Network network(uniform_topology(ports - 1, 1, 1'000'000'000, 1, 1'000'000'000, 0), ranks);
  for (uint64_t seed = 1; seed <= 50; ++seed) {
    Random random(seed);
    std::vector<PortItem> items;
    int64_t most = 0;
    for (int32_t nic = 0; nic < ports; ++nic) {
      PortItem own;
      own.nbytes = random.chance(10) || seed == 1 ? random.below(2000) : 1000;
      own.copies = own.emitters = 1;
      own.ports = {network.nic_out(nic)};
      most = std::max(most, own.nbytes);
      items.push_back(own);
    }
    PortItem shared;
    shared.nbytes = random.one_of<int64_t>({5000, 50'000, 1'000'000});
    shared.copies = 1;
    shared.emitters = ports;
    for (int32_t nic = 0; nic < ports; ++nic) shared.ports.push_back(network.nic_out(nic));
    items.push_back(shared);
    int64_t level = 0;  // the lowest one up to which there is room for all of it
    const auto room = [&](int32_t nic) {
      return std::max<int64_t>(0, level - items[static_cast<size_t>(nic)].nbytes);
    };
    for (int64_t sum = 0; sum < shared.nbytes;) {
      ++level;
      sum = 0;
      for (int32_t nic = 0; nic < ports; ++nic) sum += room(nic);
    }
    CHECK(balance_ports(network, &items) == std::max(level, most));
    int64_t sum = 0;
    for (int32_t nic = 0; nic < ports; ++nic) {
      const auto at = static_cast<size_t>(nic);
      sum += items.back().share[at];
      CHECK(items[at].share[0] == items[at].nbytes);
      CHECK(items.back().share[at] <= room(nic));
      CHECK(items.back().share[at] >= room(nic) - ports);
    }
    CHECK(sum == shared.nbytes);
  }
}
