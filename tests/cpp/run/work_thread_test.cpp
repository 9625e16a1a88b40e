#include "run/work_thread.h"

#include <atomic>
#include <chrono>
#include <functional>
#include <future>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "catch.h"
#include "common/error.h"
#include "support/soon.h"

using namespace meshcast;
using std::chrono::milliseconds;
using testing::soon;

namespace {

struct Counter final : Ticking {
  bool tick() override {
    ++ticks;
    return busy;
  }
  std::atomic<int> ticks{0};
  std::atomic<bool> busy{true};
};

}  // namespace

TEST_CASE("the work thread ticks while there is something to look at", "[exec][threads]") {
  Counter counter;
  WorkThread work;
  work.add(counter);
  work.wake(false);
  REQUIRE(soon([&] { return counter.ticks >= 3; }));
  counter.busy = false;
  // By itself it looks once more at most, and again when it is woken.
  std::this_thread::sleep_for(milliseconds(150));
  const int rest = counter.ticks;
  std::this_thread::sleep_for(milliseconds(200));
  CHECK(counter.ticks == rest);
  work.wake(false);
  CHECK(soon([&] { return counter.ticks == rest + 1; }));
  work.remove(counter);
  work.wake(true);
  std::this_thread::sleep_for(milliseconds(20));
  CHECK(counter.ticks == rest + 1);
}

TEST_CASE("ticks have their turn between tasks and inside long ones", "[exec][threads]") {
  Counter counter;
  WorkThread work;
  work.add(counter);
  int owner = 0;
  std::atomic<bool> over{false};
  std::atomic<int> done{0};
  // Always one more task in the queue.
  std::function<void()> again = [&] { ++done; };
  std::thread poster([&] {
    while (!over) {
      work.post(&owner, again);
      while (!over && done % 64 == 0) std::this_thread::yield();
    }
  });
  work.wake(false);
  CHECK(soon([&] { return counter.ticks >= 3; }));
  over = true;
  poster.join();
  work.drain(&owner);

  const int before = counter.ticks;
  bool ticked = false;
  work.post(&owner, [&] {
    ticked = soon([&] {
      work.tick_if_due();
      return counter.ticks >= before + 3;
    });
  });
  work.drain(&owner);
  CHECK(ticked);
  work.remove(counter);
}

TEST_CASE("drain waits for the tasks of its owner", "[exec][threads]") {
  WorkThread work;
  int mine = 0;
  int other = 0;
  std::promise<void> go;
  std::vector<int> order;
  work.post(&other, [&] { go.get_future().wait(); });
  work.post(&mine, [&] { order.push_back(1); });
  work.post(&mine, [&] { order.push_back(2); });
  std::thread later([&] {
    std::this_thread::sleep_for(milliseconds(20));
    go.set_value();
  });
  work.drain(&mine);
  CHECK(order == std::vector<int>{1, 2});
  later.join();
}

// Sanitizers reserve address space that no limit can take away.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST_CASE("where no thread can be had there is an error that says so", "[exec][threads]") {
  const pid_t child = fork();
  if (child == 0) {
    // No room for the stack of a thread.
    const rlimit none{1, 1};
    setrlimit(RLIMIT_AS, &none);
    std::vector<std::unique_ptr<WorkThread>> made;  // the first ones get stacks that earlier threads left
    try {
      while (made.size() < 1000) made.push_back(std::make_unique<WorkThread>());
    } catch (const Error& error) {
      _exit(std::string(error.what()).find("thread") == std::string::npos ? 2 : 0);
    }
    _exit(1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}
#endif
