#include "transport/progress.h"

#include <array>
#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include <sys/eventfd.h>
#include <unistd.h>

#include "catch.h"
#include "support/soon.h"

using namespace meshcast;
using std::chrono::milliseconds;
using testing::soon;

namespace {

constexpr auto kLong = std::chrono::seconds(40);

// Something comes by its descriptor, or by a ring to who keeps it. The one that takes it in calls `at_turn`.
class Parcels final : public Source {
 public:
  Parcels(Progress& progress, bool by_descriptor, int patience = 1)
      : progress_(progress), by_descriptor_(by_descriptor), patience_(patience) {
    progress_.add(*this);
  }
  ~Parcels() override { progress_.remove(*this); }

  void send() {
    ++waiting_;
    const uint64_t one = 1;
    if (by_descriptor_) REQUIRE(write(event_.get(), &one, sizeof(one)) == sizeof(one));
    if (!by_descriptor_) progress_.wake(keeper_ == Keeper::Driver ? Who::Driver : Who::Thread);
  }
  int taken(Who who) const { return taken_[static_cast<size_t>(who)]; }
  int taken() const { return taken(Who::Thread) + taken(Who::Driver); }
  int turns() const { return turns_; }
  Keeper keeper() const { return keeper_; }
  std::function<void()> at_turn;

  Progress& progress() override { return progress_; }
  int patience() override { return patience_; }
  bool turn(Who who) override {
    ++turns_;
    if (who == Who::Thread && keeper_ != Keeper::Thread) return false;
    uint64_t count = 0;
    if (by_descriptor_ && read(event_.get(), &count, sizeof(count)) < 0) return false;
    const int some = waiting_.exchange(0);
    if (some > 0 && at_turn) at_turn();
    taken_[static_cast<size_t>(who)] += some;
    return some > 0;
  }
  bool arm(Who who) override { return (who == Who::Thread && keeper_ != Keeper::Thread) || waiting_ == 0; }
  void kept_by(Keeper keeper) override { keeper_ = keeper; }
  std::vector<int> fds() override {
    return by_descriptor_ ? std::vector<int>{event_.get()} : std::vector<int>{};
  }

 private:
  Progress& progress_;
  const bool by_descriptor_;
  const int patience_;
  std::atomic<int> turns_{0};
  const Descriptor event_{eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)};
  std::atomic<int> waiting_{0};
  std::array<std::atomic<int>, 2> taken_{};
  std::atomic<Keeper> keeper_{Keeper::Thread};
};

}  // namespace

TEST_CASE("what comes is taken in by who drives, and else by the thread", "[exec][progress]") {
  for (const bool by_descriptor : {true, false}) {
    INFO("by descriptor " << by_descriptor);
    Progress progress;
    Parcels parcels(progress, by_descriptor);
    int sent = 0;
    for (int round = 0; round < 50; ++round) {
      parcels.send();
      ++sent;
      REQUIRE(soon([&] { return parcels.taken() == sent; }));
    }
    CHECK(parcels.taken(Who::Thread) == sent);
    for (int round = 0; round < 50; ++round) {
      const int before = parcels.taken(Who::Driver);
      std::thread driver([&] {
        drive(
            {&parcels}, [&] { return parcels.taken(Who::Driver) > before; }, Clock::now() + kLong);
      });
      while (parcels.keeper() != Keeper::Driver) std::this_thread::yield();
      if (round % 2 == 0) std::this_thread::sleep_for(milliseconds(2));  // it sleeps by now
      parcels.send();
      driver.join();
      REQUIRE(parcels.taken(Who::Driver) == before + 1);
    }
    CHECK(parcels.taken(Who::Thread) == sent);
    // It is the thread's again, at the latest when its grace is over.
    parcels.send();
    CHECK(soon([&] { return parcels.taken(Who::Thread) == sent + 1; }));
  }
}

TEST_CASE("one driver takes in what comes from all its sources, and leaves others to the thread",
          "[exec][progress]") {
  Progress progress;
  Parcels one(progress, true);
  Parcels other(progress, false);
  for (int round = 0; round < 50; ++round) {
    const bool both = round % 2 == 0;
    // After a drive it is nobody's for a grace, and then a driver may take in what comes as well.
    if (!both) {
      REQUIRE(soon([&] { return other.keeper() == Keeper::Thread; }));
    }
    const int before[] = {one.taken(Who::Driver), other.taken(Who::Driver)};
    const int by_thread = other.taken(Who::Thread);
    Source* const second = both ? &other : nullptr;
    std::thread driver([&] {
      const auto done = [&] {
        return one.taken(Who::Driver) > before[0] && (!both || other.taken(Who::Driver) > before[1]);
      };
      drive({&one, second}, done, Clock::now() + kLong);
    });
    while (one.keeper() != Keeper::Driver) std::this_thread::yield();
    other.send();
    if (!both) {
      REQUIRE(soon([&] { return other.taken(Who::Thread) > by_thread; }));
    }
    if (round % 3 == 0) std::this_thread::sleep_for(milliseconds(2));
    one.send();
    driver.join();
    CHECK(one.taken(Who::Thread) == 0);
  }
}

// A driver that sleeps has not looked at what comes with another.
TEST_CASE("a driver that sleeps serves the sources of those that come", "[exec][progress]") {
  Progress progress;
  Parcels one(progress, false);
  Parcels other(progress, true);
  std::atomic<bool> over{false};
  std::thread first([&] {
    drive(
        {&one}, [&] { return over.load(); }, Clock::now() + kLong);
  });
  for (int round = 0; round < 20; ++round) {
    std::this_thread::sleep_for(milliseconds(2));
    const int before = other.taken(Who::Driver);
    std::thread second([&] {
      drive(
          {&other}, [&] { return other.taken(Who::Driver) > before; }, Clock::now() + kLong);
    });
    while (other.keeper() != Keeper::Driver) std::this_thread::yield();
    other.send();
    second.join();
    CHECK(other.taken(Who::Driver) == before + 1);
  }
  over = true;
  progress.wake(Who::Driver);
  first.join();
}

// One of two threads that drive sleeps for both. The run of the other may end by another thread's doing, such
// as an abort: that rings for whom it may concern.
TEST_CASE("a thread that drives beside another is woken at once", "[exec][progress]") {
  Progress progress;
  Parcels parcels(progress, false);
  for (int round = 0; round < 20; ++round) {
    std::atomic<bool> ends[2] = {false, false};
    std::atomic<int> driving{0};
    std::atomic<bool> late{false};
    const auto drives = [&](std::atomic<bool>& over) {
      ++driving;
      const TimePoint begun = Clock::now();
      drive(
          {&parcels}, [&over] { return over.load(); }, begun + kLong);
      late = late || Clock::now() - begun > kLong / 2;
    };
    std::vector<std::thread> threads;
    threads.emplace_back([&] { drives(ends[0]); });
    threads.emplace_back([&] { drives(ends[1]); });
    while (driving < 2) std::this_thread::yield();
    if (round % 2 == 0) std::this_thread::sleep_for(milliseconds(5));  // else they are on their way to sleep
    // Either may be the one that sleeps for both.
    const auto first = static_cast<size_t>(round / 2 % 2);
    for (const size_t each : {first, 1 - first}) {
      ends[each] = true;
      progress.wake(Who::Driver);
      threads[each].join();
    }
    REQUIRE_FALSE(late);
  }
}

TEST_CASE("a driver comes back at its limit", "[exec][progress]") {
  Progress progress;
  Parcels parcels(progress, true);
  const TimePoint limit = Clock::now() + milliseconds(5);
  drive(
      {&parcels, nullptr}, [] { return false; }, limit);
  CHECK(Clock::now() >= limit);
  drive(
      {nullptr}, [] { return false; }, TimePoint::max());  // at once: there is nothing to drive
}

TEST_CASE("drives that follow each other closely do not wake the thread", "[exec][progress]") {
  Progress progress;
  Parcels parcels(progress, false);
  for (int i = 0; i < 8; ++i)
    drive(
        {&parcels}, [] { return true; }, TimePoint::max());
  // As closely as this machine allows: once is enough.
  CHECK(soon([&] {
    for (int i = 0; i < 8; ++i)
      drive(
          {&parcels}, [] { return true; }, TimePoint::max());
    return parcels.keeper() == Keeper::Nobody;
  }));
  CHECK(soon([&] { return parcels.keeper() == Keeper::Thread; }));
}

TEST_CASE("a patient source that has nothing keeps nobody awake for another", "[exec][progress]") {
  constexpr int kPatience = 1000;
  Progress progress;
  Parcels patient(progress, true, kPatience);
  Parcels other(progress, false);
  REQUIRE(soon([&] { return patient.turns() >= kPatience; }));
  const int before = patient.turns();
  for (int round = 1; round <= 20; ++round) {
    other.send();
    REQUIRE(soon([&] { return other.taken() == round; }));
  }
  CHECK(patient.turns() < before + kPatience);
}

TEST_CASE("a source that was removed has no turn, and none under way", "[exec][progress]") {
  Progress progress;
  for (int round = 0; round < 20; ++round) {
    std::promise<void> inside;
    std::promise<void> go;
    Parcels parcels(progress, round % 2 == 0);
    parcels.at_turn = [&] {
      inside.set_value();
      go.get_future().wait();
    };
    parcels.send();
    inside.get_future().wait();
    CHECK_FALSE(progress.remove(parcels, Clock::now() + milliseconds(1)));
    go.set_value();
    CHECK(soon([&] { return parcels.taken() == 1; }));
    Parcels after(progress, round % 2 == 0);  // there is room for it
    parcels.send();
    after.send();
    CHECK(soon([&] { return after.taken() == 1; }));
    CHECK(parcels.taken() == 1);
  }
}
