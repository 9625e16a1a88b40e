#include "plan/strategies/rounds.h"

#include <string>

#include "catch.h"
#include "plan/cases.h"
#include "plan/checker.h"
#include "plan/draft_case.h"
#include "plan/random_problems.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

constexpr int64_t kMicrosecond = 1'000;  // nanoseconds

// The first rank to replicas on all other hosts, of `per_host` ranks each.
Problem to_other_hosts(std::vector<int64_t> shape, int64_t per_host, int64_t hosts) {
  return {std::move(shape), 2, layout({1}, 0, {kReplicate}),
          layout({per_host * hosts}, static_cast<int32_t>(per_host), {kReplicate})};
}

}  // namespace

TEST_CASE("rounds take what they are expected to", "[plan][rounds]") {
  for (const int64_t hosts : {1, 2, 5, 12, 31}) {
    for (const int64_t per_host : {1, 3, 8}) {
      const Topology topology =
          uniform_topology(per_host * (hosts + 1) - 1, per_host, kTenGbit, 1, 8 * kTenGbit, 20 * kMicrosecond);
      DraftCase c(to_other_hosts({1 << 12, 1 << 10}, per_host, hosts), topology, 1 << 20);
      for (const int64_t chunks : {8, 16, 64}) {
        Inputs in = c.inputs();
        in.chunk_bytes = (int64_t{1} << 23) / chunks;
        const RoundsCost cost = rounds_cost(in, false, chunks);
        INFO(hosts << " hosts of " << per_host << ", " << chunks << " chunks, " << cost.style.lanes
                   << " lanes");
        REQUIRE(cost.chunks == chunks);
        const Draft draft = draft_rounds(in, cost.style);
        REQUIRE(draft.hops.size() == static_cast<size_t>(chunks * per_host * hosts));
        const Schedule made = simulate(draft.hops, draft.chunks, c.network);
        CHECK(made.makespan_ns <= cost.time_ns + cost.time_ns / 20);
      }
    }
  }
}

TEST_CASE("lanes cover the latency of fine chunks", "[plan][rounds]") {
  // A chunk takes 52 us over a NIC, and the latency is as long as that.
  const Topology topology = uniform_topology(39, 8, kTenGbit, 1, kTenGbit, 52 * kMicrosecond);
  DraftCase c(to_other_hosts({1 << 12, 1 << 12}, 8, 4), topology, 1 << 16);
  const auto seconds = [&](int32_t lanes) {
    const Draft draft = draft_rounds(c.inputs(), {false, lanes});
    return static_cast<double>(simulate(draft.hops, draft.chunks, c.network).makespan_ns);
  };
  CHECK(seconds(2) < 0.7 * seconds(1));
  CHECK(rounds_cost(c.inputs(), false, 512).style.lanes >= 2);
}

TEST_CASE("one rank to replicas on thousands of others is near the bound", "[plan][rounds]") {
  const Plan hosts =
      make_plan({to_other_hosts({1 << 14, 1 << 15}, 8, 511)},
                uniform_topology(4095, 8, 10 * kTenGbit, 1, 8 * kTenGbit, 20 * kMicrosecond), {});
  CHECK(hosts.strategy == Strategy::Multicast);
  CHECK(ratio(hosts) < 1.08);
  // Ranks of a host copy at 80 Gbit/s among themselves and have a NIC of 400 Gbit/s each: chunks come over
  // NICs.
  const Plan slow_inside =
      make_plan({to_other_hosts({1 << 14, 1 << 15}, 8, 63)},
                uniform_topology(511, 8, 40 * kTenGbit, 8, 8 * kTenGbit, 20 * kMicrosecond), {});
  CHECK(ratio(slow_inside) < 1.02);
}

TEST_CASE("rounds of too many hops are none", "[plan][rounds]") {
  DraftCase c(to_other_hosts({80'000, 1}, 8, 8), uniform_topology(71, 8, kTenGbit, 1, kTenGbit, 0), 2);
  CHECK(draft_rounds(c.inputs(), {false, 1}).hops.empty());  // 80,000 chunks to 64 ranks
  CHECK(rounds_cost(c.inputs(), false, 0).chunks <= 80'000 * 2 / 65'536 + 1);
}

TEST_CASE("random rounds: every element arrives once", "[plan][rounds]") {
  for (uint64_t seed = 1; seed <= 150; ++seed) {
    Random random(seed);
    const RandomCase r = random_case(random, 300, true);
    const Plan made = make_plan({r.problem}, r.topology, {Strategy::SendRecv});
    DraftCase c(r.problem, r.topology, random.one_of<int64_t>({16, 64, 500}));
    for (const bool by_rank : {false, true}) {
      for (const int32_t lanes : {1, 2, 3}) {
        INFO("seed " << seed << ", by rank " << by_rank << ", " << lanes << " lanes");
        const Draft draft = draft_rounds(c.inputs(), {by_rank, lanes});
        const Schedule scheduled = sort_by_start(simulate(draft.hops, draft.chunks, c.network));
        CHECK(check_plan(with_draft(made, draft, scheduled)) == "");
        CHECK(scheduled.makespan_ns >= made.lower_bound_ns);
      }
    }
  }
}
