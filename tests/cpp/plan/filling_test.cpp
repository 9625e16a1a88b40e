#include "plan/bound/filling.h"

#include "catch.h"
#include "plan/cases.h"
#include "plan/random_problems.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

// From rank 0 to replicas on `hosts` others of one rank each, 1 byte/ns.
Plan to_others(int64_t nbytes, int64_t chunk, int64_t hosts, int64_t latency_ns, int64_t nics = 1) {
  const Topology topology = uniform_topology((hosts + 1) * nics - 1, nics, 1'000'000'000, nics,
                                             1000 * int64_t{1'000'000'000}, latency_ns);
  const Problem problem{{nbytes},
                        1,
                        layout({nics}, 0, {kReplicate}),
                        layout({hosts * nics}, static_cast<int32_t>(nics), {kReplicate})};
  return make_plan({problem}, topology, {Strategy::Multicast, Balance::None, chunk, 0});
}

}  // namespace

TEST_CASE("without latency whoever has a chunk doubles in each step", "[plan][filling]") {
  CHECK(last_begin_ns(1, 1, 1, 10, 0) == 0);
  CHECK(last_begin_ns(1, 2, 1, 10, 0) == 10);
  CHECK(last_begin_ns(1, 3, 1, 10, 0) == 10);
  CHECK(last_begin_ns(1, 4, 1, 10, 0) == 20);
  CHECK(last_begin_ns(1, 7, 1, 10, 0) == 20);
  CHECK(last_begin_ns(2, 2, 1, 10, 0) == 0);
  CHECK(last_begin_ns(2, 6, 1, 10, 0) == 10);
  CHECK(last_begin_ns(1, 4, 3, 10, 0) == 10);  // of 1 + 3 ports that are free by then
}

TEST_CASE("with a latency as long as a chunk the begins are Fibonacci's numbers", "[plan][filling]") {
  // 1, 1, 2, 3, 5 begin at 0, 10, 20, 30, 40.
  CHECK(last_begin_ns(1, 2, 1, 10, 10) == 10);
  CHECK(last_begin_ns(1, 4, 1, 10, 10) == 20);
  CHECK(last_begin_ns(1, 7, 1, 10, 10) == 30);
  CHECK(last_begin_ns(1, 12, 1, 10, 10) == 40);
  CHECK(last_begin_ns(1, 13, 1, 10, 10) == 50);
}

TEST_CASE("a broadcast of n chunks takes n - 1 + ceil(log2 p) of them", "[plan][filling]") {
  // 16 chunks of 1,000 ns to p - 1 hosts.
  CHECK(filling_bound_ns(to_others(16'000, 1000, 1, 0)) == 16'000);
  CHECK(filling_bound_ns(to_others(16'000, 1000, 7, 0)) == 18'000);
  CHECK(filling_bound_ns(to_others(16'000, 1000, 8, 0)) == 19'000);
  CHECK(to_others(16'000, 1000, 8, 0).lower_bound_ns == 16'000);
  CHECK(filling_bound_ns(to_others(16'000, 1000, 7, 1000)) == 16'000 + 3000 + 1000);
  // Two NICs, each of which takes in a half: 7 hosts are 2 + 5 of the 2 + 4 begins of the first two steps.
  CHECK(filling_bound_ns(to_others(16'000, 1000, 7, 0, 2)) == 8000 + 1000);
}

TEST_CASE("ranks that copy slowly keep the last host longer", "[plan][filling]") {
  // 2 ranks a host, 1 byte/ns over its NIC and 1 to each rank inside: 2 x 16,000 bytes over three ports.
  const Plan plan = make_plan({{{16'000}, 1, layout({1}, 0, {kReplicate}), layout({14}, 2, {kReplicate})}},
                              uniform_topology(15, 2, 1'000'000'000, 1, 1'000'000'000, 0),
                              {Strategy::Multicast, Balance::None, 1000, 0});
  CHECK(filling_bound_ns(plan) == 2000 + 16'000);
  const Plan slow = make_plan({{{16'000}, 1, layout({1}, 0, {kReplicate}), layout({14}, 2, {kReplicate})}},
                              uniform_topology(15, 2, 1'000'000'000, 1, 250'000'000, 0),
                              {Strategy::Multicast, Balance::None, 1000, 0});
  CHECK(filling_bound_ns(slow) == 2000 + 21'333);
}

TEST_CASE("a host copies nothing before it has a chunk", "[plan][filling]") {
  // Two hosts of 2 ranks and one NIC, 1 byte/ns each. The second gets 8,000 bytes from each of two ranks, for
  // both of its own: 32,000 bytes over a NIC and two local ports, which have nothing to copy for 1,000 + 500
  // ns.
  const Plan plan = make_plan({{{2, 8000}, 1, layout({2}, 0, {shard(0)}), layout({2}, 2, {kReplicate})}},
                              uniform_topology(3, 2, 1'000'000'000, 1, 1'000'000'000, 500),
                              {Strategy::Multicast, Balance::None, 1000, 0});
  CHECK(plan.lower_bound_ns == 16'000 + 500);
  CHECK(filling_bound_ns(plan) == 16'500);
  const Plan fast = make_plan({{{2, 8000}, 1, layout({2}, 0, {shard(0)}), layout({2}, 2, {kReplicate})}},
                              uniform_topology(3, 2, 2'000'000'000, 1, 500'000'000, 500),
                              {Strategy::Multicast, Balance::None, 1000, 0});
  CHECK(fast.lower_bound_ns == 32'000 / 3 + 1 + 500);
  CHECK(filling_bound_ns(fast) == (32'000 + 1000) / 3 + 500);
}

TEST_CASE("what stays inside hosts or is reduced has no filling", "[plan][filling]") {
  const Topology topology = uniform_topology(7, 8, kTenGbit, 1, kTenGbit, 0);
  const Plan inside = make_plan({{{6000}, 1, layout({1}, 0, {kReplicate}), layout({7}, 1, {kReplicate})}},
                                topology, {Strategy::Multicast, Balance::None, 60, 0});
  CHECK(filling_bound_ns(inside) == inside.lower_bound_ns);
  const Plan reduced =
      make_plan({{{6000}, 1, layout({2}, 0, {partial(ReduceOp::Sum)}), layout({2}, 2, {kReplicate})}},
                uniform_topology(3, 1, kTenGbit, 1, kTenGbit, 0), {});
  CHECK(filling_bound_ns(reduced) == reduced.lower_bound_ns);
  const Plan none =
      make_plan({{{6000}, 1, layout({2}, 0, {kReplicate}), layout({2}, 0, {shard(0)})}}, topology, {});
  CHECK(filling_bound_ns(none) == 0);
}

TEST_CASE("where NICs are slow, chunks to many hosts are finer", "[plan][filling]") {
  // Two shards to 15 hosts of two replicas. Finer chunks take less time to pass them all.
  const Problem problem{{2048, 256}, 4, layout({2}, 0, {shard(0)}), layout({30}, 2, {kReplicate})};
  const auto made = [&](int64_t rate) {
    return make_plan({problem}, uniform_topology(31, 2, rate, 1, 1'000'000'000, 20'000),
                     {Strategy::Auto, Balance::Search, 0, 0});
  };
  const auto ratio = [](const Plan& plan) {
    return static_cast<double>(plan.makespan_ns) / static_cast<double>(plan.lower_bound_ns);
  };
  const Plan slow = made(7'500'000);  // bytes/s; 8 KiB take 1.1 ms
  CHECK(ratio(slow) < 1.06);
  for (const Chunk& chunk : slow.chunks) CHECK(chunk.nbytes <= 8 * 1024);
  const Plan fast = made(kTenGbit);
  CHECK(ratio(fast) > 1.1);  // a message costs as much as 8 KiB there
}
