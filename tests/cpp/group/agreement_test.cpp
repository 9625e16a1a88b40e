// How ranks that agree on a call look after those that have not come to it.
#include "group/agreement.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <vector>

#include "catch.h"
#include "common/error.h"
#include "group/bulletin.h"
#include "support/memory_store.h"

namespace meshcast {
namespace {

using std::chrono::milliseconds;

struct Look {
  int peer = -1;
  TimePoint when;
};

// What the first of so many ranks looks at while it waits alone for `limit`. dead: this one is.
std::vector<Look> looks_of(int32_t ranks, milliseconds limit, int dead = -1) {
  GroupIdentity group{{}, 0, "group"};
  for (int32_t rank = 0; rank < ranks; ++rank) group.ranks.push_back(rank);
  Bulletin board(std::make_shared<MemoryStore>());
  std::vector<Look> looks;
  const auto lost = [&](int peer) {
    looks.push_back({peer, Clock::now()});
    return peer == dead ? std::string("killed") : std::string();
  };
  const TimePoint deadline = Clock::now() + limit;
  const auto call = [&] {
    return agree(
        board, group, {}, "call", 0, deadline, 1, [] {}, lost);
  };
  std::string raised;
  try {
    call();
  } catch (const Error& error) {
    raised = error.what();
  }
  const std::string wanted = dead < 0 ? "did not make this call" : "lost rank " + std::to_string(dead);
  INFO(raised);
  CHECK(raised.find(wanted) != std::string::npos);
  return looks;
}

TEST_CASE("a rank that waits for many looks at one of them first, then at twice as many each time") {
  const TimePoint begin = Clock::now();
  const auto looks = looks_of(64, milliseconds(1500));
  REQUIRE(!looks.empty());
  CHECK(looks.front().when - begin > milliseconds(200));  // of so many ranks; a look connects
  size_t at = 0;
  for (int reach = 1; at < looks.size(); reach = std::min(2 * reach, 63)) {
    for (int peer = 1; peer <= reach && at < looks.size(); ++peer) CHECK(looks[at++].peer == peer);
  }
  CHECK(looks.back().peer == 63);
}

TEST_CASE("a rank that waits for long looks at all of them, and sees that the last is dead") {
  CHECK(looks_of(4, milliseconds(60'000), 3).back().peer == 3);
  const auto looks = looks_of(2, milliseconds(2500));  // over 64 looks
  CHECK(looks.size() > 64);
  for (const Look& look : looks) CHECK(look.peer == 1);
}

}  // namespace
}  // namespace meshcast
