#include <string>

#include "catch.h"
#include "common/error.h"
#include "plan/bound/filling.h"
#include "plan/cases.h"
#include "plan/checker.h"
#include "plan/plan.h"
#include "plan/random_problems.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

const std::vector<Strategy> kAll{Strategy::SendRecv,  Strategy::LocalAllGather, Strategy::GlobalAllGather,
                                 Strategy::Broadcast, Strategy::Multicast,      Strategy::Auto};

// Each seed is a case of its own: it is printed with any failure and repeats it.
void check_seeds(uint64_t first, uint64_t count, bool partial) {
  for (uint64_t seed = first; seed < first + count; ++seed) {
    Random random(seed);
    const RandomCase c = random_case(random, 500, true, partial);
    int64_t best = INT64_MAX;
    int64_t bound = 0;
    int64_t automatic = 0;
    Strategy chosen = Strategy::Auto;
    for (const Strategy strategy : kAll) {
      INFO("seed " << seed << ", strategy " << to_string(strategy));
      PlanOptions options{strategy,
                          random.one_of({Balance::None, Balance::Size, Balance::Greedy, Balance::Search}),
                          random.one_of<int64_t>({0, 16, 64, 500}), seed};
      if (strategy == Strategy::Auto) options.balance = Balance::Greedy;
      const Plan plan = make_plan({c.problem}, c.topology, options);
      CHECK(check_plan(plan) == "");
      CHECK(plan.makespan_ns >= filling_bound_ns(plan));
      CHECK(filling_bound_ns(plan) >= plan.lower_bound_ns);
      CHECK(plan.hash == make_plan({c.problem}, c.topology, options).hash);
      bound = plan.lower_bound_ns;
      options.chunk_bytes = 0;
      options.balance = Balance::Greedy;
      const Plan greedy = make_plan({c.problem}, c.topology, options);
      const int64_t span = greedy.makespan_ns;
      if (strategy == Strategy::Auto) {
        automatic = span;
        chosen = greedy.strategy;
      } else if (strategy != Strategy::Multicast) {
        best = std::min(best, span);  // of the paper's strategies: the promise of auto
      }
    }
    INFO("seed " << seed);
    CHECK(automatic <= best);
    CHECK(automatic >= bound);
    if (chosen == Strategy::Multicast) CHECK(automatic <= best - best / 100);  // or it is not worth its trees
  }
}

}  // namespace

TEST_CASE("random layouts: every element arrives once, by every strategy", "[plan][property]") {
  check_seeds(1, 150, false);
}

TEST_CASE("random partial sources: every value is counted once, by every strategy", "[plan][property]") {
  check_seeds(10'001, 25, true);
}

TEST_CASE("more random partial sources", "[.][slow]") { check_seeds(10'026, 75, true); }

TEST_CASE("random batches are planned as one", "[plan][property]") {
  for (uint64_t seed = 20'001; seed < 20'041; ++seed) {
    Random random(seed);
    std::vector<Problem> problems;
    Topology topology;
    for (int i = 0; i < 4; ++i) {
      RandomCase c = random_case(random, 200, true, random.chance(25));
      problems.push_back(c.problem);
      if (c.topology.hosts.size() > topology.hosts.size()) topology = c.topology;
    }
    topology = uniform_topology(63, 4, kTenGbit, 2, 8 * kTenGbit, 1000);
    for (const Strategy strategy : kAll) {
      INFO("seed " << seed << ", strategy " << to_string(strategy));
      CHECK(check_plan(make_plan(problems, topology, {strategy, Balance::Size, 128, 0})) == "");
    }
  }
}

TEST_CASE("the checker sees broken plans", "[plan]") {
  const Topology topology = uniform_topology(5, 2, kTenGbit, 1, 8 * kTenGbit, 0);
  const Problem problem{{64}, 4, layout({2}, 0, {shard(0)}), layout({4}, 2, {kReplicate})};
  const Plan good = make_plan({problem}, topology, {Strategy::Multicast, Balance::None, 32, 0});
  REQUIRE(check_plan(good) == "");
  Plan lost = good;
  lost.hops.pop_back();
  CHECK(check_plan(lost).find("never gets") != std::string::npos);
  Plan twice = good;
  twice.hops.push_back(good.hops.back());
  CHECK(check_plan(twice).find("more than once") != std::string::npos);
  Plan early = good;
  std::swap(early.hops.front(), early.hops.back());
  CHECK(check_plan(early) != "");
  Plan stranger = good;
  stranger.hops.front().src = 5;
  CHECK(check_plan(stranger) != "");
  Plan reduced = make_plan({{{64}, 4, layout({2}, 0, {partial(ReduceOp::Sum)}), layout({2}, 2, {kReplicate})}},
                           topology, {});
  REQUIRE(check_plan(reduced) == "");
  for (Hop& hop : reduced.hops) hop.reduce = ReduceOp::None;
  CHECK(check_plan(reduced) != "");
}

TEST_CASE("options and topologies are checked", "[plan]") {
  const Problem problem{{64}, 4, layout({2}, 0, {shard(0)}), layout({4}, 2, {kReplicate})};
  CHECK_THROWS_AS(make_plan({problem}, Topology{}, {}), LayoutError);
  CHECK_THROWS_AS(make_plan({problem}, uniform_topology(2, 1, 1, 1, 1, 0), {}), LayoutError);
  CHECK_THROWS_AS(uniform_topology(3, 0, 1, 1, 1, 0), LayoutError);
  CHECK_THROWS_AS(uniform_topology(int64_t{1} << 40, 8, 1, 1, 1, 0), LayoutError);
  CHECK_THROWS_AS(uniform_topology(3, 1, 0, 1, 1, 0), LayoutError);
  const Topology topology = uniform_topology(5, 2, kTenGbit, 1, 8 * kTenGbit, 0);
  CHECK_THROWS_AS(make_plan({problem}, topology, {Strategy::Auto, Balance::None, -1, 0}), LayoutError);
  Topology doubled = topology;
  doubled.hosts[1].ranks = {0, 3};
  CHECK_THROWS_AS(make_plan({problem}, doubled, {}), LayoutError);
  const Problem endless{{int64_t{1} << 55}, 1, layout({1}, 0, {kReplicate}), layout({1}, 2, {kReplicate})};
  CHECK_THROWS_AS(make_plan({endless}, uniform_topology(5, 2, 1, 1, 1, 0), {}), LayoutError);
  CHECK(parse_strategy("multicast") == Strategy::Multicast);
  CHECK_THROWS_AS(parse_strategy("fast"), LayoutError);
  CHECK(parse_balance("search") == Balance::Search);
  CHECK_THROWS_AS(parse_reduce_op("none"), LayoutError);
}
