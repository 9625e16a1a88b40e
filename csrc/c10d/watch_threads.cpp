#include "c10d/watch_threads.h"

#include <algorithm>
#include <chrono>

#include <unistd.h>

#include "common/thread_name.h"

namespace meshcast {
namespace {

constexpr auto kTick = std::chrono::milliseconds(50);  // while there is something to look at

std::mutex of_process_mutex;
std::weak_ptr<WatchThreads> threads_of_process;  // guarded by of_process_mutex
pid_t made_in = 0;                               // likewise: a forked child has the object and no threads

}  // namespace

std::shared_ptr<WatchThreads> WatchThreads::of_process() {
  const std::lock_guard lock(of_process_mutex);
  auto threads = threads_of_process.lock();
  if (threads && made_in == getpid()) return threads;
  threads = std::make_shared<WatchThreads>();
  threads_of_process = threads;
  made_in = getpid();
  return threads;
}

WatchThreads::WatchThreads() : pid_(getpid()) {
  for (const Loop which : {kReporter, kTimer}) {
    threads_[which] = std::thread([this, which] {
      name_this_thread(which == kReporter ? "mc-report" : "mc-timer");
      loop(which);
    });
  }
}

WatchThreads::~WatchThreads() {
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
  }
  for (std::thread& thread : threads_) {
    if (getpid() == pid_) {
      thread.join();
    } else {
      thread.detach();  // it is the parent's
    }
  }
}

void WatchThreads::add(WatchTurns& watcher) {
  const std::lock_guard lock(mutex_);
  watchers_.push_back(&watcher);
}

void WatchThreads::remove(WatchTurns& watcher) {
  std::unique_lock lock(mutex_);
  std::erase(watchers_, &watcher);
  left_.wait(lock, [&] { return std::find(turn_.begin(), turn_.end(), &watcher) == turn_.end(); });
}

// A call that starts beside others wakes nobody: whoever watches already looks again within a tick.
void WatchThreads::wake(bool urgent) {
  if (urgent) ++urgent_;
  ++wakes_;
  if (!urgent && asleep_ == 0) return;
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void WatchThreads::loop(Loop which) {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    // Read before looking: what begins meanwhile ends the sleep at once.
    const uint64_t seen = wakes_;
    const uint64_t seen_urgent = urgent_;
    bool busy = false;
    const std::vector<WatchTurns*> all = watchers_;
    for (WatchTurns* watcher : all) {
      if (std::find(watchers_.begin(), watchers_.end(), watcher) == watchers_.end())
        continue;  // removed meanwhile
      turn_[which] = watcher;
      lock.unlock();
      busy = (which == kReporter ? watcher->report() : watcher->tick()) || busy;
      lock.lock();
      turn_[which] = nullptr;
      left_.notify_all();
    }
    if (stopping_) return;
    if (busy) {
      changed_.wait_for(lock, kTick, [&] { return stopping_ || urgent_ != seen_urgent; });
    } else {
      ++asleep_;
      changed_.wait(lock, [&] { return stopping_ || wakes_ != seen; });
      --asleep_;
    }
  }
}

}  // namespace meshcast
