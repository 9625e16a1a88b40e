// Quantising by blocks as kernels do it, on the host, against the CPU's own code: equal bits.
#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "boxes/block_ops.h"
#include "boxes/host_launch.h"
#include "catch.h"

using namespace meshcast;
using namespace meshcast::cuda;
using namespace meshcast::cuda::testing;

namespace {

constexpr std::array<ElementType, 3> kTypes{ElementType::Float32, ElementType::Float16, ElementType::BFloat16};
constexpr std::array<BlockFormat, 3> kFormats{BlockFormat::Fp8E4m3, BlockFormat::MxFp8, BlockFormat::NvFp4};

// What amax_kernel does, warp after warp.
template <typename T>
std::vector<float> amax_by_lanes(const WatchedMemory& memory, const BlockedView& box, const AmaxShare& share) {
  std::vector<uint32_t> out(static_cast<size_t>(share.blocks), 0);
  for (int64_t block = 0; block < share.blocks; ++block) {
    for (int64_t warp = 0; warp < share.warps_per_block; ++warp) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const uint32_t most = lane_amax<T>(memory, box, block, warp, share.warps_per_block, lane);
        out[static_cast<size_t>(block)] = std::max(out[static_cast<size_t>(block)], most);
      }
    }
  }
  std::vector<float> numbers(out.size());
  std::memcpy(numbers.data(), out.data(), out.size() * sizeof(float));
  return numbers;
}

struct Drawn {
  BlockedView box;
  int64_t elements = 0;
  bool odd = false;  // has NaNs and infinities, in all bits
  Arena memory{0};
};

// A box with any strides that a tensor has: turned, with gaps, of one to four dimensions.
Drawn draw(std::mt19937& random, ElementType type, BlockFormat format) {
  const auto pick = [&](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(random);
  };
  Drawn out;
  const int64_t width = size_of(type);
  const int ndim = static_cast<int>(pick(1, 4));
  out.box.type = type;
  out.box.view.ndim = ndim;
  out.box.view.element_bytes = width;
  out.elements = 1;
  for (int d = 0; d < ndim; ++d) {
    const bool last = d == ndim - 1;
    int64_t size = pick(last ? 1 : 0, last ? 90 : (ndim > 2 ? 4 : 20));
    int64_t block = pick(1, 12);
    if (last) block = std::array<int64_t, 5>{1, 7, 16, 32, 128}[static_cast<size_t>(pick(0, 4))];
    int64_t low = pick(0, 40);
    if (format == BlockFormat::NvFp4 && last) {
      size += size % 2;
      low -= low % 2;
      block += block % 2;
    }
    out.box.view.extent[static_cast<size_t>(d)] = size;
    out.box.block[static_cast<size_t>(d)] = block;
    out.box.low[static_cast<size_t>(d)] = low;
    out.elements *= size;
  }
  std::vector<int> order;
  for (int d = 0; d < ndim; ++d) order.push_back(d);
  if (pick(0, 1) != 0) std::shuffle(order.begin(), order.end(), random);
  int64_t step = width;
  for (auto at = order.rbegin(); at != order.rend(); ++at) {
    out.box.view.stride[static_cast<size_t>(*at)] = step;
    step *= std::max<int64_t>(out.box.view.extent[static_cast<size_t>(*at)], 1) + pick(0, 2);
  }
  out.memory = Arena(static_cast<size_t>(step + width));
  out.box.view.data = out.memory.begin() + width * pick(0, 1);
  out.odd = pick(0, 9) == 0;
  std::normal_distribution<float> normal;
  for (int64_t at = 0; at + width <= step + width; at += width) {
    const float x = pick(0, 9) == 0 ? 0 : std::ldexp(normal(random), static_cast<int>(pick(-30, 15)));
    const auto put = [&](auto value) {
      if (out.odd) {
        const auto bits = static_cast<uint32_t>(random());
        std::memcpy(&value, &bits, sizeof(value));
      } else {
        round_to(x, &value);
      }
      std::memcpy(out.memory.begin() + at, &value, sizeof(value));
    };
    visit_quantized(type, put);
  }
  return out;
}

// Signs of NaNs are not specified: of a product of two, either is right.
uint32_t comparable(std::byte value, bool halves, bool odd) {
  auto code = std::to_integer<uint32_t>(value);
  if (!halves) return (code & 0x7F) == 0x7F ? 0x7F : code;
  if (odd && (code & 7) == 7) code &= ~8U;
  if (odd && (code & 0x70) == 0x70) code &= ~0x80U;
  return code;
}

void check(std::mt19937& random, ElementType type, BlockFormat format) {
  Drawn drawn = draw(random, type, format);
  const BlockedView& box = drawn.box;
  const int64_t divided = format == BlockFormat::NvFp4 ? 2 : 1;
  std::set<std::string> faults;
  std::vector<Arena> arenas;
  arenas.push_back(drawn.memory);
  // The box in the copy of the memory that is watched.
  BlockedView watched = box;
  watched.view.data = arenas[0].begin() + (box.view.data - drawn.memory.begin());
  std::memcpy(arenas[0].begin(), drawn.memory.begin(), drawn.memory.bytes.size() - 256);
  arenas.emplace_back(static_cast<size_t>(drawn.elements / divided));
  const WatchedMemory memory(&arenas, &faults);

  const AmaxShare share = amax_share(watched);
  REQUIRE(share.blocks == (drawn.elements == 0 ? 0 : box.num_blocks()));
  std::vector<float> expected_amax(static_cast<size_t>(share.blocks));
  if (share.blocks > 0) block_amax(box, expected_amax.data());
  std::vector<float> amax;
  visit_quantized(type, [&](auto x) { amax = amax_by_lanes<decltype(x)>(memory, watched, share); });
  REQUIRE(std::memcmp(amax.data(), expected_amax.data(), amax.size() * sizeof(float)) == 0);
  const auto reads = std::accumulate(arenas[0].reads.begin(), arenas[0].reads.end(), int64_t{0});
  REQUIRE(reads == drawn.elements * box.view.element_bytes);  // each element once

  float tensor_amax = 1;
  for (const float each : amax) tensor_amax = std::max(tensor_amax, each);
  std::vector<std::byte> expected(static_cast<size_t>(drawn.elements / divided));
  if (!expected.empty()) block_values(format, box, amax.data(), tensor_amax, expected.data());
  const float scale = nvfp4_tensor_scale(tensor_amax);
  for (int64_t run = 0; run < num_runs(watched); ++run) {
    visit_quantized(type, [&](auto x) {
      using T = decltype(x);
      std::byte* to = arenas[1].begin();
      switch (format) {
        case BlockFormat::Fp8E4m3:
          return make_run<BlockFormat::Fp8E4m3, T>(memory, watched, amax.data(), scale, run, to);
        case BlockFormat::MxFp8:
          return make_run<BlockFormat::MxFp8, T>(memory, watched, amax.data(), scale, run, to);
        case BlockFormat::NvFp4:
          return make_run<BlockFormat::NvFp4, T>(memory, watched, amax.data(), scale, run, to);
      }
    });
  }
  REQUIRE(faults.empty());
  for (size_t at = 0; at < expected.size(); ++at) {
    const bool halves = format == BlockFormat::NvFp4;
    REQUIRE(comparable(arenas[1].begin()[at], halves, drawn.odd) ==
            comparable(expected[at], halves, drawn.odd));
  }
  const size_t first = arenas[1].index(arenas[1].begin());
  for (size_t at = 0; at < arenas[1].writes.size(); ++at)
    REQUIRE(arenas[1].writes[at] == (at >= first && at < first + expected.size() ? 1 : 0));
}

}  // namespace

TEST_CASE("threads that quantise by blocks give the bits of the CPU") {
  std::mt19937 random(7);
  for (int round = 0; round < 150; ++round) {
    for (const ElementType type : kTypes)
      for (const BlockFormat format : kFormats) check(random, type, format);
  }
}

TEST_CASE("few blocks are shared among warps, by rows") {
  BlockedView box;
  box.type = ElementType::Float32;
  box.view = {nullptr, 2, 4, {}, {}};
  box.view.extent = {1000, 256};
  box.low = {0, 0};
  box.block = {1 << 20, 256};
  REQUIRE(amax_share(box).blocks == 1);
  REQUIRE(amax_share(box).warps_per_block == 1000);
  box.block = {1, 256};
  REQUIRE(amax_share(box).blocks == 1000);
  REQUIRE(amax_share(box).warps_per_block == 1);
  box.block = {100, 1};
  REQUIRE(amax_share(box).warps_per_block == kManyWarps / 2560);
}
