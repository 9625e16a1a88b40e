#include <algorithm>
#include <tuple>

#include "catch.h"
#include "plan/cases.h"
#include "plan/random_problems.h"
#include "plan/schedule.h"

using namespace meshcast;
using namespace meshcast::testing;

// Plans near their bound, each where another part of the planner is needed for it.
namespace {

Host host(int32_t first, int32_t count, int64_t nics, int64_t gbit) {
  Host out;
  for (int32_t r = first; r < first + count; ++r) out.ranks.push_back(r);
  out.nics.assign(static_cast<size_t>(nics), Nic{gbit * 125'000'000, gbit * 125'000'000});
  out.local_rate = 8 * kTenGbit;
  return out;
}

Topology hosts(std::vector<Host> list) {
  Topology out;
  out.latency_ns = 20'000;
  out.hosts = std::move(list);
  return out;
}

double ratio(Problem problem, const Topology& topology) {
  const Plan plan = make_plan({std::move(problem)}, topology, {Strategy::Multicast});
  CHECK(plan.makespan_ns >= plan.lower_bound_ns);
  return static_cast<double>(plan.makespan_ns) / static_cast<double>(plan.lower_bound_ns);
}

}  // namespace

TEST_CASE("chains through hosts of several NICs keep their order", "[plan]") {
  const Topology topology = uniform_topology(22, 4, kTenGbit, 3, 8 * kTenGbit, 20'000);
  CHECK(ratio({{353'000'000}, 1, layout({2}, 0, {kReplicate}), layout({21}, 2, {kReplicate})}, topology) <
        1.03);
}

TEST_CASE("a slow NIC does not wait for the chunks of fast ones", "[plan]") {
  // Rank 0 sends two of seven parts to a host that takes in at 10 Gbit/s; both NICs are busy all the time.
  const Topology topology = hosts({host(0, 3, 2, 25), host(3, 2, 1, 10), host(5, 1, 4, 40), host(6, 2, 3, 10)});
  CHECK(ratio({{15744, 16416}, 2, layout({1}, 0, {kReplicate}), layout({7}, 1, {shard(0)})}, topology) < 1.08);
}

TEST_CASE("senders of different rate take turns at a fast receiver", "[plan]") {
  // Both senders are busy for the whole bound, the receiver for 0.8 of it or more.
  for (const auto& [first, second, third] :
       {std::tuple{10, 25, 40}, std::tuple{10, 10, 25}, std::tuple{25, 10, 36}}) {
    INFO(first << " and " << second << " to " << third << " Gbit/s");
    const Topology topology = hosts({host(0, 1, 1, first), host(1, 1, 1, second), host(2, 1, 1, third)});
    CHECK(ratio({{300, 1000, 1000}, 1, layout({2}, 0, {kReplicate}), layout({1}, 2, {kReplicate})}, topology) <
          1.03);
  }
}

TEST_CASE("a reduced value leaves its host over the NICs of all who have it", "[plan]") {
  // Ranks 0 and 1 reduce, 0 to 3 need the result and share three NICs, so does the other host.
  const Topology topology = uniform_topology(5, 4, kTenGbit, 3, 8 * kTenGbit, 20'000);
  CHECK(ratio({{337'000'000}, 4, layout({2}, 0, {partial(ReduceOp::Sum)}), layout({6}, 0, {kReplicate})},
              topology) < 1.05);
}

TEST_CASE("a busy NIC is spared by a detour", "[plan]") {
  // Rank 3 has the last value and one of two NICs of the receiving host: half of the chunks have to be reduced
  // on the other host and enter over the other NIC, although that is a hop more.
  const Topology topology = hosts({host(0, 3, 2, 25), host(3, 7, 2, 25)});
  CHECK(ratio({{362'000'000}, 2, layout({4}, 0, {partial(ReduceOp::Max)}), layout({6}, 4, {kReplicate})},
              topology) < 1.10);
}

TEST_CASE("inside a host the bound of a reduction is near what ranks can do", "[plan]") {
  // Ranks 0 and 1 have the values, five others need a part each: every part leaves both ranks.
  const Topology topology = uniform_topology(6, 8, kTenGbit, 1, 8 * kTenGbit, 20'000);
  CHECK(ratio({{386'000'000}, 4, layout({2}, 0, {partial(ReduceOp::Product)}), layout({5}, 2, {shard(0)})},
              topology) < 1.02);
}

TEST_CASE("rescheduling keeps every hop and all rules", "[plan]") {
  int better = 0;
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    Random random(seed);
    const RandomCase c = random_case(random, 5'000'000, false, random.chance(30));
    const Plan plan = make_plan({c.problem}, c.topology, {Strategy::Broadcast});
    INFO("seed " << seed);
    const Network network(c.topology, plan.ranks);
    const Schedule before{plan.hops, plan.times, plan.makespan_ns};
    const Schedule after = reschedule(before, plan.chunks, network);
    REQUIRE(after.hops.size() == before.hops.size());
    const Schedule checked = simulate(after.hops, plan.chunks, network);  // throws where a rule is broken
    CHECK(checked.makespan_ns == after.makespan_ns);
    const auto edges = [](const Schedule& s) {
      std::vector<std::vector<int32_t>> out;
      for (const Hop& hop : s.hops) {
        const int32_t giver = hop.after < 0 ? -1 : s.hops[static_cast<size_t>(hop.after)].src;
        out.push_back({hop.chunk, hop.src, hop.dst, giver, hop.last_reduce});
      }
      std::sort(out.begin(), out.end());
      return out;
    };
    CHECK(edges(after) == edges(before));
    better += after.makespan_ns < before.makespan_ns;
  }
  CHECK(better > 0);  // it is of some use
}
