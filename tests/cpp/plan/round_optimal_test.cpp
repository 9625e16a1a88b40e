#include "plan/strategies/round_optimal.h"

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "catch.h"

using namespace meshcast;

namespace {

// What is wrong with a broadcast of so many blocks; "" where it is one, in the least number of rounds.
std::string wrong_with(int32_t parties, int32_t blocks) {
  const RoundOptimal broadcast(parties);
  int32_t depth = 0;
  while ((int64_t{1} << depth) < parties) ++depth;
  if (broadcast.depth() != depth) return "depth";
  // received[party]: the round in which it got each block; party 0 has all before the first.
  std::vector<std::vector<int32_t>> received(static_cast<size_t>(parties),
                                             std::vector<int32_t>(static_cast<size_t>(blocks), INT32_MAX));
  std::fill(received[0].begin(), received[0].end(), -1);
  std::set<std::pair<int32_t, int32_t>> sends, takes;  // (round, party)
  int32_t last = 0;
  for (const RoundOptimal::Send& send : broadcast.sends(blocks)) {
    if (send.round < last) return "order";
    last = send.round;
    if (!sends.emplace(send.round, send.from).second) return "a party sends two blocks in a round";
    if (!takes.emplace(send.round, send.to).second) return "a party takes in two blocks in a round";
    if (received[static_cast<size_t>(send.from)][static_cast<size_t>(send.block)] >= send.round)
      return "a party sends what it does not have";
    int32_t& got = received[static_cast<size_t>(send.to)][static_cast<size_t>(send.block)];
    if (got != INT32_MAX) return "a party gets a block twice";
    got = send.round;
  }
  for (const auto& rounds : received)
    if (std::count(rounds.begin(), rounds.end(), INT32_MAX) > 0) return "a party lacks a block";
  return last == blocks - 1 + depth - 1 ? "" : "rounds";
}

}  // namespace

TEST_CASE("every party gets every block in the least number of rounds", "[plan][rounds]") {
  for (int32_t parties = 2; parties <= 140; ++parties) {
    for (const int32_t blocks : {1, 2, 3, 4, 5, 7, 8, 16, 31}) {
      INFO(parties << " parties, " << blocks << " blocks");
      REQUIRE(wrong_with(parties, blocks) == "");
    }
  }
  for (const int32_t parties : {511, 512, 513, 1023, 2048, 2049, 4095, 16377}) {
    INFO(parties << " parties");
    CHECK(wrong_with(parties, 25) == "");
  }
}
