#include "plan/schedule.h"

#include <algorithm>
#include <numeric>
#include <string>

#include "catch.h"
#include "common/error.h"
#include "plan/cases.h"
#include "plan/random_problems.h"
#include "plan/stable_order.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

// Three hosts of two ranks, 1 byte/ns between hosts (host 2 takes in at half of that), 4 bytes/ns inside.
Topology three_hosts() {
  Topology out;
  out.latency_ns = 10;
  for (int32_t h = 0; h < 3; ++h) {
    out.hosts.push_back(
        {{2 * h, 2 * h + 1}, {{1'000'000'000, h == 2 ? 500'000'000 : 1'000'000'000}}, 4'000'000'000});
  }
  return out;
}

Hop hop(int32_t src, int32_t dst, int32_t chunk, int32_t after) {
  Hop out;
  out.src = src;
  out.dst = dst;
  out.chunk = chunk;
  out.after = after;
  return out;
}

}  // namespace

TEST_CASE("the simulator times hand-made hops", "[plan]") {
  const Network network(three_hosts(), {0, 1, 2, 3, 4, 5});
  const std::vector<Chunk> chunks{{0, 1, 100}, {1, 2, 100}};
  // A chain 0 -> 2 -> 4 of two chunks. Host 2 takes 200 ns for each.
  const Schedule chain =
      simulate({hop(0, 2, 0, -1), hop(0, 2, 1, -1), hop(2, 4, 0, 0), hop(2, 4, 1, 1)}, chunks, network);
  CHECK(chain.times[0].finish_ns == 110);
  CHECK(chain.times[1].start_ns == 100);  // the NIC is free again, latency does not hold it
  CHECK(chain.times[2].start_ns == 110);
  CHECK(chain.times[2].finish_ns == 320);
  CHECK(chain.times[3].start_ns == 310);  // waits for the incoming side of host 2
  CHECK(chain.makespan_ns == 520);
  // Full duplex: both directions at once. Inside a host the local ports are used.
  const Schedule duplex = simulate({hop(0, 2, 0, -1), hop(2, 0, 1, -1), hop(0, 1, 0, -1)}, chunks, network);
  CHECK(duplex.times[1].start_ns == 0);
  CHECK(duplex.times[2].start_ns == 0);
  CHECK(duplex.times[2].finish_ns == 35);
  // A fast sender feeds two slow receivers in turns, not one after the other.
  const Schedule shared = simulate({hop(0, 4, 0, -1), hop(0, 2, 1, -1)}, chunks, network);
  CHECK(shared.times[1].start_ns == 100);
}

TEST_CASE("the simulator refuses hops whose chunk is not there", "[plan]") {
  const Network network(three_hosts(), {0, 1, 2, 3, 4, 5});
  const std::vector<Chunk> chunks{{0, 1, 100}, {1, 2, 100}};
  CHECK_THROWS_AS(simulate({hop(0, 2, 0, 0)}, chunks, network), LayoutError);
  CHECK_THROWS_AS(simulate({hop(0, 2, 0, -1), hop(3, 4, 0, 0)}, chunks, network), LayoutError);
  CHECK_THROWS_AS(simulate({hop(0, 2, 0, -1), hop(2, 4, 1, 0)}, chunks, network), LayoutError);
}

TEST_CASE("a rank uses the NIC of its position", "[plan]") {
  Topology topology;
  topology.hosts.push_back({{7, 3, 5}, {{1, 1}, {2, 2}}, 1});
  topology.hosts.push_back({{1}, {{3, 3}}, 1});
  const Network network(topology, {1, 3, 5, 7});
  CHECK(network.nic(network.index(7)) == 0);
  CHECK(network.nic(network.index(3)) == 1);
  CHECK(network.nic(network.index(5)) == 0);
  CHECK(network.nic(network.index(1)) == 2);
  CHECK(network.port_rate(network.nic_out(2)) == 3);
  CHECK_THROWS_AS(Network(topology, {1, 2}), LayoutError);
}

TEST_CASE("the schedule of a plan is what the simulator finds", "[plan]") {
  for (uint64_t seed = 0; seed < 60; ++seed) {
    Random random(seed);
    const RandomCase c = random_case(random, 20'000, true, seed % 4 == 0);
    const Plan plan = make_plan({c.problem}, c.topology, {});
    const Network network(c.topology, plan.ranks);
    const Schedule again = simulate(plan.hops, plan.chunks, network);
    INFO("seed " << seed);
    CHECK(again.makespan_ns == plan.makespan_ns);
    for (size_t i = 0; i < plan.hops.size(); ++i) {
      REQUIRE(again.times[i].start_ns == plan.times[i].start_ns);
      REQUIRE(again.times[i].finish_ns == plan.times[i].finish_ns);
      REQUIRE((i == 0 || plan.times[i].start_ns >= plan.times[i - 1].start_ns));
    }
  }
}

TEST_CASE("no schedule takes less than the least makespan", "[plan]") {
  // A chain 0 -> 2 -> 4 of two chunks, 100 ns each, into host 2 200 ns. The port into host 2 waits 110 ns for
  // the first chunk, takes both in, and the latency comes last.
  const Network network(three_hosts(), {0, 1, 2, 3, 4, 5});
  const std::vector<Chunk> chunks{{0, 1, 100}, {1, 2, 100}};
  const std::vector<Hop> chain{hop(0, 2, 0, -1), hop(2, 4, 0, 0), hop(0, 2, 1, -1), hop(2, 4, 1, 2)};
  CHECK(least_makespan_ns(chain, chunks, network) == 110 + 2 * 200 + 10);
  CHECK(simulate(chain, chunks, network).makespan_ns == 110 + 2 * 200 + 10);
  // With a third hop behind: what comes after the last chunk counts, too. It travels inside host 2.
  const std::vector<Hop> longer{hop(0, 4, 0, -1), hop(0, 4, 1, -1), hop(4, 5, 0, 0), hop(4, 5, 1, 1)};
  CHECK(least_makespan_ns(longer, chunks, network) == 2 * 200 + 10 + 25 + 10);
  CHECK(least_makespan_ns({}, chunks, network) == 0);
  for (uint64_t seed = 1; seed <= 60; ++seed) {
    Random random(seed);
    const RandomCase c = random_case(random, 1 << 16, true, seed % 3 == 0);
    const Plan plan = make_plan({c.problem}, c.topology, {});
    const Network its(c.topology, plan.ranks);
    const int64_t least = least_makespan_ns(plan.hops, plan.chunks, its);
    CHECK(least <= plan.makespan_ns);
    Draft draft;
    draft.hops = plan.hops;
    CHECK(least <= schedule(draft, plan.chunks, its).makespan_ns);
  }
}

TEST_CASE("keys are put in order like by a stable sort", "[plan]") {
  for (uint64_t seed = 1; seed <= 200; ++seed) {
    Random random(seed);
    std::vector<int64_t> keys(static_cast<size_t>(random.between(0, 3000)));
    const int64_t most = random.one_of<int64_t>({1, 3, 1000, int64_t{1} << 40, INT64_MAX});
    for (int64_t& key : keys) key = random.below(most) - (seed % 2 == 0 ? most / 2 : 0);
    if (seed % 5 == 0) std::sort(keys.begin(), keys.end());
    if (seed % 7 == 0 && !keys.empty()) keys.front() = INT64_MIN, keys.back() = INT64_MAX;
    std::vector<int32_t> expected(keys.size());
    std::iota(expected.begin(), expected.end(), 0);
    std::stable_sort(expected.begin(), expected.end(), [&](int32_t a, int32_t b) {
      return keys[static_cast<size_t>(a)] < keys[static_cast<size_t>(b)];
    });
    CHECK(stable_order(keys) == expected);
  }
}
