#include "common/forks.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <mutex>
#include <string>
#include <vector>

#include <pthread.h>
#include <unistd.h>

#include "common/error.h"

namespace meshcast {
namespace {

constexpr size_t kMostSteps = 16;

std::atomic<uint32_t> count{0};
std::atomic<pid_t> parent{0};  // in a forked child: the process that forked it

struct Kept {
  std::mutex mutex;
  std::vector<int> descriptors;
  std::array<void (*)(), kMostSteps> steps{};
  size_t step_count = 0;
};

Kept& kept() {
  static auto& all = *new Kept;  // usable also while the process ends
  return all;
}

// Holds the lock, so that no other thread is in the middle of a change when the child gets its copy.
void before() {
  kept().mutex.lock();
  parent = getpid();
}

void in_parent() { kept().mutex.unlock(); }

void in_child() {
  Kept& all = kept();
  ++count;
  for (const int fd : all.descriptors) close(fd);
  all.descriptors.clear();
  for (size_t i = 0; i < all.step_count; ++i) all.steps[i]();
  all.mutex.unlock();
}

[[maybe_unused]] const int registered = (kept(), pthread_atfork(before, in_parent, in_child));

}  // namespace

uint32_t forks() noexcept { return count.load(std::memory_order_relaxed); }

void Origin::check() const {
  if (!foreign()) return;
  throw Error(ErrorKind::Aborted,
              "this process was forked from process " + std::to_string(parent) +
                  ", whose connections it must not use: call meshcast there, or start workers "
                  "by spawn");
}

void close_in_children(int fd) {
  const std::lock_guard lock(kept().mutex);
  kept().descriptors.push_back(fd);
}

void keep_in_children(int fd) {
  const std::lock_guard lock(kept().mutex);
  std::erase(kept().descriptors, fd);
}

void in_children(void (*step)()) {
  const std::lock_guard lock(kept().mutex);
  if (kept().step_count == kMostSteps) throw Error(ErrorKind::Generic, "too many steps for forked children");
  kept().steps[kept().step_count++] = step;
}

}  // namespace meshcast
