#include "run/executor.h"

#include <atomic>
#include <chrono>
#include <fstream>
#include <functional>
#include <future>
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "catch.h"
#include "run/run_state.h"
#include "support/soon.h"

using namespace meshcast;
using std::chrono::milliseconds;
using testing::soon;

namespace {

constexpr auto kExecutorLimit = std::chrono::seconds(60);  // what hangs fails here

bool comes(std::future<void>& what) { return what.wait_for(kExecutorLimit) == std::future_status::ready; }

struct PlainRun final : RunState {
  PlainRun() : RunState(std::make_shared<Program>(), {}, Clock::now() + kExecutorLimit) {}
  int64_t received_bytes() const override { return 0; }
  int64_t sent_bytes() const override { return 0; }
  void wake_driver() noexcept override { woken = std::this_thread::get_id(); }

  void finish() { end(std::unique_lock(mutex_), std::exchange(tensors, nullptr)); }

  std::shared_ptr<void> tensors;
  std::thread::id woken;
};

}  // namespace

TEST_CASE("a task that waits for later ones holds up none of them", "[exec][threads]") {
  Executor executor("mc-test", milliseconds(5));
  std::promise<void> let_go;
  const std::shared_future<void> go(let_go.get_future());
  std::atomic<int> inside{0};
  std::atomic<int> through{0};
  for (int i = 0; i < 16; ++i) {
    executor.post([&, go] {
      ++inside;
      go.wait();
      ++through;
    });
  }
  CHECK(soon([&] { return inside == 16; }));
  std::promise<void> other;
  auto came = other.get_future();
  executor.post([&] { other.set_value(); });
  CHECK(comes(came));
  let_go.set_value();
  CHECK(soon([&] { return through == 16; }));
}

TEST_CASE("tasks that end at once need one thread and keep their order", "[exec][threads]") {
  Executor executor("mc-test", std::chrono::seconds(30));
  std::mutex mutex;
  std::vector<int> order;
  for (int i = 0; i < 1000; ++i) {
    executor.post([&, i] {
      const std::lock_guard lock(mutex);
      order.push_back(i);
    });
  }
  CHECK(soon([&] {
    const std::lock_guard lock(mutex);
    return order.size() == 1000;
  }));
  for (int i = 0; i < 1000; ++i) REQUIRE(order[static_cast<size_t>(i)] == i);
  CHECK(executor.threads() <= 2);  // one, and who would take its place
}

TEST_CASE("tasks of one key are run one after the other, however long they take", "[exec][threads]") {
  Executor executor("mc-test", milliseconds(1));
  std::promise<void> let_go;
  const std::shared_future<void> go(let_go.get_future());
  const int key = 0;
  std::atomic<int> at{0};
  std::atomic<bool> together{false};
  std::atomic<int> done{0};
  const auto task = [&, go] {
    if (at++ > 0) together = true;
    go.wait();
    --at;
    ++done;
  };
  for (int i = 0; i < 4; ++i) executor.post(task, &key);
  std::promise<void> other;
  auto came = other.get_future();
  executor.post([&] { other.set_value(); });
  CHECK(comes(came));
  CHECK(done == 0);
  let_go.set_value();
  CHECK(soon([&] { return done == 4; }));
  CHECK_FALSE(together);
}

TEST_CASE("idle threads end, but for one that is reserved", "[exec][threads]") {
  Executor executor("mc-test", milliseconds(5));
  auto kept = executor.reserve();
  CHECK(executor.threads() == 1);
  std::promise<void> ran;
  auto came = ran.get_future();
  executor.post([&] { ran.set_value(); });
  CHECK(comes(came));
  std::this_thread::sleep_for(milliseconds(1300));
  CHECK(executor.threads() == 1);
  kept.reset();
  CHECK(soon([&] { return executor.threads() == 0; }));
}

TEST_CASE("what a task raises ends nothing", "[exec][threads]") {
  Executor executor("mc-test", milliseconds(5));
  executor.post([] { throw std::runtime_error("of a test"); });
  std::promise<void> ran;
  auto came = ran.get_future();
  executor.post([&] { ran.set_value(); });
  CHECK(comes(came));
}

TEST_CASE("the end of a process waits for tasks up to its limit and begins none afterwards",
          "[exec][threads]") {
  auto let_go = std::make_shared<std::promise<void>>();
  const std::shared_future<void> go(let_go->get_future());
  Executor executor("mc-test", milliseconds(1));
  std::atomic<bool> late{false};
  std::promise<void> begun;
  auto began = begun.get_future();
  executor.post([&] { begun.set_value(); });
  executor.finish(Clock::now() + kExecutorLimit);
  CHECK(began.wait_for(milliseconds(0)) == std::future_status::ready);
  executor.post([&] { late = true; });
  std::this_thread::sleep_for(milliseconds(50));
  CHECK_FALSE(late);

  Executor stuck("mc-test", milliseconds(1));
  stuck.post([go] { go.wait(); });
  const TimePoint limit = Clock::now() + milliseconds(50);
  stuck.finish(limit);
  CHECK(Clock::now() >= limit);
  let_go->set_value();
}

TEST_CASE("a forked child has an executor of its own", "[exec][threads]") {
  std::promise<void> let_go;
  const std::shared_future<void> go(let_go.get_future());
  Executor& parent = Executor::of_process();
  std::promise<void> begun;
  auto began = begun.get_future();
  parent.post([&, go] {
    begun.set_value();
    go.wait();
  });
  REQUIRE(comes(began));
  const pid_t child = fork();
  if (child == 0) {
    std::promise<void> ran;
    auto came = ran.get_future();
    parent.post([] {});  // nobody's
    Executor::of_process().post([&] { ran.set_value(); });
    _exit(came.wait_for(std::chrono::seconds(20)) == std::future_status::ready ? 0 : 1);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
  let_go.set_value();
}

// Sanitizers reserve address space that no limit can take away.
#if !defined(__SANITIZE_THREAD__) && !defined(__SANITIZE_ADDRESS__)
TEST_CASE("a task that no thread can be had for is refused, or waits for one that there is",
          "[exec][threads]") {
  const pid_t child = fork();
  if (child == 0) {
    Executor executor("mc-test", milliseconds(1));
    std::promise<void> let_go;
    const std::shared_future<void> go(let_go.get_future());
    std::atomic<int> begun{0};
    const auto blocks = [&begun, go] {
      ++begun;
      go.wait();
    };
    // Room for what the test itself allocates, and none for the stack of a thread.
    std::ifstream sizes("/proc/self/statm");
    rlim_t pages = 0;
    sizes >> pages;
    const rlim_t room = pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE)) + (rlim_t{2} << 20);
    const rlimit none{room, room};
    setrlimit(RLIMIT_AS, &none);
    int taken = 0;  // by stacks that earlier threads left
    while (executor.try_post(blocks)) {
      if (++taken == 1000 || !soon([&] { return begun == taken; })) _exit(1);
    }
    std::atomic<bool> refused_ran{false};
    if (executor.try_post([&] { refused_ran = true; })) _exit(2);
    std::promise<void> ran;
    auto came = ran.get_future();
    executor.post([&] { ran.set_value(); });
    if (taken == 0) _exit(0);  // there is none
    let_go.set_value();
    if (!comes(came) || refused_ran) _exit(3);
    // An idle one takes it, as soon as one has come back from its task.
    if (!soon([&] { return executor.try_post([] {}); })) _exit(4);
    _exit(0);
  }
  int status = -1;
  REQUIRE(waitpid(child, &status, 0) == child);
  CHECK(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 0);
}
#endif

// Whoever ends a run may hold locks, and is the thread that others wait for.
TEST_CASE("callbacks of a run are not called by the thread that ends it", "[exec][threads]") {
  PlainRun run;
  std::mutex of_transport;
  std::promise<std::thread::id> called;
  auto id = called.get_future();
  run.on_end([&] {
    { const std::lock_guard lock(of_transport); }  // as a call does that uses the transport
    called.set_value(std::this_thread::get_id());  // the test may end now
  });
  std::atomic<bool> tensors_gone{false};
  std::atomic<bool> woken_after{false};
  run.tensors = std::shared_ptr<void>(nullptr, [&](void*) { tensors_gone = true; });
  std::thread waiter([&] {
    CHECK(run.wait_until(Clock::now() + kExecutorLimit));
    woken_after = tensors_gone.load();
  });
  {
    const std::lock_guard lock(of_transport);
    run.finish();
    waiter.join();  // woken by the end itself
    CHECK(woken_after);
    CHECK(run.woken == std::this_thread::get_id());
  }
  REQUIRE(id.wait_for(kExecutorLimit) == std::future_status::ready);
  CHECK(id.get() != std::this_thread::get_id());

  bool at_once = false;
  run.on_end([&] { at_once = true; });
  CHECK(at_once);
}

TEST_CASE("a callback of a run that never ends is freed by the executor", "[exec][threads]") {
  std::promise<std::thread::id> freed;
  auto id = freed.get_future();
  {
    PlainRun run;
    std::shared_ptr<void> held(nullptr, [&](void*) { freed.set_value(std::this_thread::get_id()); });
    run.on_end([held = std::move(held)] {});
  }
  REQUIRE(id.wait_for(kExecutorLimit) == std::future_status::ready);
  CHECK(id.get() != std::this_thread::get_id());
}
