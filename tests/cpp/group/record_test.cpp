#include "group/record.h"

#include <chrono>
#include <future>
#include <thread>
#include <utility>
#include <vector>

#include "catch.h"

using namespace meshcast;

namespace {

const auto kNobody = std::make_shared<const Members>(Members{"nobody", {0, 1}, ""});
const auto kNothing = std::make_shared<const std::string>("nothing");

std::shared_ptr<Flight> new_flight(const std::string& op) { return Flight::add(op, kNobody, 1, kNothing, {}); }

CallSums sums_of(const std::string& op) { return Record::of_process().counted().calls[op]; }

// What frees itself by way of the record's lock, as the code of a line does by way of Python's.
std::shared_ptr<void> that_asks_the_record(int& freed) {
  return {&freed, [](void* count) {
            Record::of_process().begun();
            ++*static_cast<int*>(count);
          }};
}

}  // namespace

TEST_CASE("the record keeps the last 2,000 calls, and frees the others without its lock") {
  int freed = 0;
  Flight::add("first", kNobody, 1, kNothing, {that_asks_the_record(freed), 7})
      ->ended(std::nullopt, std::nullopt);
  const int64_t before = Record::of_process().begun();
  for (int i = 0; i < 2000; ++i) new_flight("another");
  REQUIRE(Record::of_process().begun() == before + 2000);
  REQUIRE(freed == 1);
  const auto flights = Record::of_process().flights();
  REQUIRE(flights.size() == 2000);
  REQUIRE(flights.front()->op == "another");
}

TEST_CASE("a wait that lasts is noticed once, on another thread") {
  static std::promise<std::pair<LongWait, std::thread::id>> noticed;
  notify_of_long_waits(
      [](const LongWait& wait) {
        noticed.set_value({wait, std::this_thread::get_id()});
      },
      10.0);
  const TimePoint now = Clock::now();
  WaitNotice notice(now - std::chrono::milliseconds(9999));
  REQUIRE_FALSE(notice.is_due(now));
  REQUIRE(notice.is_due(now + std::chrono::milliseconds(1)));
  notice.post({.rank = 1, .call = "a call", .state = "", .ranks = {0, 2}});
  REQUIRE_FALSE(notice.is_due(now + std::chrono::hours(1)));
  const auto [wait, thread] = noticed.get_future().get();
  REQUIRE(wait.rank == 1);
  REQUIRE(wait.call == "a call");
  REQUIRE(wait.ranks == std::vector<int32_t>{0, 2});
  REQUIRE(wait.seconds >= 9.999);
  REQUIRE(thread != std::this_thread::get_id());
  notify_of_long_waits(nullptr, 0);
  REQUIRE_FALSE(WaitNotice(now).is_due(now + std::chrono::hours(1000)));
}

TEST_CASE("facts that are replaced are freed without the lock") {
  int freed = 0;
  const auto flight = new_flight("begun again");
  flight->settled(3, that_asks_the_record(freed), nullptr);
  flight->settled(4, that_asks_the_record(freed), nullptr);
  REQUIRE(freed == 1);
  REQUIRE(flight->progress().run == 4);
}

TEST_CASE("a call is counted once, however it is told to have ended") {
  const auto traffic = std::make_shared<Traffic>("counted once", 0.5, 1, std::vector<Moved>{{1, 0, 2, 30}});
  REQUIRE(traffic->only_sends());
  const auto flight = new_flight("counted once");
  flight->settled(0, nullptr, traffic);
  flight->ended_unwaited(2.0);
  flight->failed_unwaited();
  REQUIRE(flight->ended(Clock::now(), 4.0));
  REQUIRE_FALSE(flight->ended(Clock::now(), 4.0));
  flight->again();
  const CallSums found = sums_of("counted once");
  REQUIRE(found.calls == 1);
  REQUIRE(found.failed == 0);
  REQUIRE(found.retries == 1);
  REQUIRE(found.seconds == 2.0);
  REQUIRE(found.bytes_sent == 30);
  REQUIRE(found.messages == 2);
}

TEST_CASE("a call that fails before it is known what it moves counts for its operation") {
  const auto flight = new_flight("failed early");
  REQUIRE(flight->failed({"LayoutError: no", std::nullopt, std::nullopt}));
  REQUIRE_FALSE(flight->failed({"LayoutError: again", 3, std::nullopt}));
  REQUIRE(flight->progress().failure->text == "LayoutError: no");
  REQUIRE(sums_of("failed early").failed == 1);
}

TEST_CASE("sums of traffic that comes and goes in many threads lose nothing") {
  const auto shared = std::make_shared<Traffic>("many threads", 0.5, 1, std::vector<Moved>{{0, 1, 1, 10}});
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&shared] {
      for (int n = 0; n < 500; ++n) {
        shared->ended(1.0, 1.0);
        Traffic("many threads", 0.0, 1, {{0, 1, 1, 10}}).ended(1.0, 0.5);
        if (n % 100 == 0) Record::of_process().counted();
      }
    });
  }
  for (auto& each : threads) each.join();
  const CallSums found = sums_of("many threads");
  REQUIRE(found.calls == 4000);
  REQUIRE(found.bytes_received == 40000);
  REQUIRE(found.bound == 1000.0);
  REQUIRE(found.moving_seconds == 2000.0);
  REQUIRE(found.waited == 3000.0);
}
