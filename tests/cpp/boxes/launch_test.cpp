// The index arithmetic of the kernels: every thread of a launch run on the host, against the CPU's copy.
#include <algorithm>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "boxes/batches.h"
#include "catch.h"

using namespace meshcast;
using namespace meshcast::cuda;
using namespace meshcast::cuda::testing;

TEST_CASE("division by multiplication is exact", "[cuda]") {
  const uint32_t seed = 7;
  INFO("seed " << seed);
  std::mt19937 rng(seed);
  const uint32_t most = (1U << 31) - 1;
  for (int round = 0; round < 3000; ++round) {
    uint32_t by = 1 + rng() % (round % 2 == 0 ? most : 1000);
    if (round < 32) by = 1U << round;
    if (round >= 32 && round < 62) by = (1U << (round - 30)) - 1;
    const FastDivide divide(by);
    std::vector<uint32_t> numbers{0, 1, by - 1, most, most - 1};
    for (int i = 0; i < 50; ++i) {
      const uint64_t multiple = (rng() % (most / by + 1)) * uint64_t{by};
      for (const int64_t step : {-1, 0, 1})
        numbers.push_back(static_cast<uint32_t>(std::clamp<int64_t>(multiple + step, 0, most)));
    }
    for (const uint32_t n : numbers) {
      if (divide.quotient(n) != n / by) FAIL(n << " / " << by << " gave " << divide.quotient(n));
    }
  }
}

TEST_CASE("threads copy each byte of each box once and no other", "[cuda]") {
  const auto seed = static_cast<uint32_t>(GENERATE(range(1, 251)));
  CAPTURE(seed);
  std::mt19937 rng(seed);
  const int64_t element_bytes = std::vector<int64_t>{1, 2, 3, 4, 5, 8, 12, 16}[rng() % 8];
  const size_t boxes = seed % 50 == 0 ? 260 : 1 + rng() % 12;  // more than the largest table holds
  Batch batch = random_batch(rng, boxes, element_bytes, element_bytes, rng() % 2 == 0);
  const std::vector<std::byte> before = batch.destination().bytes;

  REQUIRE(run_batch(rng, &batch, CopyOp{}) == std::set<std::string>{});
  CHECK(batch.destination().writes == owned_bytes(batch.destination(), batch.pairs, false));
  CHECK(batch.source().reads == owned_bytes(batch.source(), batch.pairs, true));

  const std::vector<std::byte> after = batch.destination().bytes;
  batch.destination().bytes.assign(before.begin(), before.end());
  for (const BoxPair& pair : batch.pairs) copy(pair.from, pair.to);
  CHECK(after == batch.destination().bytes);
}

TEST_CASE("wide accesses are used where memory allows them", "[cuda]") {
  std::vector<std::byte> memory(4096);
  std::byte* const base = memory.data() + (64 - reinterpret_cast<uintptr_t>(memory.data()) % 64);
  const auto widths = [&](const StridedView& from, const StridedView& to) {
    const BoxCopy box = box_copy(nest_of({from, to}, Units{}), Units{});
    return std::vector<int>{box.from_width, box.to_width, box.tail_width};
  };
  const StridedView rows{base, 2, 4, {8, 16}, {128, 4}};  // half of each row
  CHECK(widths(rows, packed_like(rows, base + 2048)) == std::vector<int>{16, 16, 16});
  CHECK(widths(rows, packed_like(rows, base + 2056)) == std::vector<int>{16, 8, 8});
  StridedView odd = rows;
  odd.extent[1] = 15;
  CHECK(widths(odd, packed_like(odd, base + 2048)) == std::vector<int>{16, 4, 4});
  const StridedView column{base, 2, 2, {8, 16}, {2, 64}};  // elements that lie alone
  CHECK(widths(column, packed_like(column, base + 2048))[2] == 2);
}

TEST_CASE("dimensions are merged, and what is left decides the route", "[cuda]") {
  std::byte* const from = nullptr;
  std::byte* const to = from + (1 << 20);
  const auto nest = [&](const StridedView& view) { return nest_of({view, packed_like(view, to)}, Units{}); };
  const CopyNest dense = nest({from, 3, 4, {4, 8, 16}, {512, 64, 4}});
  CHECK((dense.ndim == 0 && dense.run == 2048));
  CHECK(route_of(dense) == Route::Flat);
  CHECK(route_of(nest({from, 3, 4, {4, 0, 16}, {512, 64, 4}})) == Route::Nothing);

  const CopyNest wide = nest({from, 3, 4, {4, 8, 512}, {32768, 4096, 4}});
  CHECK((wide.ndim == 1 && wide.extent[0] == 32 && wide.run == 2048));
  CHECK(route_of(wide) == Route::Kernel);  // rows of 2 KiB
  CHECK(route_of(nest({from, 2, 4, {4, 1024}, {8192, 4}})) == Route::Pitched);
  CHECK(route_of(nest({from, 2, 4, {4, 1024}, {int64_t{1} << 31, 4}})) == Route::Kernel);
  CHECK(route_of(nest({from, 2, 4, {4, 1024}, {0, 4}})) == Route::Kernel);  // a row repeated
  // A GPU whose copy engine takes less.
  const CopyNest rows = nest({from, 2, 4, {4, 1024}, {8192, 4}});
  CHECK(route_of(rows, 8192) == Route::Pitched);
  CHECK(route_of(rows, 8191) == Route::Kernel);
  CHECK(route_of(dense, 1) == Route::Flat);

  // Loops follow the destination's memory, whatever the order of the dimensions.
  const StridedView view{from, 2, 4, {8, 16}, {4, 64}};
  const CopyNest turned = nest_of({packed_like(view, to), view}, Units{});
  CHECK((turned.ndim == 2 && turned.extent[1] == 8 && turned.to_stride[1] == 4 && turned.from_stride[1] == 64));
}

TEST_CASE("a box of more pieces than a kernel can number is divided", "[cuda]") {
  // 9 TB that exist only as numbers.
  std::byte* const from = nullptr;
  const StridedView huge{from, 2, 2, {3, int64_t{1} << 40}, {int64_t{1} << 42, 2}};
  const StridedView flat = packed_like(huge, from + (int64_t{1} << 50));
  int64_t bytes = 0;
  int64_t entries = 0;
  const Units units;
  visit_copies(nest_of({huge, flat}, units), units, kMostPieces, [&](const BoxCopy& box) {
    ++entries;
    CHECK(box.pieces <= kMostPieces);
    const Place last = locate<1, 1, 16>(box, box.pieces - 1);
    const int64_t row = ((last.from - from) >> 42) << 42;
    CHECK(last.to - flat.data == (row >> 42 << 41) + (last.from - from - row));
    bytes += (int64_t{box.pieces} - 1) * 16 + last.count;
  });
  CHECK(entries == 3 * 128);
  CHECK(bytes == huge.nbytes());
}
