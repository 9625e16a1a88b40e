// The arithmetic of reductions, of every element type.
#include "memory/reduce.h"

#include <cmath>
#include <limits>
#include <vector>

#include "catch.h"

using namespace meshcast;

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
