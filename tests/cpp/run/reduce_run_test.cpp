// Reducing hops: plans from Partial sources, each rank a thread, against what is reduced here.
#include <map>
#include <mutex>
#include <numeric>
#include <random>
#include <thread>
#include <vector>

#include "catch.h"
#include "common/error.h"
#include "plan/cases.h"
#include "plan/staging.h"
#include "run/random_reductions.h"

using namespace meshcast;
using namespace meshcast::testing;

TEST_CASE("random Partial sources arrive reduced", "[exec][reduce]") {
  const bool hosts = GENERATE(false, true);
  const int world = GENERATE(3, 5, 7);
  const auto seed = static_cast<uint32_t>(40 * world + hosts);
  CAPTURE(seed);
  std::mt19937 rng(seed);
  const auto shared = hosts ? pairs_of(world) : std::vector<std::vector<int32_t>>{};
  Cluster cluster(world, nullptr, shared);
  std::vector<RankRun> runs;
  bool carried = false;
  for (int number = 0; number < 40; ++number) {
    const Plan plan = random_reduction(rng, world, kOps[rng() % 5], shared);
    std::vector<int> order(static_cast<size_t>(world));
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), rng);
    for (const int rank : order) runs.push_back(start_reduction(cluster, plan, rank, label(number)));
    for (size_t i = runs.size() - order.size(); i < runs.size(); ++i)
      carried = carried || runs[i].run->program().most_carried > 0;
  }
  for (const RankRun& part : runs) {
    REQUIRE(part.run->wait_until(Clock::now() + kReductionLimit));
    REQUIRE_FALSE(part.run->error());
    REQUIRE(part.destination.data == part.expected);
    CHECK(part.run->carries.peak() <= part.run->program().most_carried);
  }
  CHECK(carried);
}

TEST_CASE("a rank that starts late delays a reduction, whichever it is, and bounds what others keep",
          "[exec][reduce]") {
  // Three hosts reduce 2,000 chunks along chains through one another.
  const int world = 5;
  const bool hosts = GENERATE(false, true);
  Problem problem;
  problem.shape = {16'000};
  problem.element_bytes = 8;
  Placement partial;
  partial.kind = PlacementKind::Partial;
  partial.op = ReduceOp::Sum;
  problem.src = {{{world}, {0, 1, 2, 3, 4}}, {partial}};
  Placement shard;
  shard.kind = PlacementKind::Shard;
  problem.dst = {{{world}, {4, 2, 0, 1, 3}}, {shard}};
  PlanOptions options;
  options.chunk_bytes = 64;
  const Plan plan = make_plan(
      {problem}, uniform_topology(world - 1, hosts ? 2 : 1, 1000000000, 1, 8000000000, 1000), options);
  for (int late = 0; late < world; ++late) {
    CAPTURE(late);
    Cluster cluster(world, nullptr, hosts ? pairs_of(world) : std::vector<std::vector<int32_t>>{});
    std::vector<RankRun> runs;
    for (int rank = 0; rank < world; ++rank) {
      if (rank != late) runs.push_back(start_reduction(cluster, plan, rank, label(0)));
    }
    // Long enough that the others fill what they may fill; nothing depends on it.
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    for (const RankRun& part : runs) CHECK_FALSE(part.run->ended());
    runs.push_back(start_reduction(cluster, plan, late, label(0)));
    for (const RankRun& part : runs) {
      REQUIRE(part.run->wait_until(Clock::now() + kReductionLimit));
      REQUIRE_FALSE(part.run->error());
      REQUIRE(part.destination.data == part.expected);
      const Program& program = part.run->program();
      REQUIRE(part.run->carries.peak() <= program.most_carried);
      REQUIRE(program.most_carried < static_cast<int32_t>(program.carried_sends.size()));
    }
  }
}

namespace {

void check_arrived(const std::vector<RankRun>& runs) {
  for (const RankRun& part : runs) {
    REQUIRE(part.run->wait_until(Clock::now() + kReductionLimit));
    REQUIRE_FALSE(part.run->error());
    REQUIRE(part.destination.data == part.expected);
    CHECK(part.run->carries.peak() <= part.run->program().most_carried);
  }
}

// The same hops in another order that `after` allows, any of them.
Plan reordered(const Plan& plan, std::mt19937& rng) {
  std::vector<std::vector<int32_t>> next(plan.hops.size());
  std::vector<int32_t> ready;
  for (size_t i = 0; i < plan.hops.size(); ++i) {
    const int32_t after = plan.hops[i].after;
    (after < 0 ? ready : next[static_cast<size_t>(after)]).push_back(static_cast<int32_t>(i));
  }
  Plan out = plan;
  out.hops.clear();
  std::vector<int32_t> place(plan.hops.size(), -1);
  while (!ready.empty()) {
    std::swap(ready[rng() % ready.size()], ready.back());
    const auto i = static_cast<size_t>(ready.back());
    ready.pop_back();
    place[i] = static_cast<int32_t>(out.hops.size());
    out.hops.push_back(plan.hops[i]);
    if (out.hops.back().after >= 0) out.hops.back().after = place[static_cast<size_t>(out.hops.back().after)];
    ready.insert(ready.end(), next[i].begin(), next[i].end());
  }
  return out;
}

// Everyone has a value of everything, and everyone needs a part.
Plan reduce_scatter(int world, int per_host, int64_t elements) {
  Layout src = layout({world}, 0, {kReplicate});
  src.placements[0].kind = PlacementKind::Partial;
  src.placements[0].op = ReduceOp::Sum;
  PlanOptions options;
  options.chunk_bytes = 64;
  return make_plan({{{elements}, 8, src, layout({world}, 0, {shard(0)})}},
                   uniform_topology(world - 1, per_host, 1000000000, 1, 8000000000, 1000), options);
}

// Counts what is handed to the network, by sender and receiver.
class WireCounter {
 public:
  Cluster::Wrap wrap() {
    return [this](int rank, std::shared_ptr<Transport> inner) {
      return std::make_shared<Counting>(std::move(inner), rank, this);
    };
  }
  std::map<std::pair<int, int>, int64_t> bytes() const {
    const std::lock_guard lock(mutex_);
    return bytes_;
  }

 private:
  class Counting final : public PassingTransport {
   public:
    Counting(std::shared_ptr<Transport> inner, int rank, WireCounter* counter)
        : PassingTransport(std::move(inner)), rank_(rank), counter_(counter) {}
    void send(const Envelope& to, int64_t nbytes, std::unique_ptr<Outgoing> message) override {
      {
        const std::lock_guard lock(counter_->mutex_);
        counter_->bytes_[{rank_, to.peer}] += nbytes;
      }
      PassingTransport::send(to, nbytes, std::move(message));
    }

   private:
    int rank_;
    WireCounter* counter_;
  };

  mutable std::mutex mutex_;
  std::map<std::pair<int, int>, int64_t> bytes_;
};

}  // namespace

TEST_CASE("chains reduce in whatever order a plan has their hops, and whoever is late", "[exec][reduce]") {
  const bool hosts = GENERATE(false, true);
  const int world = 5;
  const auto seed = static_cast<uint32_t>(700 + hosts);
  CAPTURE(seed);
  std::mt19937 rng(seed);
  const Plan plan = reduce_scatter(world, hosts ? 2 : 1, 1'600);
  for (int round = 0; round < 10; ++round) {
    CAPTURE(round);
    // Two runs of different order in one lane: the second is posted while the first is under way.
    const Plan orders[] = {reordered(plan, rng), reordered(plan, rng)};
    Cluster cluster(world, nullptr, hosts ? pairs_of(world) : std::vector<std::vector<int32_t>>{});
    const int late = static_cast<int>(rng() % world);
    std::vector<RankRun> runs;
    const auto start = [&](int rank) {
      for (int number = 0; number < 2; ++number)
        runs.push_back(start_reduction(cluster, orders[number], rank, label(number)));
    };
    for (int rank = 0; rank < world; ++rank)
      if (rank != late) start(rank);
    // Long enough that the others fill what they may fill; nothing depends on it.
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
    start(late);
    check_arrived(runs);
  }
}

TEST_CASE("what goes over the wire is what the plan says", "[exec][reduce]") {
  const int world = GENERATE(3, 5, 7);
  CAPTURE(world);
  std::mt19937 rng(static_cast<uint32_t>(world));
  int64_t reduced_bytes = 0;
  for (int number = 0; number < 20; ++number) {
    CAPTURE(number);
    const Plan plan = random_reduction(rng, world, kOps[rng() % 5], {});
    std::map<std::pair<int, int>, int64_t> planned;
    for (const Hop& hop : plan.hops) {
      const int64_t nbytes = plan.chunks[static_cast<size_t>(hop.chunk)].nbytes;
      planned[{hop.src, hop.dst}] += nbytes;
      if (hop.reduce != ReduceOp::None) reduced_bytes += nbytes;
    }
    WireCounter counter;
    Cluster cluster(world, nullptr, {}, counter.wrap());
    std::vector<RankRun> runs;
    for (int rank = 0; rank < world; ++rank) runs.push_back(start_reduction(cluster, plan, rank, label(0)));
    check_arrived(runs);
    CHECK(counter.bytes() == planned);
    int64_t received = 0;
    for (const RankRun& part : runs) received += part.run->received_bytes();
    CHECK(received == std::accumulate(planned.begin(), planned.end(), int64_t{0},
                                      [](int64_t sum, const auto& entry) { return sum + entry.second; }));
  }
  CHECK(reduced_bytes > 0);
}

TEST_CASE("a plan counts the buffers of values that are passed on", "[exec][reduce][staging]") {
  // A row that three ranks add up: two pass on what they have, the last one keeps it.
  Layout src = layout({3}, 0, {kReplicate});
  src.placements[0].kind = PlacementKind::Partial;
  src.placements[0].op = ReduceOp::Sum;
  PlanOptions options;
  options.chunk_bytes = 64;
  const Plan plan = make_plan({{{800}, 8, src, layout({1}, 2, {kReplicate})}},
                              uniform_topology(2, 1, 1000000000, 1, 8000000000, 1000), options);
  const std::vector<int64_t> planned = peak_staging(plan);
  int passing = 0;
  for (int32_t rank = 0; rank < 3; ++rank) {
    CAPTURE(rank);
    const Program program = project(plan, rank, {0, 1, 2});
    if (program.most_carried == 0) continue;
    ++passing;
    CHECK(program.most_carried > kMessageWindow);
    CHECK(planned[static_cast<size_t>(rank)] == program.most_carried * 64);
  }
  CHECK(passing > 0);
  CHECK(planned[2] > 0);  // a window of what arrives there and is added up
}

TEST_CASE("reductions take no more buffers than their plan says", "[exec][reduce][staging]") {
  std::mt19937 rng(24);
  for (int number = 0; number < 60; ++number) {
    CAPTURE(number);
    const bool hosts = rng() % 2 == 0;
    const int world = 3 + static_cast<int>(rng() % 5);
    const auto shared = hosts ? pairs_of(world) : std::vector<std::vector<int32_t>>{};
    const Plan plan = reordered(random_reduction(rng, world, ReduceOp::Sum, shared), rng);
    const std::vector<int64_t> planned = peak_staging(plan);
    Cluster cluster(world, nullptr, shared);
    for (size_t i = 0; i < plan.ranks.size(); ++i) {
      const Program program = project(plan, plan.ranks[i], cluster.group(), cluster.local(plan.ranks[i]));
      int64_t largest = 0;
      int64_t all = 0;
      for (const RecvOp& op : program.recvs)
        if (op.carry >= 0) {
          largest = std::max(largest, op.nbytes);
          all += op.nbytes;
        }
      CHECK(std::min(program.most_carried * largest, all) <= planned[i]);
    }
  }
}

TEST_CASE("a reduction that nobody takes on is refused before anything moves", "[exec][reduce]") {
  Plan plan = reduce_scatter(3, 1, 48);
  // The last step of a chain becomes an ordinary one in the middle: its outcome would stay where nobody needs
  // it.
  const auto last =
      std::find_if(plan.hops.begin(), plan.hops.end(), [](const Hop& hop) { return hop.last_reduce; });
  REQUIRE(last != plan.hops.end());
  last->last_reduce = false;
  CHECK_THROWS_AS(project(plan, last->dst, {0, 1, 2}), Error);
}
