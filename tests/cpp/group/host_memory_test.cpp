// Ranks of one host come to use shared memory together, or none of them does.
#include "group/host_memory.h"

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "catch.h"
#include "support/memory_store.h"

namespace meshcast {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using Offers = std::map<int32_t, std::string>;

const std::vector<int32_t> kGroup{2, 4, 7};  // of which 4 and 7 are on one host
const HostMemory::FindLost kNone = [] { return std::nullopt; };

struct Rank {
  Rank(const std::shared_ptr<Store>& store, int32_t rank, const std::string& off = {})
      : conversation(store, rank, 3), memory(3, off) {}
  // Meets and settles with the ranks of these offers; the error that it raises.
  std::optional<Error> settle(const Offers& offers, const HostMemory::FindLost& lost = kNone,
                              milliseconds limit = seconds(20)) {
    try {
      memory.meet(conversation, kGroup, offers, Clock::now() + limit, lost);
      memory.settle(conversation, Clock::now() + limit, lost);
      return std::nullopt;
    } catch (const Error& error) {
      return error;
    }
  }

  Conversation conversation;
  HostMemory memory;
};

bool says(const std::string& text, const std::string& part) { return text.find(part) != std::string::npos; }

TEST_CASE("ranks of one host that have connected use its memory") {
  const auto store = std::make_shared<MemoryStore>();
  Rank fourth(store, 4);
  Rank seventh(store, 7);
  const Offers offers{{4, fourth.memory.offer()}, {7, seventh.memory.offer()}};
  std::optional<Error> its;
  std::thread other([&] { its = seventh.settle(offers); });
  CHECK(!fourth.settle(offers));
  other.join();
  CHECK(!its);
  for (Rank* each : {&fourth, &seventh}) {
    CHECK(each->memory.obstacle().empty());
    const LocalRanks local = each->memory.take();
    CHECK(local.transport);
    CHECK(local.ranks == std::vector<int32_t>{4, 7});
  }
}

TEST_CASE("memory that one rank has turned off, or cannot have, is used by none") {
  const auto store = std::make_shared<MemoryStore>();
  Rank fourth(store, 4);
  CHECK(!fourth.settle({{4, fourth.memory.offer()}}));  // alone
  CHECK(fourth.memory.obstacle().empty());
  CHECK(!fourth.memory.take().transport);

  Rank off(store, 4, "it is turned off");
  CHECK(off.memory.offer() == "off it is turned off");
  CHECK(!off.settle({{4, off.memory.offer()}, {7, "off as well"}}));
  CHECK(off.memory.obstacle().empty());
  Rank other(store, 4);
  CHECK(!other.settle({{4, other.memory.offer()}, {7, "off for good"}}));
  CHECK(other.memory.obstacle() == "rank 7: for good");

  Rank willing(store, 4);
  CHECK(!willing.settle({{4, willing.memory.offer()}, {7, "no more files"}}));
  CHECK(willing.memory.obstacle() == "rank 7: more files");
  CHECK(!willing.memory.take().transport);
}

TEST_CASE("a rank that could not connect takes the others along") {
  const auto store = std::make_shared<MemoryStore>();
  Rank fourth(store, 4);
  Rank seventh(store, 7);
  const Offers offers{{4, fourth.memory.offer()}, {7, seventh.memory.offer()}};
  std::optional<Error> its;
  std::thread other([&] { its = seventh.settle(offers); });
  Conversation(store, 4, 3).say("shm", "rank 4: no luck");
  fourth.memory.meet(fourth.conversation, kGroup, offers, Clock::now() + seconds(20), kNone);
  other.join();
  CHECK(!its);
  CHECK(seventh.memory.obstacle() == "rank 4: no luck");
  CHECK(!seventh.memory.take().transport);
}

TEST_CASE("a rank that meets nobody within the limit tells why") {
  const auto store = std::make_shared<MemoryStore>();
  Rank fourth(store, 4);
  const Offers offers{{4, fourth.memory.offer()}, {7, HostMemory(3, "").offer()}};
  Conversation(store, 7, 3).say("shm", "");
  CHECK(!fourth.settle(offers, kNone, milliseconds(50)));
  CHECK(says(fourth.memory.obstacle(), "rank 4: "));
  CHECK(!fourth.memory.take().transport);
}

TEST_CASE("a rank that says nothing is named") {
  const auto store = std::make_shared<MemoryStore>();
  Rank fourth(store, 4);
  const Offers offers{{4, fourth.memory.offer()}, {7, HostMemory(3, "").offer()}};
  const auto error = fourth.settle(offers, kNone, milliseconds(50));
  REQUIRE(error);
  CHECK(error->kind() == ErrorKind::DeadlineExceeded);
  CHECK(error->context().peer == 7);
  CHECK(says(error->what(),
             "connecting the private group of ranks [2, 4, 7] did not finish in time: ranks [7] "));
}

TEST_CASE("a rank that is lost while others meet is named, and what one raises that looks for it passes") {
  const auto store = std::make_shared<MemoryStore>();
  Rank fourth(store, 4);
  const Offers offers{{4, fourth.memory.offer()}, {7, HostMemory(3, "").offer()}};
  const auto error = fourth.settle(offers, [] { return std::optional(LostRank{2, "killed"}); });
  REQUIRE(error);
  CHECK(error->kind() == ErrorKind::PeerLost);
  CHECK(error->context().peer == 2);
  CHECK(fourth.conversation.heard("shm", 4) == "lost 2");  // so that nobody takes this rank for lost

  Rank again(std::make_shared<MemoryStore>(), 4);
  const auto passed = again.settle(offers, []() -> std::optional<LostRank> { throw LayoutError("no more"); });
  REQUIRE(passed);
  CHECK(passed->kind() == ErrorKind::Layout);
}

TEST_CASE("a rank that left since it lost another is not to blame") {
  const auto store = std::make_shared<MemoryStore>();
  Rank fourth(store, 4);
  auto seventh = std::make_unique<Rank>(store, 7);
  const Offers offers{{4, fourth.memory.offer()}, {7, seventh->memory.offer()}};
  std::thread other(
      [&] { seventh->memory.meet(seventh->conversation, kGroup, offers, Clock::now() + seconds(20), kNone); });
  fourth.memory.meet(fourth.conversation, kGroup, offers, Clock::now() + seconds(20), kNone);
  other.join();
  const bool says_so = GENERATE(true, false);
  if (says_so) seventh->conversation.say("shm", "lost 2");
  seventh.reset();
  std::optional<Error> error;
  try {
    fourth.memory.settle(fourth.conversation, Clock::now() + seconds(20), kNone);
  } catch (const Error& raised) {
    error = raised;
  }
  REQUIRE(error);
  CHECK(error->kind() == ErrorKind::PeerLost);
  CHECK(error->context().peer == (says_so ? 2 : 7));
  CHECK(says(error->what(), " exited while the ranks [4, 7] of this host connected"));
  CHECK(fourth.conversation.heard("shm", 4) == (says_so ? "lost 2" : "lost 7"));
}

}  // namespace
}  // namespace meshcast
