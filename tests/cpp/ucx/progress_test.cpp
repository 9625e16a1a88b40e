// Who makes the workers of a process go on, without UCX.
#include "ucx/progress.h"

#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>
#include <vector>

#include "catch.h"

using namespace meshcast;
using std::chrono::milliseconds;

// One of two threads that drive sleeps for both. The run of the other may end by another thread's doing, such
// as an abort: that rings for whom it may concern.
TEST_CASE("a thread that drives beside another is woken at once", "[ucx][threads]") {
  std::mutex mutex;
  ucx::Progress progress(mutex, {},
                         {[] { return false; }, [] { return true; }, [] {}, [] { return TimePoint::max(); }});
  const auto kLong = std::chrono::seconds(40);
  for (int round = 0; round < 20; ++round) {
    std::atomic<bool> ends[2] = {false, false};
    std::atomic<int> driving{0};
    std::atomic<bool> late{false};
    const auto drive = [&](std::atomic<bool>& over) {
      ++driving;
      const TimePoint begun = Clock::now();
      progress.drive([&over] { return over.load(); }, begun + kLong);
      late = late || Clock::now() - begun > kLong / 2;
    };
    std::vector<std::thread> threads;
    threads.emplace_back([&] { drive(ends[0]); });
    threads.emplace_back([&] { drive(ends[1]); });
    while (driving < 2) std::this_thread::yield();
    if (round % 2 == 0) std::this_thread::sleep_for(milliseconds(5));  // else they are on their way to sleep
    // Either may be the one that sleeps for both.
    ends[round / 2 % 2] = true;
    progress.wake();
    threads[static_cast<size_t>(round / 2 % 2)].join();
    ends[1 - round / 2 % 2] = true;
    progress.wake();
    threads[static_cast<size_t>(1 - round / 2 % 2)].join();
    REQUIRE_FALSE(late);
  }
  progress.stop();
}
