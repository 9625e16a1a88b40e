#include "memory/changes.h"

#include <algorithm>
#include <cstring>
#include <random>
#include <vector>

#include "catch.h"
#include "common/error.h"

using namespace meshcast;

namespace {

// A box in memory of its own: row-major, in rows that are longer than the box, or with its dimensions turned.
struct PlacedBox {
  std::vector<std::byte> memory;
  StridedView view;

  PlacedBox(const std::vector<int64_t>& extent, int64_t element, int kind) {
    view.ndim = static_cast<int>(extent.size());
    view.element_bytes = element;
    int64_t step = element;
    for (int i = 0; i < view.ndim; ++i) {
      const int d = kind == 2 ? i : view.ndim - 1 - i;
      view.extent[d] = extent[d];
      view.stride[d] = step;
      step *= extent[d] + (kind == 1 ? 3 : 0);
    }
    memory.resize(static_cast<size_t>(step));
    view.data = memory.data();
  }
  PlacedBox(const PlacedBox&) = delete;

  std::vector<std::byte> packed() const {
    std::vector<std::byte> out(static_cast<size_t>(view.nbytes()));
    pack(view, out.data());
    return out;
  }
  void become(const std::vector<std::byte>& bytes) { unpack(bytes.data(), view); }
};

std::vector<std::byte> drawn(size_t n, std::mt19937& random) {
  std::vector<std::byte> out(n);
  for (std::byte& each : out) each = static_cast<std::byte>(random());
  return out;
}

}  // namespace

TEST_CASE("changes make the next version of any boxes", "[changes]") {
  std::mt19937 random(GENERATE(range(0U, 60U)));
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % static_cast<uint64_t>(n)); };
  std::vector<std::unique_ptr<PlacedBox>> from;
  std::vector<std::unique_ptr<PlacedBox>> to;
  std::vector<StridedView> boxes;
  std::vector<std::vector<StridedView>> places;
  std::vector<std::byte> earlier;
  const int64_t count = 1 + below(4);
  const int kind = static_cast<int>(below(3));
  for (int64_t i = 0; i < count; ++i) {
    const int64_t element = int64_t{1} << below(4);
    std::vector<int64_t> extent;
    for (int64_t d = below(4); d > 0; --d) extent.push_back(1 + below(d == 1 ? 200 : 12));
    from.push_back(std::make_unique<PlacedBox>(extent, element, (kind + static_cast<int>(i)) % 3));
    boxes.push_back(from.back()->view);
    const std::vector<std::byte> before = drawn(static_cast<size_t>(boxes.back().nbytes()), random);
    earlier.insert(earlier.end(), before.begin(), before.end());
    std::vector<std::byte> now = before;
    const int64_t part = std::vector<int64_t>{0, 1, 2, 10, 300, 1000}[static_cast<size_t>(below(6))];
    for (size_t e = 0; e < now.size(); e += static_cast<size_t>(element)) {
      if (below(1000) < part) now[e + static_cast<size_t>(below(element))] ^= std::byte{0x10};
    }
    from.back()->become(now);
    places.emplace_back();
    for (int64_t copies = 1 + below(2); copies > 0; --copies) {
      to.push_back(std::make_unique<PlacedBox>(extent, element, static_cast<int>(below(3))));
      to.back()->become(before);
      places.back().push_back(to.back()->view);
    }
  }
  const auto full = static_cast<int64_t>(earlier.size()) + kStreamHead * count;
  std::vector<std::byte> stream(static_cast<size_t>(full) + 16, std::byte{0x5A});
  const int64_t size = encode_changes(boxes, earlier.data(), stream.data());
  REQUIRE(size <= full);
  CHECK(std::all_of(stream.begin() + full, stream.end(), [](std::byte b) { return b == std::byte{0x5A}; }));
  std::fill(stream.begin() + size, stream.end(), std::byte{0});
  std::vector<std::byte> all;
  for (const auto& each : from) {
    const auto bytes = each->packed();
    all.insert(all.end(), bytes.begin(), bytes.end());
  }
  CHECK(earlier == all);
  const auto check = [&] {
    size_t next = 0;
    for (size_t i = 0; i < places.size(); ++i) {
      for (size_t copy = 0; copy < places[i].size(); ++copy) CHECK(to[next++]->packed() == from[i]->packed());
    }
  };
  if (size == 0) return check();

  // What is cut, or has another length than it says, changes nothing.
  std::vector<std::vector<std::byte>> before;
  for (const auto& each : to) before.push_back(each->memory);
  const auto refused = [&](const std::vector<std::byte>& bytes, int64_t nbytes) {
    CHECK_THROWS_AS(apply_changes(bytes.data(), nbytes, places), Error);
    for (size_t i = 0; i < to.size(); ++i) REQUIRE(to[i]->memory == before[i]);
  };
  for (int64_t cut : {int64_t{0}, kStreamHead - 1, size / 2, size - 1}) {
    if (cut < size) refused(stream, cut);
  }
  for (int64_t head = 0, i = 0; i < count; ++i) {
    uint64_t length;
    std::memcpy(&length, stream.data() + head, sizeof(length));
    for (const uint64_t wrong : {length + 2, length ^ 1, ~uint64_t{0}, length + (uint64_t{1} << 62)}) {
      if (wrong == 1 || length == 0) continue;
      std::vector<std::byte> bytes = stream;
      std::memcpy(bytes.data() + head, &wrong, sizeof(wrong));
      refused(bytes, size);
    }
    head += kStreamHead + static_cast<int64_t>(length >> 1);
  }
  refused(stream, size + 8);

  apply_changes(stream.data(), size, places);
  check();
}

TEST_CASE("damaged changes are refused or stay inside of their boxes", "[changes]") {
  std::mt19937 random(GENERATE(range(0U, 40U)));
  PlacedBox from({37, 53}, 2, 1);
  PlacedBox to({37, 53}, 2, 1);
  std::vector<std::byte> earlier = from.packed();
  std::vector<std::byte> now = earlier;
  for (int i = 0; i < 50; ++i) now[random() % now.size()] ^= std::byte{1};
  from.become(now);
  std::vector<std::byte> stream(now.size() + kStreamHead);
  const int64_t size = encode_changes({from.view}, earlier.data(), stream.data());
  REQUIRE(size > 0);
  REQUIRE(size < static_cast<int64_t>(now.size()) / 8);
  for (int i = 0; i < 200; ++i) {
    std::vector<std::byte> bytes(stream.begin(), stream.begin() + size);
    for (int flips = 0; flips < 3; ++flips)
      bytes[random() % bytes.size()] ^= static_cast<std::byte>(1U << random() % 8);
    const std::vector<std::byte> before = to.memory;
    try {
      apply_changes(bytes.data(), size, {{to.view}});
    } catch (const Error&) {
      REQUIRE(to.memory == before);
    }
  }
}

TEST_CASE("a record has no elements beyond its box, and no bits or bytes that mean nothing", "[changes]") {
  // 70 elements of 2 bytes: a second group of 6, in memory that continues behind the box.
  std::vector<uint16_t> memory(128, 7);
  StridedView box{reinterpret_cast<std::byte*>(memory.data()), 1, 2, {}, {}};
  box.extent[0] = 70;
  box.stride[0] = 2;
  const auto applied = [&](const std::vector<uint8_t>& record) {
    std::vector<std::byte> stream(kStreamHead + record.size());
    const uint64_t head = record.size() << 1;
    std::memcpy(stream.data(), &head, sizeof(head));
    std::memcpy(stream.data() + kStreamHead, record.data(), record.size());
    try {
      apply_changes(stream.data(), static_cast<int64_t>(stream.size()), {{box}});
    } catch (const Error&) {
      CHECK(memory == std::vector<uint16_t>(128, 7));
      return false;
    }
    return true;
  };
  CHECK_FALSE(applied({2, 1, 0x40, 9, 9}));  // element 70
  CHECK_FALSE(applied({2, 2, 1, 9, 9}));     // element 72
  CHECK_FALSE(applied({4, 1, 1, 9, 9}));     // a third group
  CHECK_FALSE(applied({2, 1, 0, 9, 9}));     // a byte without a bit
  CHECK_FALSE(applied({2, 1, 0}));           // the same, and no value
  CHECK_FALSE(applied({2, 0}));              // a group without a byte
  CHECK_FALSE(applied({2, 1, 1, 9, 9, 0}));  // a byte more
  CHECK_FALSE(applied({2, 1, 1, 9, 9, 0, 0, 0, 0, 0, 0, 0, 0, 0}));
  CHECK_FALSE(applied({2, 1, 1, 9}));    // a byte less
  CHECK_FALSE(applied({0}));             // no group
  REQUIRE(applied({2, 1, 0x20, 9, 9}));  // element 69
  std::vector<uint16_t> expected(128, 7);
  expected[69] = 0x0909;
  CHECK(memory == expected);
}

TEST_CASE("boxes of which a record would be as long travel as they are", "[changes]") {
  std::vector<uint8_t> before{1, 2, 3, 4, 5};
  std::vector<uint8_t> now{1, 9, 3, 4, 5};
  std::vector<std::byte> stream(5 + kStreamHead);
  for (const int64_t n : {4, 5}) {
    StridedView box{reinterpret_cast<std::byte*>(now.data()), 1, 1, {}, {}};
    box.extent[0] = n;
    box.stride[0] = 1;
    std::vector<uint8_t> earlier = before;
    CHECK(encode_changes({box}, reinterpret_cast<std::byte*>(earlier.data()), stream.data()) ==
          kStreamHead + 4);
    CHECK(earlier == now);
    CHECK(std::to_integer<int>(stream[0]) == (n == 4 ? 4 * 2 + 1 : 4 * 2));
  }
}

TEST_CASE("changes count by bits", "[changes]") {
  // A zero whose sign changes, a NaN whose payload does, and what is equal as a NaN and is not sent.
  std::vector<uint16_t> before(1000, 0x3F80);
  std::vector<uint16_t> now = before;
  before[3] = 0x0000;
  now[3] = 0x8000;
  before[500] = 0x7FC0;
  now[500] = 0x7FC1;
  before[999] = now[999] = 0x7FC5;
  StridedView box{reinterpret_cast<std::byte*>(now.data()), 1, 2, {}, {}};
  box.extent[0] = 1000;
  box.stride[0] = 2;
  std::vector<std::byte> stream(2000 + kStreamHead);
  const int64_t size = encode_changes({box}, reinterpret_cast<std::byte*>(before.data()), stream.data());
  CHECK(size == kStreamHead + 2 + 2 * (1 + 1 + 2));  // the map of 16 groups, and both values
  CHECK(before == now);
}
