#include "memory/strided.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include "catch.h"

using meshcast::StridedView;

namespace {

// Element addresses in row-major order, the slow and obvious way.
std::vector<std::byte*> addresses(const StridedView& view) {
  std::vector<std::byte*> out{view.data};
  for (int d = 0; d < view.ndim; ++d) {
    std::vector<std::byte*> next;
    for (std::byte* base : out) {
      for (int64_t i = 0; i < view.extent[d]; ++i) next.push_back(base + i * view.stride[d]);
    }
    out = std::move(next);
  }
  return out;
}

// A box inside a dense tensor of random shape whose dimensions lie in memory in random order.
struct RandomBox {
  std::vector<std::byte> memory;
  StridedView view;
};

RandomBox random_box(std::mt19937& rng, const std::vector<int64_t>& extent, int64_t element_bytes) {
  RandomBox out;
  const int ndim = static_cast<int>(extent.size());
  std::vector<int> order(extent.size());
  std::iota(order.begin(), order.end(), 0);
  std::shuffle(order.begin(), order.end(), rng);
  out.view.ndim = ndim;
  out.view.element_bytes = element_bytes;
  int64_t stride = element_bytes;
  int64_t offset = 0;
  for (const int d : order) {
    const int64_t margin = static_cast<int64_t>(rng() % 3);
    out.view.extent[d] = extent[d];
    out.view.stride[d] = stride;
    offset += static_cast<int64_t>(rng() % (margin + 1)) * stride;
    stride *= extent[d] + margin;
  }
  out.memory.resize(static_cast<size_t>(std::max<int64_t>(stride, element_bytes)));
  out.view.data = out.memory.data() + offset;
  return out;
}

}  // namespace

TEST_CASE("pack, unpack and copy move exactly the elements of the box", "[exec][strided]") {
  const uint32_t seed = 20260;
  INFO("seed " << seed);
  std::mt19937 rng(seed);
  for (int round = 0; round < 500; ++round) {
    const int ndim = static_cast<int>(rng() % 5);
    const int64_t element_bytes = std::vector<int64_t>{1, 2, 3, 4, 8, 16}[rng() % 6];
    std::vector<int64_t> extent;
    for (int d = 0; d < ndim; ++d) extent.push_back(static_cast<int64_t>(rng() % 5));
    RandomBox from = random_box(rng, extent, element_bytes);
    RandomBox to = random_box(rng, extent, element_bytes);
    for (auto& b : from.memory) b = static_cast<std::byte>(rng());
    std::fill(to.memory.begin(), to.memory.end(), std::byte{0x5A});

    std::vector<std::byte> expected;
    if (from.view.nbytes() > 0) {
      for (std::byte* p : addresses(from.view)) expected.insert(expected.end(), p, p + element_bytes);
    }
    std::vector<std::byte> packed(expected.size());
    pack(from.view, packed.data());
    REQUIRE(packed == expected);

    // Cut anywhere, inside elements too, the pieces make up the whole.
    std::vector<int64_t> cuts{0, static_cast<int64_t>(expected.size())};
    for (int i = 0; i < 3; ++i) cuts.push_back(static_cast<int64_t>(rng() % (expected.size() + 1)));
    std::sort(cuts.begin(), cuts.end());
    std::vector<std::byte> pieces(expected.size());
    for (size_t i = 1; i < cuts.size(); ++i) {
      pack_range(from.view, cuts[i - 1], cuts[i] - cuts[i - 1], pieces.data() + cuts[i - 1]);
    }
    REQUIRE(pieces == expected);

    // Everything outside the box must stay as it was.
    std::vector<std::byte> image = to.memory;
    if (!expected.empty()) {
      size_t at = 0;
      for (std::byte* p : addresses(to.view)) {
        std::memcpy(image.data() + (p - to.memory.data()), expected.data() + at,
                    static_cast<size_t>(element_bytes));
        at += static_cast<size_t>(element_bytes);
      }
    }
    std::vector<std::byte> untouched = to.memory;
    unpack(packed.data(), to.view);
    REQUIRE(to.memory == image);

    to.memory.swap(untouched);
    to.view.data = to.memory.data() + (to.view.data - untouched.data());
    const std::vector<std::byte> blank = to.memory;
    copy(from.view, to.view);
    REQUIRE(to.memory == image);

    std::copy(blank.begin(), blank.end(), to.memory.begin());
    for (size_t i = 1; i < cuts.size(); ++i) {
      unpack_range(expected.data() + cuts[i - 1], to.view, cuts[i - 1], cuts[i] - cuts[i - 1]);
    }
    REQUIRE(to.memory == image);
  }
}

TEST_CASE("bytes arrive whole, however the two ends lie", "[exec][strided]") {
  std::mt19937 rng(20261);
  std::vector<std::byte> from(10000);
  for (auto& b : from) b = static_cast<std::byte>(rng());
  for (int round = 0; round < 2000; ++round) {
    const size_t nbytes = rng() % (round % 4 == 0 ? 9500 : 600);
    const size_t at = rng() % 130;
    const size_t source = rng() % 130;
    std::vector<std::byte> to(10000, std::byte{0x5A});
    std::vector<std::byte> expected = to;
    std::memcpy(expected.data() + at, from.data() + source, nbytes);
    const auto write = round % 2 == 0 ? meshcast::Write::Streamed : meshcast::Write::Cached;
    meshcast::copy_bytes(to.data() + at, from.data() + source, nbytes, from.data(), write);
    meshcast::end_stream();
    INFO(nbytes << " bytes from " << source << " to " << at);
    REQUIRE(to == expected);
  }
}

TEST_CASE("boxes are streamed as they are copied", "[exec][strided]") {
  std::mt19937 rng(20262);
  for (int round = 0; round < 100; ++round) {
    // Some have more runs than are held back until the next is known.
    const std::vector<int64_t> extent{1 + static_cast<int64_t>(rng() % 90),
                                      1 + static_cast<int64_t>(rng() % (round % 4 == 0 ? 3000 : 300))};
    RandomBox from = random_box(rng, extent, 8);
    RandomBox to = random_box(rng, extent, 8);
    for (auto& b : from.memory) b = static_cast<std::byte>(rng());
    std::vector<std::byte> packed(static_cast<size_t>(from.view.nbytes()));
    pack(from.view, packed.data());
    const std::vector<std::byte> blank = to.memory;
    copy(from.view, to.view);
    const std::vector<std::byte> expected = to.memory;

    std::copy(blank.begin(), blank.end(), to.memory.begin());
    copy(from.view, to.view, meshcast::Write::Streamed);
    REQUIRE(to.memory == expected);

    std::copy(blank.begin(), blank.end(), to.memory.begin());
    unpack(packed.data(), to.view, meshcast::Write::Streamed);
    REQUIRE(to.memory == expected);

    std::copy(blank.begin(), blank.end(), to.memory.begin());
    const int64_t cut = static_cast<int64_t>(rng() % (packed.size() + 1));
    unpack_range(packed.data(), to.view, 0, cut, meshcast::Write::Streamed);
    unpack_range(packed.data() + cut, to.view, cut, from.view.nbytes() - cut, meshcast::Write::Streamed);
    REQUIRE(to.memory == expected);
  }
}

TEST_CASE("a view is contiguous only without gaps and in row-major order", "[exec][strided]") {
  std::byte memory[64];
  CHECK(StridedView{memory, 2, 4, {3, 4}, {16, 4}}.contiguous());
  CHECK_FALSE(StridedView{memory, 2, 4, {3, 4}, {20, 4}}.contiguous());  // a gap after each row
  CHECK_FALSE(StridedView{memory, 2, 4, {3, 4}, {4, 12}}.contiguous());  // column-major
  CHECK(StridedView{memory, 2, 4, {1, 4}, {999, 4}}.contiguous());  // the stride of a single row is never used
  CHECK(StridedView{memory, 0, 4, {}, {}}.contiguous());
  CHECK(StridedView{memory, 2, 4, {0, 4}, {1, 1}}.contiguous());
}
