#include <algorithm>
#include <chrono>
#include <thread>
#include <vector>

#include "catch.h"
#include "run/harness.h"
#include "run/plan_order.h"
#include "run/random_plans.h"

using namespace meshcast;
using namespace meshcast::testing;
using std::chrono::milliseconds;

namespace {

constexpr milliseconds kOrderLimit(20000);  // of a run; a test that hangs fails here

// Ranks 0 and 1 hold a half each, ranks 2 and 3 need both, each rank has a host. In the plan, rank 0 sends all
// of its half first.
Plan halves_plan() {
  Problem problem;
  problem.shape = {8000};
  problem.element_bytes = 8;
  problem.src = {{{2}, {0, 1}}, {{PlacementKind::Shard, 0}}};
  problem.dst = {{{2}, {2, 3}}, {{}}};
  PlanOptions options;
  options.strategy = Strategy::SendRecv;
  options.chunk_bytes = 512;
  Plan plan = make_plan({problem}, uniform_topology(3, 1, 1000000000, 1, 8000000000, 1000), options);
  std::stable_sort(plan.hops.begin(), plan.hops.end(),
                   [](const Hop& a, const Hop& b) { return a.src < b.src; });
  return plan;
}

// Has the last chunk that rank 0 sends to two ranks go to the second by way of the first.
void relay_last(Plan& plan) {
  for (size_t second = plan.hops.size(); second-- > 0;) {
    for (size_t first = 0; first < second; ++first) {
      if (plan.hops[first].src != 0 || plan.hops[second].src != 0) continue;
      if (plan.hops[first].chunk != plan.hops[second].chunk) continue;
      plan.hops[second].src = plan.hops[first].dst;
      plan.hops[second].after = static_cast<int32_t>(first);
      return;
    }
  }
  FAIL("no chunk goes from rank 0 to two ranks");
}

void expect_all(const std::vector<RankRun>& runs) {
  for (const RankRun& part : runs) {
    REQUIRE(part.run->wait_until(Clock::now() + kOrderLimit));
    REQUIRE_FALSE(part.run->error());
    REQUIRE(part.destination.data == part.expected);
  }
}

}  // namespace

TEST_CASE("peers whose messages come later in the plan wait for their turn", "[exec][order]") {
  Plan plan = halves_plan();
  relay_last(plan);
  REQUIRE(plan.hops.size() > 8 * kRecvsAhead);

  Cluster cluster(4);
  std::vector<RankRun> runs;
  for (const int rank : {2, 3, 1}) runs.push_back(start_rank(cluster, plan, rank, label(0), kOrderLimit));
  CHECK_FALSE(runs.back().run->wait_until(Clock::now() + milliseconds(100)));
  CHECK(runs[0].run->received_bytes() == 0);
  runs.push_back(start_rank(cluster, plan, 0, label(0), kOrderLimit));
  expect_all(runs);
}

TEST_CASE("nobody waits for turns where no rank passes on what came over the network", "[exec][order]") {
  const Plan plan = halves_plan();
  Cluster cluster(4);
  std::vector<RankRun> runs;
  for (const int rank : {2, 3, 1}) runs.push_back(start_rank(cluster, plan, rank, label(0), kOrderLimit));
  CHECK(runs.back().run->wait_until(Clock::now() + kOrderLimit));  // though rank 0 has not begun
  CHECK_FALSE(runs[0].run->ended());
  runs.push_back(start_rank(cluster, plan, 0, label(0), kOrderLimit));
  expect_all(runs);
}

TEST_CASE("a plan is relayed if a chunk passes between hosts twice", "[exec][order]") {
  // One chunk from rank 0 on and on; host 0 has ranks 0 and 1, host 1 has 2 and 3, host 2 has 4 and 5.
  const auto relayed = [](const std::vector<int32_t>& chain) {
    Problem problem;
    problem.shape = {64};
    problem.element_bytes = 8;
    problem.src = {{{1}, {0}}, {{}}};
    problem.dst = {{{5}, {1, 2, 3, 4, 5}}, {{}}};
    PlanOptions options;
    options.strategy = Strategy::SendRecv;
    Plan plan = make_plan({problem}, uniform_topology(5, 2, 1000000000, 1, 8000000000, 1000), options);
    plan.hops.clear();
    for (size_t i = 1; i < chain.size(); ++i)
      plan.hops.push_back({chain[i - 1], chain[i], 0, static_cast<int32_t>(i) - 2});
    return project(plan, 0, plan.ranks).relayed;
  };
  CHECK_FALSE(relayed({0, 1}));
  CHECK_FALSE(relayed({0, 2, 3}));
  CHECK_FALSE(relayed({0, 1, 2, 3}));
  CHECK(relayed({0, 2, 4}));
  CHECK(relayed({0, 2, 3, 4}));
  CHECK(relayed({0, 1, 2, 3, 4, 5}));
}

TEST_CASE("a NIC that sends clearly longest waits for no receiver", "[exec][order]") {
  // Two thirds on rank 0, one on rank 1, each rank on a host of its own. Returns which of them have no order.
  const auto longest = [](const std::vector<int32_t>& receivers, int64_t rate_of_0, int64_t rows) {
    Problem problem;
    problem.shape = {3, rows};
    problem.element_bytes = 8;
    problem.src = {{{2}, {0, 1}}, {{PlacementKind::Shard, 0}}};
    problem.dst = {{{static_cast<int64_t>(receivers.size())}, receivers}, {{}}};
    PlanOptions options;
    options.strategy = Strategy::SendRecv;
    options.chunk_bytes = 512;
    Topology topology = uniform_topology(3, 1, 1000000000, 1, 8000000000, 1000);
    topology.hosts[0].nics[0].out_rate = rate_of_0;
    const Plan plan = make_plan({problem}, topology, options);
    std::vector<int32_t> found;
    for (const int32_t rank : {0, 1}) {
      const Program program = project(plan, rank, plan.ranks);
      REQUIRE_FALSE(program.relayed);
      if (program.sends_longest) found.push_back(rank);
    }
    return found;
  };
  CHECK(longest({2, 3}, 1000000000, 6400) == std::vector<int32_t>{0});
  CHECK(longest({2, 3}, 500000000, 6400) == std::vector<int32_t>{0});
  CHECK(longest({2, 3}, 1600000000, 6400).empty());  // as long as rank 1
  CHECK(longest({2}, 1000000000, 6400).empty());     // the receiver is busy for longer
  CHECK(longest({2, 3}, 1000000000, 64).empty());    // all messages may be under way anyhow
}

TEST_CASE("messages may run ahead of the first one missing, but not by more than the limit", "[exec][order]") {
  PlanOrder order(3 * kRecvsAhead, kRecvsAhead);
  CHECK(order.may_go(kRecvsAhead - 1));
  CHECK_FALSE(order.may_go(kRecvsAhead));
  CHECK_FALSE(order.done(1));
  CHECK_FALSE(order.may_go(kRecvsAhead));
  CHECK(order.done(0));
  CHECK(order.may_go(kRecvsAhead + 1));
  CHECK_FALSE(order.may_go(kRecvsAhead + 2));
  PlanOrder brief(kRecvsAhead, kRecvsAhead);
  CHECK_FALSE(brief.done(0));
  CHECK(brief.may_go(kRecvsAhead - 1));
}

TEST_CASE("a peer that does not receive holds up sends to others, beyond the limit only", "[exec][order]") {
  const bool relayed = GENERATE(true, false);
  const int32_t ahead = relayed ? kSendsAhead : kDirectSendsAhead;
  Problem problem;
  problem.shape = {6 * ahead * 64};
  problem.element_bytes = 8;
  problem.src = {{{1}, {0}}, {{}}};
  problem.dst = {{{2}, {1, 2}}, {{}}};
  PlanOptions options;
  options.strategy = Strategy::SendRecv;
  options.chunk_bytes = 512;
  Plan plan = make_plan({problem}, uniform_topology(2, 1, 1000000000, 1, 8000000000, 1000), options);
  if (relayed) relay_last(plan);
  const Program program = project(plan, 0, {0, 1, 2});
  REQUIRE(program.relayed == relayed);
  int32_t stuck = -1;  // the first to rank 1
  int64_t passing = 0;
  for (const SendOp& op : program.sends) {
    if (op.targets.front().peer == 1 && stuck < 0) stuck = op.number;
    if (op.targets.front().peer == 2 && (stuck < 0 || op.number < stuck + ahead)) passing += op.nbytes;
  }
  REQUIRE(stuck >= 0);
  REQUIRE(passing > 0);

  Cluster cluster(3);
  std::vector<RankRun> runs;
  for (const int rank : {0, 2}) runs.push_back(start_rank(cluster, plan, rank, label(0), kOrderLimit));
  const Run& receiver = *runs.back().run;
  const TimePoint limit = Clock::now() + kOrderLimit;
  while (receiver.received_bytes() < passing && Clock::now() < limit)
    std::this_thread::sleep_for(milliseconds(1));
  std::this_thread::sleep_for(milliseconds(50));
  CHECK(receiver.received_bytes() == passing);
  CHECK(passing < receiver.expected_bytes());

  runs.push_back(start_rank(cluster, plan, 1, label(0), kOrderLimit));
  expect_all(runs);
}
