// Tensors that change their type on the way over rounds: bytes against those of one cast, after any reduction.
#include <bit>
#include <random>
#include <string>
#include <vector>

#include "catch.h"
#include "rounds/cast_cases.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

void check_random_casts(uint32_t seed, int count) {
  CAPTURE(seed);
  std::mt19937 rng(seed);
  CastCounts counts;
  for (int number = 0; number < count; ++number) {
    const int size = 3 + 2 * static_cast<int>(rng() % 3);
    CAPTURE(number, size);
    World world(size);
    std::vector<RankCase> parts;
    for (int run = 0; run < 2; ++run) {  // the second reuses the staging of the first
      const CastBatch batch = random_cast_batch(rng, size);
      const RoundTable table = make_rounds(batch.plan, random_options(rng));
      std::vector<RankRounds> ranks;
      for (const int32_t rank : world.group) {
        parts.push_back(cast_case(rng, batch, table, rank, world.group));
        ranks.push_back(*parts.back().rounds);
        REQUIRE(check_streams(ranks.back()).empty());
        count_casts(ranks.back(), &counts);
        world.start(rank, parts.back(), run, kLong, rng() % 2 == 0);
      }
      REQUIRE(check_exchanges(ranks).empty());
    }
    REQUIRE(world.cluster.run(rng));
    world.poll();
    REQUIRE(world.cluster.mistakes == std::vector<std::string>{});
    for (const RankCase& part : parts) {
      REQUIRE_FALSE(part.run->error());
      REQUIRE(part.destination->seen == part.expected);
    }
  }
  CHECK(counts.packed > count);
  CHECK(counts.unpacked > count);
  CHECK(counts.copied > count / 2);
  CHECK(counts.forwarded > 0);
  CHECK(counts.straight > count);
  CHECK(counts.mixed > 0);
}

}  // namespace

TEST_CASE("random rounds cast in any order that streams allow", "[rounds]") {
  check_random_casts(GENERATE(1U, 2U, 3U, 4U), 60);
}

TEST_CASE("very many random rounds cast", "[rounds][.][slow]") {
  check_random_casts(GENERATE(11U, 12U, 13U, 14U), 400);
}

namespace {

template <typename T>
T cast_to(float number) {
  T out;
  round_to(number, &out);
  return out;
}

// Whether every number of Wire that becomes a T stays that T when it is packed and unpacked once more.
template <typename Wire, typename T>
bool all_return(uint64_t count, uint64_t step) {
  for (uint64_t bits = 0; bits < count; bits += step) {
    Wire wire;
    std::memcpy(&wire, &bits, sizeof wire);
    const T once = cast_to<T>(to_float(wire));
    const T again = cast_to<T>(to_float(cast_to<Wire>(to_float(once))));
    const bool nan = is_nan(to_float(once)) && is_nan(to_float(again));
    if (!nan && std::memcmp(&once, &again, sizeof once) != 0) return false;
  }
  return true;
}

template <typename Wire>
void check_returns(ElementType wire, uint64_t count, uint64_t step) {
  const auto check = [&]<typename T>(ElementType type, T*) {
    CAPTURE(static_cast<int>(wire), static_cast<int>(type));
    if constexpr (!std::is_same_v<Wire, T>)
      CHECK(returns_through(wire, type) == all_return<Wire, T>(count, step));
  };
  check(ElementType::Float32, static_cast<float*>(nullptr));
  check(ElementType::BFloat16, static_cast<BFloat16*>(nullptr));
  check(ElementType::Float16, static_cast<Half*>(nullptr));
  check(ElementType::Float8E5m2, static_cast<Float8E5m2*>(nullptr));
  check(ElementType::Float8E4m3, static_cast<Float8E4m3<true>*>(nullptr));
  check(ElementType::Float8E4m3, static_cast<Float8E4m3<false>*>(nullptr));
}

}  // namespace

TEST_CASE("what was unpacked and cast can be packed again, but for one pair of types", "[rounds]") {
  check_returns<float>(ElementType::Float32, uint64_t{1} << 32, 2039);
  check_returns<BFloat16>(ElementType::BFloat16, 1 << 16, 1);
  check_returns<Half>(ElementType::Float16, 1 << 16, 1);
  check_returns<Float8E5m2>(ElementType::Float8E5m2, 1 << 8, 1);
  check_returns<Float8E4m3<true>>(ElementType::Float8E4m3, 1 << 8, 1);
  CHECK_FALSE(returns_through(ElementType::Float16, ElementType::BFloat16));
  CHECK(returns_through(ElementType::Int64, ElementType::Int64));
  CHECK_FALSE(returns_through(ElementType::Float64, ElementType::Float32));
}

TEST_CASE("casts that no rank can do on the way are refused before anything is enqueued", "[rounds]") {
  Plan plan = chain_plan(3, 64, 512);
  plan.problems.front().element_bytes = 2;
  plan = make_plan(plan.problems, plan.topology, plan.options);
  const auto program = std::make_shared<const Program>(project(plan, 1, {0, 1, 2}));
  const auto schedule = [&](ElementType source, ElementType wire, ElementType destination) {
    const auto form = [](ElementType type) { return TensorForm{{size_of(type)}, size_of(type), type}; };
    return schedule_rank(plan, make_rounds(plan), 1, program, {{form(source)}, {form(destination)}, {wire}});
  };
  using enum ElementType;
  CHECK_NOTHROW(schedule(Float32, BFloat16, BFloat16));
  CHECK_NOTHROW(schedule(Float8E5m2, Float16, Float16));
  CHECK_NOTHROW(schedule(BFloat16, BFloat16, Float16));
  CHECK_THROWS_AS(schedule(Float16, Float16, BFloat16), Error);  // 65504 would not survive
  CHECK_THROWS_AS(schedule(Float32, BFloat16, Float32), Error);  // cast twice
  CHECK_THROWS_AS(schedule(Float64, BFloat16, BFloat16), Error);
  CHECK_THROWS_AS(schedule(Int16, Float16, Float16), Error);
  CHECK_THROWS_AS(schedule(None, BFloat16, BFloat16), Error);
  CHECK_THROWS_AS(schedule(Float32, Float32, BFloat16), Error);  // the plan counts with two bytes
}
