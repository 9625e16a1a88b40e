// Conversions and reductions as kernels run them, on the host.
#include <bit>
#include <cstring>
#include <fstream>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "boxes/batches.h"
#include "catch.h"
#include "common/numbers.h"
#include "memory/reduce.h"

using namespace meshcast;
using namespace meshcast::cuda;
using namespace meshcast::cuda::testing;

namespace {

// One format: its bits as an integer, and what lies above its infinity is a NaN.
template <typename T, typename Bits, uint32_t kInfinityBits>
struct Format {
  using Number = T;
  static constexpr auto kWidth = static_cast<uint32_t>(8 * sizeof(Bits));
  static constexpr bool kE4m3 = kInfinityBits == 0x7E;
  static T number(uint32_t bits) { return std::bit_cast<T>(static_cast<Bits>(bits)); }
  static uint32_t bits(T number) {
    const uint32_t all = std::bit_cast<Bits>(number);
    return (all & ((1U << (kWidth - 1)) - 1)) > kInfinityBits ? kInfinityBits + 1 : all;
  }
};
using Float32Format = Format<float, uint32_t, 0x7F800000>;
using BFloat16Format = Format<BFloat16, uint16_t, 0x7F80>;
using HalfFormat = Format<Half, uint16_t, 0x7C00>;
using E4m3Format = Format<Float8E4m3<true>, uint8_t, 0x7E>;
using E4m3NanFormat = Format<Float8E4m3<false>, uint8_t, 0x7E>;
using E5m2Format = Format<Float8E5m2, uint8_t, 0x7C>;

template <class From>
std::vector<uint32_t> all_inputs() {
  std::vector<uint32_t> out;
  for (uint32_t i = 0; i < (From::kWidth == 8 ? 256U : 65536U); ++i) {
    if (From::kWidth < 32) {
      out.push_back(i);
      continue;
    }
    for (const uint32_t low : {0, 1, 0x0FFF, 0x1000, 0x1001, 0x3000, 0x7FFF, 0x8000, 0x8001, 0xFFFF})
      out.push_back(i << 16 | low);
  }
  return out;
}

template <class From, class To>
typename To::Number cast(typename From::Number x) {
  typename To::Number out;
  round_to(to_float(x), &out);
  return out;
}

template <class From, class To>
std::string golden_line(const std::string& names) {
  uint64_t sum = 0;
  const std::vector<uint32_t> inputs = all_inputs<From>();
  for (size_t i = 0; i < inputs.size(); ++i) {
    const uint64_t bits = To::bits(cast<From, To>(From::number(inputs[i])));
    sum += (bits + 1) * (2654435761U * uint64_t{i} + 12345);
  }
  std::string digits(16, '0');
  for (int i = 15; i >= 0; --i, sum >>= 4) digits[static_cast<size_t>(i)] = "0123456789abcdef"[sum & 15];
  return names + " " + std::to_string(inputs.size()) + " " + digits;
}

// Calls visit<From, To>(name) for every pair of different formats, in the order of the file.
template <class From, class Visit>
void visit_targets(const std::string& from, const Visit& visit) {
  const auto target = [&]<class To>(const std::string& to, To*) {
    if constexpr (!std::is_same_v<From, To> && !(From::kE4m3 && To::kE4m3))
      visit.template operator()<From, To>(from + " " + to);
  };
  target("float32", static_cast<Float32Format*>(nullptr));
  target("bfloat16", static_cast<BFloat16Format*>(nullptr));
  target("float16", static_cast<HalfFormat*>(nullptr));
  target("float8_e4m3fn", static_cast<E4m3Format*>(nullptr));
  target("float8_e4m3fn_nan", static_cast<E4m3NanFormat*>(nullptr));
  target("float8_e5m2", static_cast<E5m2Format*>(nullptr));
}
template <class Visit>
void visit_casts(const Visit& visit) {
  visit_targets<Float32Format>("float32", visit);
  visit_targets<BFloat16Format>("bfloat16", visit);
  visit_targets<HalfFormat>("float16", visit);
  visit_targets<E4m3Format>("float8_e4m3fn", visit);
  visit_targets<E5m2Format>("float8_e5m2", visit);
}

}  // namespace

TEST_CASE("conversions give what torch's give", "[cuda]") {
  std::ifstream file(std::string(MESHCAST_GOLDEN_DIR) + "/casts.txt");
  REQUIRE(file.good());
  int pairs = 0;
  visit_casts([&]<class From, class To>(const std::string& names) {
    std::string expected;
    std::getline(file, expected);
    const std::string found = golden_line<From, To>(names);
    CHECK(found == expected);
    ++pairs;
  });
  CHECK(pairs == 24);  // what becomes of too large numbers in e4m3fn has two rules
}

TEST_CASE("threads convert each element of each box once and no other", "[cuda]") {
  const auto seed = static_cast<uint32_t>(GENERATE(range(1, 9)));
  CAPTURE(seed);
  std::mt19937 rng(seed);
  visit_casts([&]<class From, class To>(const std::string& names) {
    using Source = typename From::Number;
    using Target = typename To::Number;
    CAPTURE(names);
    Batch batch = random_batch(rng, 1 + rng() % 6, sizeof(Source), sizeof(Target), rng() % 2 == 0);
    const std::vector<std::byte> before = batch.destination().bytes;
    REQUIRE(run_batch(rng, &batch, CastOp<Source, Target>{}) == std::set<std::string>{});
    CHECK(batch.destination().writes == owned_bytes(batch.destination(), batch.pairs, false));
    CHECK(batch.source().reads == owned_bytes(batch.source(), batch.pairs, true));

    const std::vector<std::byte> after = batch.destination().bytes;
    batch.destination().bytes.assign(before.begin(), before.end());
    for (const BoxPair& pair : batch.pairs) {
      if (pair.from.nbytes() == 0) continue;
      const std::vector<std::byte*> from = element_addresses(pair.from);
      const std::vector<std::byte*> to = element_addresses(pair.to);
      for (size_t i = 0; i < from.size(); ++i) {
        Source in;
        std::memcpy(&in, from[i], sizeof(in));
        const Target out = cast<From, To>(in);
        std::memcpy(to[i], &out, sizeof(out));
      }
    }
    CHECK(after == batch.destination().bytes);
  });
}

namespace {

// Values whose results no order of operands changes: small whole numbers, no NaN.
template <typename T>
void fill_small(std::mt19937& rng, Arena* arena) {
  for (std::byte* at = arena->begin(); arena->holds(at, sizeof(T)); at += sizeof(T)) {
    const auto small = static_cast<int>(rng() % 16) - 5;
    T value;
    if constexpr (is_small_float<T>) {
      round_to(static_cast<float>(small), &value);
    } else if constexpr (is_complex<T>) {
      value = {static_cast<decltype(value.re)>(small), static_cast<decltype(value.re)>(rng() % 4)};
    } else if constexpr (std::is_same_v<T, bool>) {
      value = small > 0;
    } else if constexpr (std::is_integral_v<T>) {
      value = static_cast<T>(rng() % 3 == 0 ? rng() : static_cast<unsigned>(small));
    } else {
      value = static_cast<T>(small);
    }
    std::memcpy(at, &value, sizeof(T));
  }
}

template <typename T>
void check_reduction(std::mt19937& rng, ElementType type) {
  for (const ReduceOp op : {ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Min, ReduceOp::Max, ReduceOp::Product}) {
    if (!can_reduce(type, op)) continue;
    CAPTURE(static_cast<int>(type), static_cast<int>(op));
    Batch batch = random_batch(rng, 1 + rng() % 4, sizeof(T), sizeof(T), true);
    fill_small<T>(rng, &batch.source());
    fill_small<T>(rng, &batch.destination());
    const std::vector<std::byte> before = batch.destination().bytes;
    REQUIRE(run_batch(rng, &batch, ReduceOpOf<T>{op}) == std::set<std::string>{});
    CHECK(batch.destination().writes == owned_bytes(batch.destination(), batch.pairs, false));
    CHECK(batch.destination().reads == batch.destination().writes);
    CHECK(batch.source().reads == owned_bytes(batch.source(), batch.pairs, true));

    std::vector<std::byte> after = batch.destination().bytes;
    batch.destination().bytes.assign(before.begin(), before.end());
    for (const BoxPair& pair : batch.pairs) {
      std::vector<std::byte> carried(static_cast<size_t>(pair.to.nbytes()));
      pack(pair.to, carried.data());
      combine(pair.from, carried.data(), type, op);
      unpack(carried.data(), pair.to);
    }
    CHECK(after == batch.destination().bytes);
    if (op != ReduceOp::Avg) continue;

    Arena& memory = batch.destination();
    const int64_t n = 1 + static_cast<int64_t>(rng() % 500);
    const StridedView flat{memory.begin(), 1, sizeof(T), {std::min<int64_t>(n, 64 / sizeof(T))}, {sizeof(T)}};
    std::vector<std::byte> expected(memory.bytes.begin(), memory.bytes.end());
    divide(expected.data() + memory.index(flat.data), flat.nbytes(), type, 3);
    Batch in_place{{{flat, flat}}, std::move(batch.arenas)};
    REQUIRE(run_batch(rng, &in_place, DivideOp<T>{3}) == std::set<std::string>{});
    CHECK(in_place.destination().bytes == expected);
  }
}

}  // namespace

TEST_CASE("threads reduce as the CPU does", "[cuda]") {
  const auto seed = static_cast<uint32_t>(GENERATE(range(1, 7)));
  CAPTURE(seed);
  std::mt19937 rng(seed);
  check_reduction<double>(rng, ElementType::Float64);
  check_reduction<float>(rng, ElementType::Float32);
  check_reduction<Half>(rng, ElementType::Float16);
  check_reduction<BFloat16>(rng, ElementType::BFloat16);
  check_reduction<int64_t>(rng, ElementType::Int64);
  check_reduction<int32_t>(rng, ElementType::Int32);
  check_reduction<int16_t>(rng, ElementType::Int16);
  check_reduction<int8_t>(rng, ElementType::Int8);
  check_reduction<uint8_t>(rng, ElementType::UInt8);
  check_reduction<bool>(rng, ElementType::Bool);
  check_reduction<Complex<float>>(rng, ElementType::Complex64);
  check_reduction<Complex<double>>(rng, ElementType::Complex128);
}
