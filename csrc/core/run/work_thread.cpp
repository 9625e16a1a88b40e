#include "run/work_thread.h"

#include <algorithm>
#include <system_error>
#include <utility>

#include <fmt/format.h>
#include <unistd.h>

#include "common/error.h"
#include "common/of_process.h"
#include "common/thread_name.h"

namespace meshcast {
namespace {

constexpr auto kTick = std::chrono::milliseconds(50);  // while there is something to look at

OfProcess<WorkThread> thread_of_process;

}  // namespace

thread_local WorkThread::Worker* WorkThread::here = nullptr;

std::shared_ptr<WorkThread> WorkThread::of_process() {
  return thread_of_process.get([] { return std::make_shared<WorkThread>(); });
}

WorkThread::WorkThread() { start_worker_locked(); }

WorkThread::~WorkThread() {
  if (forked()) {
    for (Worker& worker : workers_) worker.thread.detach();  // they are the parent's
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  for (Worker& worker : workers_) worker.thread.join();
}

void WorkThread::start_worker_locked() {
  Worker& worker = workers_.emplace_back();
  try {
    worker.thread = std::thread([this, &worker] {
      name_this_thread("mc-work");
      here = &worker;
      loop(worker);
    });
  } catch (const std::system_error& error) {
    workers_.pop_back();
    throw Error(ErrorKind::Generic, no_thread("deadlines and copies", error));
  }
}

// The caller is the worker: what it does next may wait for what this thread is there for.
void WorkThread::relieve_locked() {
  for (auto it = workers_.begin(); it != workers_.end();) {
    if (it->gone) it->thread.join();
    it = it->gone ? workers_.erase(it) : std::next(it);
  }
  start_worker_locked();
  here->relieved = true;
  busy_ = true;
  next_ = Clock::now();
}

void WorkThread::post(const void* owner, std::function<void()> task) {
  const std::lock_guard lock(mutex_);
  if (here != nullptr && !here->relieved) relieve_locked();
  tasks_.push_back({owner, std::move(task)});
  changed_.notify_all();
}

void WorkThread::drain(const void* owner) {
  if (forked()) return;
  std::unique_lock lock(mutex_);
  const auto of_owner = [&](const auto& each) { return each.owner == owner; };
  changed_.wait(lock, [&] {
    return std::none_of(workers_.begin(), workers_.end(), of_owner) &&
           std::none_of(tasks_.begin(), tasks_.end(), of_owner);
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
  changed_.wait(lock, [&] {
    return std::none_of(workers_.begin(), workers_.end(),
                        [&](const Worker& worker) { return worker.turn == &watcher; });
  });
}

// A call that starts beside others wakes nobody: whoever looks already does so again within a tick.
void WorkThread::wake(bool urgent) {
  if (urgent) ++urgent_;
  ++wakes_;
  const bool from_within = !urgent && here != nullptr;
  if (!urgent && asleep_ == 0 && !from_within) return;
  const std::lock_guard lock(mutex_);
  if (from_within && !here->relieved) {
    try {
      relieve_locked();
    } catch (const Error&) {
      // The call that has been started must not fail for it. Its waiter has a limit of its own.
    }
  }
  changed_.notify_all();
}

bool WorkThread::due_locked() const {
  if (urgent_ != seen_urgent_) return true;
  return busy_ ? Clock::now() >= next_ : wakes_ != seen_;
}

void WorkThread::tick_if_due() {
  if (here == nullptr) return;
  std::unique_lock lock(mutex_);
  if (!here->relieved && due_locked()) give_ticks(lock, *here);
}

void WorkThread::give_ticks(std::unique_lock<std::mutex>& lock, Worker& me) {
  // Read before looking: what begins meanwhile makes the next round due at once.
  seen_ = wakes_;
  seen_urgent_ = urgent_;
  bool busy = false;
  const std::vector<Ticking*> all = watchers_;
  for (Ticking* watcher : all) {
    if (std::find(watchers_.begin(), watchers_.end(), watcher) == watchers_.end()) continue;  // meanwhile
    // One that was relieved may still be at it.
    if (std::any_of(workers_.begin(), workers_.end(), [&](const Worker& w) { return w.turn == watcher; })) {
      busy = true;
      continue;
    }
    me.turn = watcher;
    lock.unlock();
    busy = watcher->tick() || busy;
    lock.lock();
    me.turn = nullptr;
    changed_.notify_all();
    if (me.relieved) return;
  }
  busy_ = busy;
  next_ = Clock::now() + kTick;
}

void WorkThread::loop(Worker& me) {
  std::unique_lock lock(mutex_);
  while (!me.relieved) {
    if (due_locked()) {
      give_ticks(lock, me);
    } else if (!tasks_.empty()) {
      Task task = std::move(tasks_.front());
      tasks_.pop_front();
      me.owner = task.owner;
      lock.unlock();
      task.run();
      task.run = nullptr;  // it holds tensors
      lock.lock();
      me.owner = nullptr;
      changed_.notify_all();
    } else if (stopping_) {
      break;
    } else {
      const auto something = [this] { return stopping_ || !tasks_.empty() || due_locked(); };
      if (busy_) {
        changed_.wait_until(lock, next_, something);
      } else {
        ++asleep_;
        changed_.wait(lock, something);
        --asleep_;
      }
    }
  }
  me.gone = true;
}

}  // namespace meshcast
