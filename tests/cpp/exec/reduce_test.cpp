// Reducing hops: random plans from Partial sources, each rank a thread, against what is reduced here; and the
// arithmetic of every element type.
#include "exec/reduce.h"

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <thread>
#include <vector>

#include "catch.h"
#include "exec/harness.h"
#include "exec/random_plans.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

constexpr auto kLimit = std::chrono::milliseconds(60'000);

// The value that contribution c has of element i; any two differ. Sums and products wrap around.
int64_t value_of(int64_t i, int64_t c) {
  uint64_t z = static_cast<uint64_t>(i) * 1009 + static_cast<uint64_t>(c) + 1;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EB;
  return static_cast<int64_t>(z ^ (z >> 31));
}

int64_t reduced(int64_t i, int64_t count, ReduceOp op) {
  auto out = static_cast<uint64_t>(value_of(i, 0));
  for (int64_t c = 1; c < count; ++c) {
    const int64_t next = value_of(i, c);
    const auto so_far = static_cast<int64_t>(out);
    switch (op) {
      case ReduceOp::Sum:
      case ReduceOp::Avg: out += static_cast<uint64_t>(next); break;
      case ReduceOp::Product: out *= static_cast<uint64_t>(next); break;
      case ReduceOp::Min: out = static_cast<uint64_t>(std::min(so_far, next)); break;
      case ReduceOp::Max: out = static_cast<uint64_t>(std::max(so_far, next)); break;
      case ReduceOp::None: break;
    }
  }
  return op == ReduceOp::Avg ? static_cast<int64_t>(out) / count : static_cast<int64_t>(out);
}

// Which partial value the rank holds: its coordinates along the Partial dimensions. -1: it is not in the mesh.
int64_t contribution_of(const Layout& layout, int32_t rank) {
  const auto it = std::find(layout.mesh.ranks.begin(), layout.mesh.ranks.end(), rank);
  if (it == layout.mesh.ranks.end()) return -1;
  int64_t rest = it - layout.mesh.ranks.begin();
  int64_t out = 0;
  int64_t scale = 1;
  for (size_t d = layout.mesh.shape.size(); d-- > 0;) {
    const int64_t at = rest % layout.mesh.shape[d];
    rest /= layout.mesh.shape[d];
    if (layout.placements[d].kind != PlacementKind::Partial) continue;
    out += at * scale;
    scale *= layout.mesh.shape[d];
  }
  return out;
}

int64_t contributions_of(const Layout& layout) {
  int64_t out = 1;
  for (size_t d = 0; d < layout.mesh.shape.size(); ++d) {
    if (layout.placements[d].kind == PlacementKind::Partial) out *= layout.mesh.shape[d];
  }
  return out;
}

Plan random_reduction(std::mt19937& rng, int world, ReduceOp op,
                      const std::vector<std::vector<int32_t>>& hosts) {
  Problem problem;
  const size_t dims = rng() % 4;
  for (size_t d = 0; d < dims; ++d) problem.shape.push_back(static_cast<int64_t>(rng() % 9) + (rng() % 8 != 0));
  problem.element_bytes = 8;
  problem.dst = random_layout(rng, world, dims);
  do {
    problem.src = random_layout(rng, world, dims);
    for (Placement& placement : problem.src.placements) {
      if (rng() % 3 == 0) continue;
      placement = {};
      placement.kind = PlacementKind::Partial;
      placement.op = op;
    }
  } while (contributions_of(problem.src) < 2);
  PlanOptions options;
  options.chunk_bytes = 64;
  const int64_t per_host = hosts.empty() ? 1 : static_cast<int64_t>(hosts.front().size());
  return make_plan({problem},
                   uniform_topology(world - 1, static_cast<int32_t>(per_host), 1000000000, 1, 8000000000, 1000),
                   options);
}

RankRun start_reduction(Cluster& cluster, const Plan& plan, int rank, RunLabel run_label) {
  const Problem& problem = plan.problems.front();
  const int64_t c = contribution_of(problem.src, rank);
  const int64_t count = contributions_of(problem.src);
  const ReduceOp op =
      std::find_if(problem.src.placements.begin(), problem.src.placements.end(), [](const Placement& p) {
        return p.kind == PlacementKind::Partial;
      })->op;
  RankRun part;
  const Shard destination = shard_of(problem.dst, problem.shape, rank);
  part.source = make_local(shard_of(problem.src, problem.shape, rank), problem.shape, true);
  for (int64_t& x : part.source.data) x = value_of(x, c);
  part.destination = make_local(destination, problem.shape, false);
  part.expected = make_local(destination, problem.shape, true).data;
  for (int64_t& x : part.expected) x = x < 0 ? x : reduced(x, count, op);
  Buffers buffers;
  buffers.source = {part.source.memory};
  buffers.destination = {part.destination.memory};
  buffers.types = {ElementType::Int64};
  part.run = cluster.engine(rank).start(
      std::make_shared<const Program>(project(plan, rank, cluster.group(), cluster.local(rank))), buffers,
      std::move(run_label), Clock::now() + kLimit);
  return part;
}

std::vector<std::vector<int32_t>> pairs_of(int world) {
  std::vector<std::vector<int32_t>> out;
  for (int32_t rank = 0; rank < world; rank += 2) {
    out.push_back({rank});
    if (rank + 1 < world) out.back().push_back(rank + 1);
  }
  return out;
}

constexpr ReduceOp kOps[] = {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product};

}  // namespace

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
    REQUIRE(part.run->wait_until(Clock::now() + kLimit));
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
      REQUIRE(part.run->wait_until(Clock::now() + kLimit));
      REQUIRE_FALSE(part.run->error());
      REQUIRE(part.destination.data == part.expected);
      const Program& program = part.run->program();
      REQUIRE(part.run->carries.peak() <= program.most_carried);
      REQUIRE(program.most_carried < static_cast<int32_t>(program.carried_sends.size()));
    }
  }
}

namespace {

// combine() over values given as float64, in type T; every second element, so that memory has gaps.
template <typename T>
std::vector<T> combined(const std::vector<T>& own, const std::vector<T>& arrived, ElementType type,
                        ReduceOp op) {
  std::vector<T> gaps(2 * own.size());
  for (size_t i = 0; i < own.size(); ++i) gaps[2 * i] = own[i];
  StridedView view{reinterpret_cast<std::byte*>(gaps.data()), 1, sizeof(T), {}, {}};
  view.extent[0] = static_cast<int64_t>(own.size());
  view.stride[0] = 2 * sizeof(T);
  std::vector<T> out = arrived;
  combine(view, reinterpret_cast<std::byte*>(out.data()), type, op);
  return out;
}

}  // namespace

TEST_CASE("elements of every type are combined as torch does", "[exec][reduce]") {
  SECTION("float32, more than one block of memory with gaps") {
    std::vector<float> own(10'001), arrived(10'001), expected(10'001);
    for (size_t i = 0; i < own.size(); ++i) {
      own[i] = 0.1F * static_cast<float>(i);
      arrived[i] = 7.3F - static_cast<float>(i);
      expected[i] = own[i] + arrived[i];
    }
    CHECK(combined(own, arrived, ElementType::Float32, ReduceOp::Sum) == expected);
  }
  SECTION("a NaN stays") {
    const double nan = std::numeric_limits<double>::quiet_NaN();
    for (const ReduceOp op : {ReduceOp::Min, ReduceOp::Max}) {
      const auto out = combined<double>({nan, 1.0}, {1.0, nan}, ElementType::Float64, op);
      CHECK(std::isnan(out[0]));
      CHECK(std::isnan(out[1]));
    }
  }
  SECTION("integers wrap around") {
    CHECK(combined<int8_t>({100, -100}, {100, -100}, ElementType::Int8, ReduceOp::Sum) ==
          std::vector<int8_t>{-56, 56});
    CHECK(combined<uint8_t>({200}, {3}, ElementType::UInt8, ReduceOp::Product) == std::vector<uint8_t>{88});
    CHECK(combined<int32_t>({INT32_MIN}, {-1}, ElementType::Int32, ReduceOp::Sum) ==
          std::vector<int32_t>{INT32_MAX});
    CHECK(combined<int16_t>({-7}, {3}, ElementType::Int16, ReduceOp::Max) == std::vector<int16_t>{3});
  }
  SECTION("truth values") {
    CHECK(combined<uint8_t>({0, 0, 1}, {0, 1, 1}, ElementType::Bool, ReduceOp::Sum) ==
          std::vector<uint8_t>{0, 1, 1});
    CHECK(combined<uint8_t>({0, 0, 1}, {0, 1, 1}, ElementType::Bool, ReduceOp::Product) ==
          std::vector<uint8_t>{0, 0, 1});
  }
  SECTION("bfloat16 rounds to nearest even") {
    // 1 + 2^-8 is half way between 1 (0x3F80) and the next one up; 1.0078125 + 2^-8 half way to 0x3F82.
    CHECK(combined<uint16_t>({0x3F80, 0x3F81}, {0x3B80, 0x3B80}, ElementType::BFloat16, ReduceOp::Sum) ==
          std::vector<uint16_t>{0x3F80, 0x3F82});
  }
  SECTION("half: every value is its own sum with nothing, and its own double half") {
    std::vector<uint16_t> all, zeros, halves;
    for (uint32_t bits = 0; bits < 0x7C00; ++bits) {
      all.push_back(static_cast<uint16_t>(bits));
      all.push_back(static_cast<uint16_t>(bits | 0x8000));
    }
    zeros.assign(all.size(), 0);
    auto out = combined(all, zeros, ElementType::Float16, ReduceOp::Sum);
    out[1] = 0x8000;  // -0 + 0 is 0
    CHECK(out == all);
    // The largest twice is infinity; 2^-24 and 2^-24 is 2^-23; 1 + 2^-11 is half way and rounds to even.
    CHECK(combined<uint16_t>({0x7BFF, 0x0001, 0x3C00, 0x3C01}, {0x7BFF, 0x0001, 0x1000, 0x1000},
                             ElementType::Float16,
                             ReduceOp::Sum) == std::vector<uint16_t>{0x7C00, 0x0002, 0x3C00, 0x3C02});
  }
  SECTION("averages") {
    std::vector<int32_t> ints{7, -7, 6};
    divide(reinterpret_cast<std::byte*>(ints.data()), 12, ElementType::Int32, 3);
    CHECK(ints == std::vector<int32_t>{2, -2, 2});
    std::vector<double> doubles{1.0};
    divide(reinterpret_cast<std::byte*>(doubles.data()), 8, ElementType::Float64, 3);
    CHECK(doubles.front() == 1.0 / 3);
  }
  CHECK_FALSE(can_reduce(ElementType::Complex64, ReduceOp::Max));
  CHECK_FALSE(can_reduce(ElementType::Bool, ReduceOp::Avg));
  CHECK_FALSE(can_reduce(ElementType::None, ReduceOp::Sum));
}
