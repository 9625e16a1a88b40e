// Plans of ranks that are numbered with gaps between them.
#include <vector>

#include "catch.h"
#include "plan/cases.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

constexpr int64_t kSlow = 30'217'518;  // bytes/s, of a NIC on which chunks may be finer than usual

// One rank to two replicas on each of `hosts` hosts, of which each has `ranks_per_host` ranks; the others of
// them take no part.
Plan one_to_pairs(int32_t hosts, int32_t ranks_per_host, int64_t elements) {
  Layout target = layout({hosts, 2}, 0, {kReplicate, kReplicate});
  for (int32_t host = 0; host < hosts; ++host)
    for (int32_t pair = 0; pair < 2; ++pair)
      target.mesh.ranks[static_cast<size_t>(2 * host + pair)] = (host + 1) * ranks_per_host + pair;
  const Topology topology =
      uniform_topology((hosts + 1) * ranks_per_host, ranks_per_host, kSlow, 1, 10'000'000'000, 100'000);
  return make_plan({{{elements}, 4, layout({1}, 0, {kReplicate}), target}}, topology,
                   {Strategy::Auto, Balance::Greedy, 0});
}

}  // namespace

TEST_CASE("ranks that take no part change no plan", "[plan]") {
  for (const int32_t hosts : {4, 7, 8, 12}) {
    const Plan dense = one_to_pairs(hosts, 2, 2'265'558);
    for (const int32_t ranks_per_host : {3, 4, 64}) {
      INFO(hosts << " hosts of " << ranks_per_host << " ranks");
      const Plan plan = one_to_pairs(hosts, ranks_per_host, 2'265'558);
      CHECK(plan.strategy == dense.strategy);
      CHECK(plan.makespan_ns == dense.makespan_ns);
      CHECK(plan.hops.size() == dense.hops.size());
    }
  }
}
