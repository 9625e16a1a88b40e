#include "run/work_thread.h"

#include <algorithm>
#include <new>
#include <system_error>
#include <utility>

#include "common/error.h"
#include "common/of_process.h"
#include "common/sync.h"
#include "common/thread_name.h"

namespace meshcast {
namespace {

constexpr auto kTick = std::chrono::milliseconds(50);  // while there is something to look at

OfProcess<WorkThread> thread_of_process;

}  // namespace

std::shared_ptr<WorkThread> WorkThread::of_process() {
  return thread_of_process.get([] { return std::make_shared<WorkThread>(); });
}

WorkThread::WorkThread() {
  try {
    thread_ = Thread([this] {
      name_this_thread("mc-work");
      loop();
    });
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::Generic, no_thread("deadlines and copies", error));
  }
}

WorkThread::~WorkThread() {
  if (forked()) {
    thread_.detach();  // it is the parent's
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void WorkThread::post(const void* owner, std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  tasks_.push_back({owner, std::move(task)});
  changed_.notify_all();
}

void WorkThread::drain(const void* owner) {
  if (forked()) return;
  std::unique_lock lock(mutex_);
  changed_.wait(lock, [&] {
    return owner_ != owner &&
           std::none_of(tasks_.begin(), tasks_.end(), [&](const Task& task) { return task.owner == owner; });
  });
}

void WorkThread::add(Ticking& watcher) {
  const std::lock_guard lock(mutex_);
  watchers_.push_back(&watcher);
}

void WorkThread::remove(Ticking& watcher) {
  if (forked()) return;
  std::unique_lock lock(mutex_);
  std::erase(watchers_, &watcher);
  changed_.wait(lock, [&] { return turn_ != &watcher; });
}

// A call that starts while others run need not wake the thread: it looks again within a tick.
void WorkThread::wake(bool urgent) {
  if (urgent) ++urgent_;
  ++wakes_;
  if (!urgent && !asleep_) return;
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

bool WorkThread::due_locked() const {
  if (urgent_ != seen_urgent_) return true;
  return busy_ ? Clock::now() >= next_ : wakes_ != seen_;
}

void WorkThread::tick_if_due() {
  std::unique_lock lock(mutex_);
  if (due_locked()) give_ticks(lock);
}

void WorkThread::give_ticks(std::unique_lock<Mutex>& lock) {
  // Read before the ticks: work that begins meanwhile makes the next round due at once.
  seen_ = wakes_;
  seen_urgent_ = urgent_;
  bool busy = false;
  const std::vector<Ticking*> all = watchers_;
  for (Ticking* watcher : all) {
    if (std::find(watchers_.begin(), watchers_.end(), watcher) == watchers_.end()) continue;  // meanwhile
    turn_ = watcher;
    lock.unlock();
    try {
      busy = watcher->tick() || busy;
    } catch (const std::bad_alloc&) {
      busy = true;  // it looks again
    }
    lock.lock();
    turn_ = nullptr;
    changed_.notify_all();
  }
  busy_ = busy;
  next_ = Clock::now() + kTick;
}

void WorkThread::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    if (due_locked()) {
      give_ticks(lock);
    } else if (!tasks_.empty()) {
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      owner_ = task.owner;
      lock.unlock();
      task.run();
      task.run = nullptr;  // it holds tensors
      lock.lock();
      owner_ = nullptr;
      changed_.notify_all();
    } else if (stopping_) {
      return;
    } else {
      const auto something = [this] { return stopping_ || !tasks_.empty() || due_locked(); };
      if (busy_) {
        changed_.wait_until(lock, next_, something);
      } else {
        asleep_ = true;
        changed_.wait(lock, something);
        asleep_ = false;
      }
    }
  }
}

}  // namespace meshcast
