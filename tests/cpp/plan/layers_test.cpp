#include <algorithm>
#include <string>

#include "catch.h"
#include "plan/cases.h"
#include "plan/checker.h"
#include "plan/draft_case.h"
#include "plan/random_problems.h"
#include "plan/strategies/rotation.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

constexpr int64_t kByteANanosecond = 1'000'000'000;

// Rows over `sources` to replicas on every rank of the hosts that follow, and to rows over the ranks of each.
std::vector<Problem> to_replicas_and_to_rows(int64_t sources, int64_t hosts, int64_t per_host,
                                             int64_t row_bytes) {
  const auto first = static_cast<int32_t>(sources);
  const Layout src = layout({sources}, 0, {shard(0)});
  return {{{sources, row_bytes}, 1, src, layout({hosts * per_host}, first, {kReplicate})},
          {{sources, row_bytes}, 1, src, layout({hosts, per_host}, first, {kReplicate, shard(0)})}};
}

Schedule in_order(const Draft& draft, const Network& network) {
  return sort_by_start(simulate(draft.hops, draft.chunks, network));
}

int64_t passed_on(const Draft& draft) {
  return std::count_if(draft.hops.begin(), draft.hops.end(), [](const Hop& hop) { return hop.after >= 0; });
}

}  // namespace

TEST_CASE("layers rotate one after the other, and what goes to a whole host enters it once", "[plan][layers]") {
  // 8 sources on two hosts, two hosts of 4. A row takes 1 us over a NIC and 2 us inside a host.
  const std::vector<Problem> problems = to_replicas_and_to_rows(8, 2, 4, 1000);
  DraftCase c(problems, uniform_topology(15, 4, kByteANanosecond, 4, kByteANanosecond / 2, 0), 1 << 20);
  c.bound_ns = 1'000'000;
  const Draft draft = draft_layers(c.inputs());
  CHECK(draft.hops.size() == 8 * 8 + 8 * 2);
  CHECK(passed_on(draft) == 8 * 2 * 3);  // of four receivers, three
  // The first layer sends 8 rows to 2 hosts over 8 NICs, the second as many: 2 + 2 us. Each rank has two rows
  // to copy to three others, the first of them from the first microsecond on.
  const Schedule made = in_order(draft, c.network);
  for (size_t i = 0; i < made.hops.size(); ++i)
    if (c.network.host(c.network.index(made.hops[i].src)) != c.network.host(c.network.index(made.hops[i].dst)))
      CHECK(made.times[i].finish_ns <= 4000);
  CHECK(made.makespan_ns == 1000 + 2 * 3 * 2000);
  // Where the hosts have no time for it, all comes over NICs: 8 of them, 8 rows to 8 ranks, and then to 2.
  c.bound_ns = 20'000;
  CHECK(passed_on(draft_layers(c.inputs())) == 0);
  CHECK(in_order(draft_layers(c.inputs()), c.network).makespan_ns == 8000 + 2000);
  // And where layers one after the other are too slow, there are none.
  c.bound_ns = 9'000;
  CHECK(draft_layers(c.inputs()).hops.empty());
}

TEST_CASE("receivers pass on what senders have no time for", "[plan][layers]") {
  // Two sources on a host each, 8 hosts of one rank: replicas of 2 rows, and a row each of another tensor.
  const Layout src = layout({2}, 0, {shard(0)});
  const std::vector<Problem> problems{{{2, 1000}, 1, src, layout({8}, 2, {kReplicate})},
                                      {{8, 1000}, 1, src, layout({8}, 2, {shard(0)})}};
  DraftCase c(problems, uniform_topology(9, 1, kByteANanosecond, 1, kByteANanosecond, 0), 1 << 20);
  const Draft draft = draft_layers(c.inputs());
  // Of the first layer, a sender would have 8 rows and a receiver has 2: the turns are cut into four parts.
  CHECK(passed_on(draft) == 2 * 6);
  const Schedule made = in_order(draft, c.network);
  CHECK(made.makespan_ns <= 2000 + 4000 + 3000);  // a part has 2 turns, a sender 4 rows of the second layer
  CHECK(PlanChecker(with_draft(make_plan(problems, c.topology, {}), draft, made)).check() == "");
}

TEST_CASE("what is copied inside a host is not passed on from another one", "[plan][layers]") {
  // Two sources on a host each, 8 hosts of 4 ranks; see above.
  const Layout src = layout({2}, 0, {shard(0)});
  const std::vector<Problem> problems{{{2, 1000}, 1, src, layout({32}, 8, {kReplicate})},
                                      {{32, 1000}, 1, src, layout({32}, 8, {shard(0)})}};
  Topology topology = uniform_topology(39, 4, kByteANanosecond, 4, kByteANanosecond, 0);
  topology.hosts[0].ranks = {0, 2, 3, 4};
  topology.hosts[1].ranks = {1, 5, 6, 7};
  DraftCase c(problems, topology, 1 << 20);
  const Draft draft = draft_layers(c.inputs());
  int64_t between = 0, relays = 0;
  for (const Hop& hop : draft.hops) {
    const bool inside = c.network.host(c.network.index(hop.src)) == c.network.host(c.network.index(hop.dst));
    between += !inside;
    relays += !inside && hop.after >= 0;
  }
  CHECK(between == 2 * 8 + 32);
  CHECK(relays == 2 * 6);
}

TEST_CASE("a batch of one layer has no layers", "[plan][layers]") {
  const Problem problem{{8, 8}, 1, layout({8}, 0, {shard(0)}), layout({8}, 8, {kReplicate})};
  DraftCase c(problem, uniform_topology(15, 4, kTenGbit, 4, kTenGbit, 0), 1 << 20);
  CHECK(draft_layers(c.inputs()).hops.empty());
}

TEST_CASE("layers move all of any batch", "[plan][layers]") {
  Random random(23);
  int drafts = 0, passing = 0;
  for (int n = 0; n < 300; ++n) {
    const RandomCase one = random_case(random, 4000, false);
    std::vector<Problem> problems{one.problem};
    for (int64_t more = random.between(1, 3); more > 0; --more) {
      Problem next = one.problem;
      const auto ndim = static_cast<int>(next.shape.size());
      for (int64_t& extent : next.shape) extent = random.between(1, 12);
      next.src.placements = random_placements(random, next.src.mesh.shape.size(), ndim, true);
      next.dst.placements = random_placements(random, next.dst.mesh.shape.size(), ndim, true);
      problems.push_back(next);
    }
    INFO("case " << n);
    DraftCase c(problems, one.topology, random.one_of<int64_t>({8, 64, 1 << 20}));
    if (c.inputs().reduces()) continue;
    c.bound_ns = int64_t{1} << 40;
    const Draft draft = draft_layers(c.inputs());
    if (draft.hops.empty()) continue;
    ++drafts;
    passing += passed_on(draft) > 0;
    const Schedule made = in_order(draft, c.network);
    CHECK(PlanChecker(with_draft(make_plan(problems, one.topology, {}), draft, made)).check() == "");
  }
  CHECK(drafts > 100);
  CHECK(passing > 50);
}
