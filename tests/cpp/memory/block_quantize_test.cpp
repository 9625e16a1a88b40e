#include "memory/block_quantize.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "catch.h"
#include "common/numbers.h"

using namespace meshcast;

namespace {

constexpr std::array<ElementType, 3> kSources{ElementType::Float32, ElementType::Float16,
                                              ElementType::BFloat16};
constexpr std::array<BlockFormat, 3> kFormats{BlockFormat::Fp8E4m3, BlockFormat::MxFp8, BlockFormat::NvFp4};
constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

void store(ElementType type, float x, std::byte* to) {
  const auto rounded = [&](auto value) {
    round_to(x, &value);
    std::memcpy(to, &value, sizeof(value));
  };
  if (type == ElementType::Float32) return rounded(float{});
  if (type == ElementType::Float16) return rounded(Half{});
  rounded(BFloat16{});
}

float load(ElementType type, const std::byte* from) {
  const auto value = [&](auto x) {
    std::memcpy(&x, from, sizeof(x));
    return to_float(x);
  };
  if (type == ElementType::Float32) return value(float{});
  if (type == ElementType::Float16) return value(Half{});
  return value(BFloat16{});
}

// A matrix of rows x columns; columns lie one behind the other in memory where it is transposed.
struct Matrix {
  ElementType type;
  int64_t rows;
  int64_t columns;
  bool transposed;
  std::vector<std::byte> memory;

  Matrix(ElementType element, int64_t m, int64_t n, bool turned = false)
      : type(element),
        rows(m),
        columns(n),
        transposed(turned),
        memory(static_cast<size_t>(m * n * size_of(element))) {}

  std::byte* at(int64_t i, int64_t j) {
    return memory.data() + (transposed ? j * rows + i : i * columns + j) * size_of(type);
  }

  float value(int64_t i, int64_t j) { return load(type, at(i, j)); }

  BlockedView part(int64_t top, int64_t bottom, int64_t left, int64_t right, int64_t by, int64_t wide) {
    BlockedView out;
    out.view = {at(top, left), 2, size_of(type), {}, {}};
    out.view.extent = {bottom - top, right - left};
    out.view.stride = {(transposed ? 1 : columns) * size_of(type), (transposed ? rows : 1) * size_of(type)};
    out.type = type;
    out.low = {top, left};
    out.block = {by, wide};
    return out;
  }

  BlockedView whole(int64_t by, int64_t wide) { return part(0, rows, 0, columns, by, wide); }
};

std::vector<float> amax_of(const BlockedView& box) {
  std::vector<float> out(static_cast<size_t>(box.num_blocks()));
  block_amax(box, out.data());
  return out;
}

uint8_t e4m3(float x) {
  Float8E4m3<true> out;
  round_to(std::isinf(x) ? std::copysign(448.0F, x) : x, &out);
  return out.bits;
}

// The nearest of the numbers that there are; of two as near, the one with an even code.
uint8_t e2m1(float x) {
  constexpr std::array<float, 8> kNumbers{0, 0.5F, 1, 1.5F, 2, 3, 4, 6};
  uint8_t best = 0;
  for (uint8_t i = 1; i < 8; ++i) {
    const double now = std::abs(std::abs(double{x}) - double{kNumbers[i]});
    const double before = std::abs(std::abs(double{x}) - double{kNumbers[best]});
    if (now < before || (now == before && i % 2 == 0)) best = i;
  }
  return static_cast<uint8_t>(best | (std::signbit(x) ? 8 : 0));
}

float largest(float x, float least) { return std::isnan(x) ? x : std::max(x, least); }

// The formulas of torchao, one value after the other. scale: what is stored, as a number; by: what values are
// divided by, or multiplied with for NvFp4.
struct Scale {
  uint32_t bits;
  float by;
};
Scale scale_of(BlockFormat format, float amax, float tensor_amax) {
  if (format == BlockFormat::Fp8E4m3) {
    const float scale = largest(amax, 1e-12F) / 448.0F;
    return {std::bit_cast<uint32_t>(scale), scale};
  }
  if (format == BlockFormat::MxFp8) {
    if (std::isnan(amax)) return {255, kInfinity};
    // frexp of infinity is not defined; its exponent bits are 255.
    const int power = std::isinf(amax) ? 128 : amax < 0x1p-126F ? -127 : std::ilogb(amax);
    const int scale = std::clamp(power - 8, -127, 128);
    return {static_cast<uint32_t>(scale + 127), std::max(std::ldexp(1.0F, scale), 0x1p-126F)};
  }
  const float tensor = largest(tensor_amax, 1e-12F) / 2688.0F;
  const float scale = amax / 6.0F / tensor;
  const uint8_t code = e4m3(std::isnan(scale) ? scale : std::clamp(scale, 0x1p-6F, 448.0F));
  return {code, 1.0F / tensor / to_float(Float8E4m3<true>{code})};
}

uint8_t code_of(BlockFormat format, float x, float by) {
  if (format == BlockFormat::NvFp4) return e2m1(x * by);
  const float scaled = x / by;
  return e4m3(std::isnan(scaled) ? scaled : std::clamp(scaled, -448.0F, 448.0F));
}

bool same_e4m3(uint8_t a, uint8_t b) { return a == b || ((a & 0x7F) == 0x7F && (b & 0x7F) == 0x7F); }

// Compares what the kernels make of a part of a matrix with the formulas, element by element. amax: of the
// blocks of the whole matrix.
void check(BlockFormat format, Matrix& matrix, const BlockedView& box, float tensor_amax) {
  const int64_t by = box.block[0];
  const int64_t wide = box.block[1];
  const int64_t across = box.num_blocks(1);
  std::vector<float> amax(static_cast<size_t>(box.num_blocks()));
  for (int64_t i = 0; i < matrix.rows; ++i) {
    for (int64_t j = 0; j < matrix.columns; ++j) {
      const int64_t row = i / by - box.first_block(0);
      const int64_t column = j / wide - box.first_block(1);
      if (row < 0 || row >= box.num_blocks(0) || column < 0 || column >= across) continue;
      float& most = amax[static_cast<size_t>(row * across + column)];
      const float x = std::abs(matrix.value(i, j));
      most = std::isnan(most) || std::isnan(x) ? kNan : std::max(most, x);
    }
  }
  const int64_t size = format == BlockFormat::Fp8E4m3 ? 4 : 1;
  std::vector<std::byte> scales(amax.size() * static_cast<size_t>(size));
  block_scales(format, amax.data(), static_cast<int64_t>(amax.size()), tensor_amax, scales.data());
  for (size_t b = 0; b < amax.size(); ++b) {
    uint32_t bits = 0;
    std::memcpy(&bits, scales.data() + b * static_cast<size_t>(size), static_cast<size_t>(size));
    const uint32_t expected = scale_of(format, amax[b], tensor_amax).bits;
    const bool nans = format == BlockFormat::Fp8E4m3 && std::isnan(amax[b]) && (bits & 0x7FFFFFFF) > 0x7F800000;
    if (bits != expected && !nans)
      FAIL("scale " << b << " of amax " << amax[b] << ": " << bits << ", " << expected);
  }
  const int64_t n = box.view.extent[0] * box.view.extent[1];
  const bool packed = format == BlockFormat::NvFp4;
  // Exactly as large as it has to be: what writes beyond it is found with the sanitizers.
  std::vector<uint8_t> values(static_cast<size_t>(packed ? n / 2 : n));
  block_values(format, box, amax.data(), tensor_amax, reinterpret_cast<std::byte*>(values.data()));
  for (int64_t i = 0; i < n; ++i) {
    const int64_t row = box.low[0] + i / box.view.extent[1];
    const int64_t column = box.low[1] + i % box.view.extent[1];
    const int64_t block = (row / by - box.first_block(0)) * across + column / wide - box.first_block(1);
    const float x = matrix.value(row, column);
    const Scale scale = scale_of(format, amax[static_cast<size_t>(block)], tensor_amax);
    const uint8_t expected = code_of(format, x, scale.by);
    const uint8_t code = packed ? static_cast<uint8_t>(values[static_cast<size_t>(i / 2)] >> (i % 2 * 4) & 15)
                                : values[static_cast<size_t>(i)];
    if (!(packed ? code == expected : same_e4m3(code, expected))) {
      FAIL("format " << int(format) << " type " << int(box.type) << " at " << row << ", " << column << ": " << x
                     << " by " << scale.by << " became " << int(code) << ", not " << int(expected));
    }
  }
}

float drawn(std::mt19937& rng) {
  const int kind = static_cast<int>(rng() % 16);
  if (kind == 0) return 0.0F;
  if (kind == 1) return -0.0F;
  const float x = std::normal_distribution<float>()(rng);
  if (kind == 2) return std::ldexp(x, static_cast<int>(rng() % 200) - 100);
  return kind == 3 ? std::round(x * 8) / 8 : x * 0.02F;  // with ties
}

}  // namespace

TEST_CASE("values and scales of blocks have the bits of the formula", "[quantize]") {
  const auto seed = static_cast<uint32_t>(Catch::rngSeed());
  CAPTURE(seed);
  std::mt19937 rng(seed);
  const std::array<std::array<int64_t, 2>, 7> blocks{
      {{128, 128}, {1, 128}, {1, 32}, {1, 16}, {4, 6}, {1, 2}, {3, 1500}}};
  for (int round = 0; round < 150; ++round) {
    const BlockFormat format = kFormats[rng() % 3];
    const auto& block = blocks[rng() % blocks.size()];
    const auto rows = static_cast<int64_t>(rng() % 9 + 1) * (rng() % 4 == 0 ? 31 : 1);
    int64_t columns = static_cast<int64_t>(rng() % 300 + 1) * (rng() % 8 == 0 ? 9 : 1);
    const int64_t even = format == BlockFormat::NvFp4 ? 2 : 1;
    columns = std::max(columns / even * even, even);
    Matrix matrix(kSources[rng() % 3], rows, columns, rng() % 3 == 0);
    float tensor_amax = 0;
    for (int64_t i = 0; i < rows; ++i) {
      for (int64_t j = 0; j < columns; ++j) {
        store(matrix.type, drawn(rng), matrix.at(i, j));
        tensor_amax = std::max(tensor_amax, std::abs(matrix.value(i, j)));
      }
    }
    if (std::isinf(tensor_amax)) continue;  // a float16 may be
    const auto begin = [&](int64_t size, int64_t step) {
      return rng() % 3 == 0 ? 0 : static_cast<int64_t>(rng() % static_cast<uint64_t>(size)) / step * step;
    };
    const int64_t top = begin(rows, 1);
    const int64_t left = begin(columns, even);
    const int64_t bottom = rows - begin(rows - top, 1);
    const int64_t right = columns - begin(columns - left, even);
    check(format, matrix, matrix.part(top, bottom, left, right, block[0], block[1]), tensor_amax);
  }
}

TEST_CASE("parts of a tensor agree on the largest magnitude of the blocks that they share", "[quantize]") {
  std::mt19937 rng(7);
  for (const ElementType type : kSources) {
    Matrix matrix(type, 37, 150);
    for (int64_t i = 0; i < 37; ++i) {
      for (int64_t j = 0; j < 150; ++j) store(type, drawn(rng), matrix.at(i, j));
    }
    const BlockedView whole = matrix.whole(8, 16);
    const std::vector<float> expected = amax_of(whole);
    REQUIRE(expected.size() == 5 * 10);
    std::vector<float> together(expected.size());
    for (const auto& rows : {std::array<int64_t, 2>{0, 3}, {3, 21}, {21, 37}}) {
      for (const auto& columns : {std::array<int64_t, 2>{0, 1}, {1, 77}, {77, 150}}) {
        const BlockedView part = matrix.part(rows[0], rows[1], columns[0], columns[1], 8, 16);
        const std::vector<float> own = amax_of(part);
        for (int64_t i = 0; i < part.num_blocks(0); ++i) {
          for (int64_t j = 0; j < part.num_blocks(1); ++j) {
            float& most =
                together[static_cast<size_t>((part.first_block(0) + i) * 10 + part.first_block(1) + j)];
            most = std::max(most, own[static_cast<size_t>(i * part.num_blocks(1) + j)]);
          }
        }
      }
    }
    CHECK(together == expected);
  }
}

TEST_CASE("zeros, subnormals, infinities and NaNs are quantised as the formula has it", "[quantize]") {
  const std::array<float, 16> special{0.0F,     -0.0F,     0x1p-149F,  -0x1p-130F, 0x1p-126F, 0x1p-120F,
                                      0x1p-24F, 65504.0F,  448.0F,     448.001F,   -464.0F,   1e30F,
                                      0x1p127F, kInfinity, -kInfinity, kNan};
  for (const BlockFormat format : kFormats) {
    for (const ElementType type : kSources) {
      for (size_t a = 0; a < special.size(); ++a) {
        for (size_t b = 0; b < special.size(); ++b) {
          if (format == BlockFormat::NvFp4 && (a >= 13 || b >= 13)) continue;  // 4 bits have no such values
          Matrix matrix(type, 1, 64);
          for (int64_t j = 0; j < 64; ++j) store(type, j % 3 == 0 ? special[b] : special[a], matrix.at(0, j));
          float most = std::max(std::abs(matrix.value(0, 0)), std::abs(matrix.value(0, 1)));
          if (format == BlockFormat::NvFp4 && std::isinf(most)) continue;
          check(format, matrix, matrix.whole(1, 32), most);
        }
      }
    }
  }
  Matrix zeros(ElementType::BFloat16, 1, 32);
  CHECK(amax_of(zeros.whole(1, 16)) == std::vector<float>{0, 0});
  Matrix nan(ElementType::BFloat16, 1, 32);
  store(nan.type, kNan, nan.at(0, 20));
  store(nan.type, kInfinity, nan.at(0, 21));
  const std::vector<float> found = amax_of(nan.whole(1, 16));
  CHECK(found[0] == 0);
  CHECK(std::isnan(found[1]));
}

TEST_CASE("every float32 near a tie of 4 and 8 bits rounds to the even one", "[quantize]") {
  // One block whose largest is such that the scale is 1, so that values are rounded as they are.
  Matrix matrix(ElementType::Float32, 1, 4096);
  for (const BlockFormat format : {BlockFormat::Fp8E4m3, BlockFormat::MxFp8}) {
    for (int first = 0; first < 126; first += 2) {
      const float low = to_float(Float8E4m3<true>{static_cast<uint8_t>(first)});
      const float high = to_float(Float8E4m3<true>{static_cast<uint8_t>(first + 1)});
      const uint32_t tie = std::bit_cast<uint32_t>((low + high) / 2);
      for (int64_t j = 0; j < 4096; ++j) {
        const float x = std::bit_cast<float>(tie + static_cast<uint32_t>(j) - 2048);
        store(matrix.type, j % 2 == 0 ? x : -x, matrix.at(0, j));
      }
      store(matrix.type, 448.0F, matrix.at(0, 4095));
      check(format, matrix, matrix.whole(1, 4096), 0);
    }
  }
}

TEST_CASE("a box without elements has no blocks", "[quantize]") {
  Matrix matrix(ElementType::Float32, 4, 8);
  const BlockedView none = matrix.part(2, 2, 0, 8, 2, 4);
  CHECK(none.num_blocks() == 0);
  block_amax(none, nullptr);
  block_values(BlockFormat::Fp8E4m3, none, nullptr, 0, nullptr);
}
