#include "run/reporters.h"

#include <atomic>
#include <chrono>
#include <future>
#include <memory>
#include <thread>
#include <vector>

#include "catch.h"
#include "common/error.h"
#include "support/soon.h"

using namespace meshcast;
using std::chrono::milliseconds;
using testing::soon;

namespace {

// A store that answers when it is let go.
struct Store {
  std::promise<void> let_go;
  std::shared_future<void> answer{let_go.get_future()};
};

class Reporter final : public Reporting {
 public:
  explicit Reporter(Store& store) : store_(store), answer_(store.answer) {}

  void report() override {
    since_ = Clock::now();
    answer_.wait();
    since_ = TimePoint();
    at_once_ = at_once_ || busy_.exchange(true);
    ++reports;
    busy_ = false;
  }
  TimePoint waits_since() const override { return since_; }
  const void* connection() const override { return &store_; }

  std::atomic<int> reports{0};

 private:
  Store& store_;
  std::shared_future<void> answer_;
  std::atomic<TimePoint> since_{TimePoint()};
  std::atomic<bool> busy_{false};
  bool at_once_ = false;
};

}  // namespace

TEST_CASE("a store that does not answer holds up nobody with another store", "[exec][threads]") {
  Store dead;
  Store alive;
  alive.let_go.set_value();
  auto reporters = std::make_unique<Reporters>();
  const auto stuck = std::make_shared<Reporter>(dead);
  const auto behind = std::make_shared<Reporter>(dead);
  const auto other = std::make_shared<Reporter>(alive);
  REQUIRE(reporters->want(stuck));
  REQUIRE(soon([&] { return stuck->waits_since() != TimePoint(); }));
  CHECK(reporters->want(behind));
  CHECK_FALSE(reporters->held_up(&dead));
  // As a watcher does, again and again until it has been heard.
  CHECK(soon([&] {
    reporters->want(other);
    return other->reports > 0;
  }));
  CHECK(soon([&] { return reporters->held_up(&dead); }));
  CHECK_FALSE(reporters->held_up(&alive));
  CHECK(stuck->reports == 0);
  CHECK(behind->reports == 0);
  // Nothing waits for who is held up; who has not begun does not begin any longer.
  const auto dropped = std::make_shared<Reporter>(dead);
  CHECK(reporters->want(dropped));
  reporters->drop(*dropped);
  dead.let_go.set_value();
  CHECK(soon([&] { return stuck->reports == 1 && behind->reports == 1; }));
  CHECK(soon([&] { return dropped.use_count() == 1; }));
  CHECK(dropped->reports == 0);
}

TEST_CASE("who is at a store outlives those it worked for", "[exec][threads]") {
  Store dead;
  std::weak_ptr<Reporter> watched;
  {
    Reporters reporters;
    const auto stuck = std::make_shared<Reporter>(dead);
    watched = stuck;
    REQUIRE(reporters.want(stuck));
    REQUIRE(soon([&] { return stuck->waits_since() != TimePoint(); }));
  }
  CHECK_FALSE(watched.expired());
  dead.let_go.set_value();
  CHECK(soon([&] { return watched.expired(); }));
}

TEST_CASE("each one that wants a report gets one", "[exec][threads]") {
  Store alive;
  alive.let_go.set_value();
  Reporters reporters;
  std::vector<std::shared_ptr<Reporter>> all;
  for (int i = 0; i < 50; ++i) all.push_back(std::make_shared<Reporter>(alive));
  for (int round = 1; round <= 3; ++round) {
    for (const auto& each : all) REQUIRE(reporters.want(each));
    for (const auto& each : all) REQUIRE(soon([&] { return each->reports >= round; }));
  }
}
