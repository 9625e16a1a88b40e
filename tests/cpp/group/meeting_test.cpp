// What ranks say to each other through a store, and the meeting of a group: all come to one verdict.
#include "group/meeting.h"

#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "catch.h"
#include "group/conversation.h"
#include "group/roll.h"
#include "support/memory_store.h"

namespace meshcast {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// A machine on which nothing is connected. gone: offers of ranks that have died.
class Machine final : public Connector {
 public:
  Machine(std::shared_ptr<Store> store, int32_t rank, std::string gone = {})
      : store_(std::move(store)), rank_(rank), gone_(std::move(gone)) {}

  std::shared_ptr<Store> store() override { return store_; }
  std::unique_ptr<Joining> join(const std::string& /*prefix*/) override { return std::make_unique<Way>(*this); }
  std::optional<Error> shortage(const std::exception& /*failure*/) override { return std::nullopt; }

  std::map<int32_t, std::string> offers;  // of those that have met

 private:
  struct Way final : Joining {
    explicit Way(Machine& machine) : machine(machine) {}
    std::string offer() override { return "offer of " + std::to_string(machine.rank_); }
    Watch watch(const std::string& offer) override {
      return [offer, gone = machine.gone_] { return offer == gone ? offer + ": refused" : std::string(); };
    }
    std::shared_ptr<GroupCore> connect(const std::map<int32_t, std::string>& offers, TimePoint /*deadline*/,
                                       const std::function<std::optional<LostRank>()>& /*lost*/) override {
      machine.offers = offers;
      return nullptr;
    }
    Machine& machine;
  };

  const std::shared_ptr<Store> store_;
  const int32_t rank_;
  const std::string gone_;
};

std::shared_ptr<BoardStore> generation_in(const std::shared_ptr<Store>& store,
                                          const std::string& prefix = "generation") {
  return std::make_shared<BoardStore>(std::make_shared<PrefixedStore>(prefix, store));
}

struct Part {
  int32_t rank = 3;
  milliseconds limit{5000};
  std::string closing;
  std::string what = "0.0";
  std::string gone;
  std::vector<int32_t> ranks{3, 5};
  Ordinals next;
  std::shared_ptr<KnownOffers> known = std::make_shared<KnownOffers>();
};

// One rank's part in the meeting of a group; what all of them offered.
std::pair<Met, std::map<int32_t, std::string>> part_of(const std::shared_ptr<Store>& store, const Part& part) {
  Machine machine(store, part.rank, part.gone);
  MeetingPart own;
  own.generation = [&] { return GenerationKeys{"generation", generation_in(store)}; };
  own.what = part.what;
  own.next = [&] { return part.next; };
  own.deadline = Clock::now() + part.limit;
  own.closing = [&] { return part.closing; };
  const GroupIdentity group{part.ranks, part.rank, "tested"};
  Met met = meet(group, machine, part.known, own);
  return {std::move(met), machine.offers};
}

// The error of a part that fails.
template <typename Kind = Error>
Kind error_of(const std::shared_ptr<Store>& store, const Part& part) {
  try {
    part_of(store, part);
  } catch (const Kind& error) {
    return error;
  }
  FAIL("no error");
  throw std::logic_error("not reached");
}

bool says(const Error& error, const std::string& text) {
  return std::string(error.what()).find(text) != std::string::npos;
}

TEST_CASE("texts are heard once all ranks have said theirs; else the error names those that have not") {
  const auto store = std::make_shared<MemoryStore>();
  Conversation first(store, 0, 3);
  Conversation second(store, 1, 3);
  first.say("a", "x");
  second.say("b", "of another topic");
  using Texts = std::map<int32_t, std::string>;
  try {
    first.hear("a", {0, 1, 2}, Clock::now() + milliseconds(5),
               {"{missing}, {first} within {elapsed} s", "o", "p"});
    FAIL("no error");
  } catch (const Error& error) {
    CHECK(error.kind() == ErrorKind::DeadlineExceeded);
    CHECK(says(error, "[1, 2], 1 within 0."));
    const ErrorContext& context = error.context();
    CHECK(context.rank == 0);
    CHECK(context.peer == 1);
    CHECK(context.op + context.phase == "op");
    CHECK(context.elapsed >= context.limit);
    CHECK(context.limit > 0.004);
  }
  CHECK(first.silent("a", {0, 1, 2}) == std::vector<int32_t>{1, 2});
  std::thread late([&] {
    std::this_thread::sleep_for(milliseconds(10));
    second.say("a", "");
  });
  CHECK(first.hear("a", {1, 0}, Clock::now() + seconds(20)) == Texts{{0, "x"}, {1, ""}});
  late.join();
  second.forget("a");
  CHECK(!first.heard("a", 1));
  CHECK(first.heard("b", 1) == "of another topic");
  CHECK_THROWS_AS(
      first.hear("never", {1}, Clock::now() + seconds(20), {}, [] { throw LayoutError("no more"); }),
      LayoutError);
}

TEST_CASE("a text that comes while those missing are looked for is heard") {
  const auto store = std::make_shared<MemoryStore>();
  Conversation first(store, 0, 2);
  const auto come = [&] { Conversation(store, 1, 2).say("a", "late"); };
  const auto now = Clock::now();
  CHECK(first.hear("a", {1}, now, {}, come) == std::map<int32_t, std::string>{{1, "late"}});
}

TEST_CASE("a verdict is waited for, with looks that are not too frequent") {
  const auto store = std::make_shared<MemoryStore>();
  Conversation first(store, 0, 2);
  int looks = 0;
  const auto look = [&] { ++looks; };
  CHECK(first.await_verdict("v", Clock::now() + milliseconds(30), look, std::chrono::hours(1)) == "");
  CHECK(looks == 1);  // at the deadline
  CHECK(first.await_verdict("v", Clock::now() + milliseconds(30), look) == "");
  CHECK(looks > 3);
  const auto decide = [&] { Conversation(store, 1, 2).verdict("v", "theirs"); };
  CHECK(first.await_verdict("v", TimePoint::max(), decide) == "theirs");
  first.erase("v");
  CHECK(first.verdict("v", "") == "");
}

TEST_CASE("a rank looks after the next one that has come, or after all") {
  const auto store = std::make_shared<MemoryStore>();
  for (const int32_t rank : {0, 2, 3}) Conversation(store, rank, 4).say("here", std::to_string(rank));
  Conversation second(store, 1, 4);
  std::vector<std::string> watched;
  const auto known = std::make_shared<KnownOffers>();
  Watches watches(known, [&](const std::string& said) -> Watch {
    watched.push_back(said);
    return [said] { return said == "3" ? std::string("killed") : std::string(); };
  });
  const std::vector<int32_t> ranks{0, 1, 2, 3};
  CHECK(!watches.lost(second, "here", ranks));
  CHECK(watched == std::vector<std::string>{"2"});
  CHECK(!watches.lost(second, "here", {0, 2}, true));
  const auto lost = watches.lost(second, "here", {0, 3, 2}, true);
  REQUIRE(lost);
  CHECK(lost->rank == 3);
  CHECK(lost->why == "killed");
  CHECK(watched == std::vector<std::string>{"2", "0", "3"});
}

TEST_CASE("the first proposal is the verdict of all") {
  const auto store = std::make_shared<MemoryStore>();
  Conversation first(store, 0, 2);
  Conversation second(store, 1, 2);
  CHECK(first.verdict("v", "") == "");
  CHECK(second.verdict("v", "mine") == "mine");
  CHECK(first.verdict("v", "another") == "mine");
  CHECK(first.verdict("v", "") == "mine");
}

TEST_CASE("ranks that have met know what all offered and the first call that all have still to make") {
  const auto store = std::make_shared<MemoryStore>();
  Part other;
  other.rank = 5;
  other.next = {{0, 7}, {2, 1}};
  std::pair<Met, std::map<int32_t, std::string>> its;
  store->after_count = [&] { its = part_of(store, other); };
  Part part;
  part.next = {{0, 4}};
  const auto mine = part_of(store, part);
  CHECK(mine.second == std::map<int32_t, std::string>{{3, "offer of 3"}, {5, "offer of 5"}});
  CHECK(its.second == mine.second);
  CHECK(mine.first.first == Ordinals{{0, 7}, {2, 1}});
  CHECK(its.first.first == mine.first.first);
}

TEST_CASE("a rank that is to leave connects all the same if the others do") {
  const auto store = std::make_shared<MemoryStore>();
  Part other;
  other.rank = 5;
  store->after_count = [&] { part_of(store, other); };
  Part leaves;
  leaves.closing = "out of luck";
  CHECK(part_of(store, leaves).second.size() == 2);
}

TEST_CASE("the rank that leaves first takes the others along") {
  const auto store = std::make_shared<MemoryStore>();
  Part leaves;
  leaves.closing = "out of luck";
  for (const int32_t rank : {3, 5}) {
    Part part = rank == 3 ? leaves : Part{};
    part.rank = rank;
    const Error error = error_of(store, part);
    CHECK(error.kind() == ErrorKind::Aborted);
    CHECK(says(error, "rank 3: out of luck"));
  }
}

TEST_CASE("a late rank finds a group that has failed") {
  const auto store = std::make_shared<MemoryStore>();
  Part early;
  early.limit = milliseconds(30);
  const Error overdue = error_of(store, early);
  CHECK(overdue.kind() == ErrorKind::DeadlineExceeded);
  CHECK(overdue.context().peer == 5);
  CHECK(says(overdue, "ranks [5] did not call"));
  Part late;
  late.rank = 5;
  const Error error = error_of(store, late);
  CHECK(error.kind() == ErrorKind::Aborted);
  CHECK(says(error, "rank 3: ranks [5] did not call"));
}

TEST_CASE("a death is seen by the rank before it, and named by all") {
  const auto store = std::make_shared<MemoryStore>();
  store->set("generation/member/5", "\noffer of 5");
  Roll(generation_in(store), "members", 4).sign(1);
  Part before;
  before.ranks = {3, 5, 7, 9};
  before.gone = "offer of 5";
  Part other = before;
  other.rank = 7;  // looks after rank 3 alone, which lives
  other.gone.clear();
  std::optional<Error> its;
  std::thread third([&] { its = error_of(store, other); });
  const Error mine = error_of(store, before);
  third.join();
  for (const Error& error : {mine, *its}) {
    CHECK(error.kind() == ErrorKind::PeerLost);
    CHECK(error.context().peer == 5);
    CHECK(says(error, "rank 3 lost rank 5"));
  }
}

TEST_CASE("a rank known from earlier is looked after before it comes") {
  Part part;
  part.gone = "earlier offer";
  part.known->add({{5, "earlier offer"}});
  const Error error = error_of(std::make_shared<MemoryStore>(), part);
  CHECK(error.kind() == ErrorKind::PeerLost);
  CHECK(says(error, "earlier offer: refused"));
}

TEST_CASE(
    "a refusal ends the meeting for its own call, and sends ranks that meet for another to the next "
    "generation") {
  const auto store = std::make_shared<MemoryStore>();
  CHECK(refuse_meeting(generation_in(store), 5, "0.4", "wrong shape").counts);
  Part part;
  part.what = "0.4";
  const auto error = error_of<MeetAgainError>(store, part);
  CHECK(error.kind() == ErrorKind::PlanMismatch);
  CHECK(error.context().peer == 5);
  CHECK(says(error, "rank 5 refused its arguments: wrong shape"));
  part.what = "0.5";
  const Met met = part_of(store, part).first;
  REQUIRE(met.refused);
  CHECK(met.refused->call.ordinal == 4);
  CHECK(met.refused->rank == 5);
  CHECK(met.refused->text == "wrong shape");
}

TEST_CASE("where two calls are refused in one meeting, the second rank knows that it was not heard") {
  const auto store = std::make_shared<MemoryStore>();
  CHECK(refuse_meeting(generation_in(store), 5, "0.4", "wrong shape").counts);
  CHECK(refuse_meeting(generation_in(store), 3, "0.4", "wrong as well").counts);
  const RefusedMeeting unheard = refuse_meeting(generation_in(store), 3, "0.5", "another call");
  CHECK(!unheard.counts);
  REQUIRE(unheard.instead);
  CHECK(unheard.instead->call.ordinal == 4);
  CHECK(unheard.instead->rank == 5);
  CHECK(refuse_meeting(generation_in(store, "generation 2"), 3, "0.5", "another call").counts);
  store->set("generation 3/verdict", "deadline/3 late");
  CHECK(refuse_meeting(generation_in(store, "generation 3"), 3, "0.5", "another call").counts);
}

}  // namespace
}  // namespace meshcast
