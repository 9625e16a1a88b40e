#include "rounds/start_queue.h"

#include <utility>

#include "common/thread_name.h"

namespace meshcast {

StartQueue::StartQueue()
    : thread_([this] {
        name_this_thread("mc-enqueue");
        loop();
      }) {}

StartQueue::~StartQueue() { finish(); }

void StartQueue::finish() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void StartQueue::push(std::function<void()> job) {
  const std::lock_guard lock(mutex_);
  jobs_.push_back(std::move(job));
  changed_.notify_all();
}

void StartQueue::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !jobs_.empty(); });
    if (jobs_.empty()) return;
    const auto job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    lock.lock();
  }
}

}  // namespace meshcast
