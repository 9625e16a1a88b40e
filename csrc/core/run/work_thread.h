#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <vector>

#include "common/forks.h"
#include "common/sync.h"
#include "transport/transport.h"

namespace meshcast {

// What has to be looked at now and then. Answers whether there will be something to look at soon. May not wait
// for anything outside the process.
class Ticking {
 public:
  virtual ~Ticking() = default;
  virtual bool tick() = 0;
};

// The thread of a process for what needs no peer: it copies and packs what is too much for the caller of a
// start, for all engines in turn (copies of several would only share the memory's rate), and gives ticks to all
// watchers, every 50 ms while one of them has something to look at. Between them it sleeps without a limit.
// Neither calls anything of a user's: what ends a run leaves its callbacks to the Executor.
class WorkThread {
 public:
  static std::shared_ptr<WorkThread> of_process();  // made for the first engine, gone with the last

  WorkThread();  // throws Error where no thread can be had
  ~WorkThread();
  WorkThread(const WorkThread&) = delete;
  WorkThread& operator=(const WorkThread&) = delete;

  // The tasks are done in this order. `owner`: for drain(), which returns once no task of this owner is left,
  // queued or running. Not from a task.
  void post(const void* owner, std::function<void()> task);
  void drain(const void* owner);

  // For a task, between parts that take some 10 ms: lets ticks that are due have their turn.
  void tick_if_due();

  // After remove() it is not ticked any longer; waits for a tick that runs. Not from a tick.
  void add(Ticking& watcher);
  void remove(Ticking& watcher);

  // There may be something to look at. urgent: at once, also where others are ticked already.
  void wake(bool urgent);

  bool forked() const { return origin_.foreign(); }  // a forked child has this object and no thread

 private:
  struct Task {
    const void* owner = nullptr;
    std::function<void()> run;
  };

  void loop();
  bool due_locked() const;
  void give_ticks(std::unique_lock<Mutex>& lock);

  const Origin origin_;
  Mutex mutex_;
  Condition changed_;
  std::deque<Task> tasks_;
  const void* owner_ = nullptr;  // of the task that runs
  Ticking* turn_ = nullptr;      // whom the thread ticks
  std::vector<Ticking*> watchers_;
  bool stopping_ = false;

  bool busy_ = false;  // by the last round of ticks there is something to look at
  TimePoint next_{};   // when, if so
  uint64_t seen_ = 0;  // wakes and urgent ones before that round
  uint64_t seen_urgent_ = 0;
  std::atomic<uint64_t> wakes_{0};
  std::atomic<uint64_t> urgent_{0};
  std::atomic<bool> asleep_{false};  // until a wake
  Thread thread_;
};

}  // namespace meshcast
