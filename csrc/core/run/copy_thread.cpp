#include "run/copy_thread.h"

#include <algorithm>
#include <utility>

#include <unistd.h>

#include "common/thread_name.h"

namespace meshcast {
namespace {

std::mutex of_process_mutex;
std::weak_ptr<CopyThread> thread_of_process;  // guarded by of_process_mutex
pid_t made_in = 0;                            // likewise: a forked child has the object and no thread

}  // namespace

std::shared_ptr<CopyThread> CopyThread::of_process() {
  const std::lock_guard lock(of_process_mutex);
  auto thread = thread_of_process.lock();
  if (thread && made_in == getpid()) return thread;
  thread = std::make_shared<CopyThread>();
  thread_of_process = thread;
  made_in = getpid();
  return thread;
}

CopyThread::CopyThread() : pid_(getpid()) {}

CopyThread::~CopyThread() {
  if (getpid() != pid_) {
    if (thread_.joinable()) thread_.detach();  // it is the parent's
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void CopyThread::post(const void* owner, std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  if (!thread_.joinable()) {
    thread_ = std::thread([this] {
      name_this_thread("mc-copy");
      loop();
    });
  }
  tasks_.push_back({owner, std::move(task)});
  changed_.notify_all();
}

void CopyThread::drain(const void* owner) {
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] {
    return running_ != owner &&
           std::none_of(tasks_.begin(), tasks_.end(), [&](const Task& task) { return task.owner == owner; });
  });
}

void CopyThread::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return stopping_ || !tasks_.empty(); });
    if (tasks_.empty()) return;
    Task task = std::move(tasks_.front());
    tasks_.pop_front();
    running_ = task.owner;
    lock.unlock();
    task.run();
    task.run = nullptr;  // it holds tensors
    lock.lock();
    running_ = nullptr;
    changed_.notify_all();
  }
}

}  // namespace meshcast
