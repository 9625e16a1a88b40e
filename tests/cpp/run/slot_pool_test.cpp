#include "run/slot_pool.h"

#include <atomic>
#include <thread>

#include <sys/wait.h>
#include <unistd.h>

#include "catch.h"

using namespace meshcast;

TEST_CASE("slots rest as long as possible before they are given again", "[exec][tags]") {
  SlotPool pool(3);
  for (const int32_t slot : {0, 1, 2}) {
    CHECK(pool.next() == slot);
    pool.take(slot);
  }
  CHECK_FALSE(pool.next());
  pool.release(1);
  CHECK(pool.next() == 1);
  pool.release(0);
  CHECK(pool.next() == 0);
  pool.take(0);
  pool.release(0);
  CHECK(pool.next() == 1);
  CHECK(pool.taken() == 1);
}

// A thread of the parent may hold the lock at that moment, and is not there to give it back.
TEST_CASE("a forked child lets go of a slot that its parent took", "[exec][tags][threads]") {
  SlotPool pool(3);
  pool.take(0);
  std::atomic<bool> over{false};
  std::thread other([&] {
    while (!over) pool.release(1);
  });
  bool hung = false;
  for (int i = 0; i < 50 && !hung; ++i) {
    const pid_t child = fork();
    if (child == 0) {
      alarm(5);
      pool.release(0);
      _exit(0);
    }
    int status = -1;
    waitpid(child, &status, 0);
    hung = !WIFEXITED(status);  // by the alarm
  }
  over = true;
  other.join();
  CHECK_FALSE(hung);
  CHECK(pool.taken() == 1);  // the parent's own is not touched
}
