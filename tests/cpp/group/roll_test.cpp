// Which ranks have come, as bits in a store.
#include "group/roll.h"

#include <algorithm>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "catch.h"
#include "support/memory_store.h"

namespace meshcast {
namespace {

// What a rank that has signed nothing sees.
Roll seen(const std::shared_ptr<BoardStore>& store, size_t ranks) {
  Roll out(store, "roll", ranks);
  out.refresh();
  return out;
}

TEST_CASE("a roll knows who has not come, and the last one learns that it is") {
  for (const size_t ranks : {1, 2, 63, 64, 65, 128, 200}) {
    CAPTURE(ranks);
    const auto memory = std::make_shared<MemoryStore>();
    const auto store = std::make_shared<BoardStore>(memory);
    std::vector<size_t> order(ranks);
    std::iota(order.begin(), order.end(), 0);
    std::shuffle(order.begin(), order.end(), std::mt19937(static_cast<uint32_t>(ranks)));
    std::vector<Roll> rolls(ranks, Roll(store, "roll", ranks));
    for (size_t i = 0; i < ranks; ++i) {
      CHECK(!seen(store, ranks).all_answered());
      std::vector<size_t> missing(order.begin() + static_cast<std::ptrdiff_t>(i), order.end());
      std::sort(missing.begin(), missing.end());
      CHECK(seen(store, ranks).missing() == missing);
      CHECK(rolls[order[i]].answer(order[i]) == (i + 1 == ranks));
    }
    for (Roll& each : rolls) CHECK(each.all_answered());
    CHECK(seen(store, ranks).missing().empty());
    rolls.front().erase();
    CHECK(memory->size() == 0);
  }
}

TEST_CASE("who leaves a roll is missing again, and the last one takes its key along") {
  const size_t ranks = 130;
  const auto memory = std::make_shared<MemoryStore>();
  const auto store = std::make_shared<BoardStore>(memory);
  Roll roll(store, "roll", ranks);
  for (const size_t at : {63, 5, 64, 127}) roll.sign(at);
  roll.unsign(63);
  Roll now = seen(store, ranks);
  CHECK(!now.has(63));
  CHECK(now.has(5));
  CHECK(now.has(127));
  roll.unsign(127);
  roll.unsign(5);
  roll.unsign(64);
  now.erase();
  CHECK(memory->size() == 0);
  roll.sign(63);
  roll.unsign(63);
  CHECK(memory->size() == 0);
}

}  // namespace
}  // namespace meshcast
