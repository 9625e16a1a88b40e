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

// An object with periodic work. tick() returns whether it will have work soon. It must not wait for anything
// outside the process.
class Ticking {
 public:
  virtual ~Ticking() = default;
  virtual bool tick() = 0;
};

// The thread of a process for work that needs no peer: it copies and packs what is too large for the caller of
// a start, for all engines in turn (copies of several would only share the memory's rate), and ticks all
// watchers, every 50 ms while one of them has work. Otherwise it sleeps without a limit. It calls no code of a
// user: callbacks of runs are left to the Executor.
class WorkThread {
 public:
  static std::shared_ptr<WorkThread> of_process();  // made for the first engine, destroyed with the last

  WorkThread();  // throws Error if no thread is available
  ~WorkThread();
  WorkThread(const WorkThread&) = delete;
  WorkThread& operator=(const WorkThread&) = delete;

  // Tasks are done in the order of post(). `owner`: for drain(), which returns once no task of this owner is
  // queued or running, and must not be called from a task.
  void post(const void* owner, std::function<void()> task);
  void drain(const void* owner);

  // For a task, between parts that take some 10 ms: runs the ticks that are due.
  void tick_if_due();

  // After remove() it is not ticked any longer. remove() waits for a running tick, and must not be called from
  // one.
  void add(Ticking& watcher);
  void remove(Ticking& watcher);

  // There may be work for a tick. urgent: at once, even if others are ticked already.
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
  Ticking* turn_ = nullptr;      // the watcher that is being ticked
  std::vector<Ticking*> watchers_;
  bool stopping_ = false;

  bool busy_ = false;  // some watcher of the last round has work
  TimePoint next_{};   // when, if so
  uint64_t seen_ = 0;  // wakes, and urgent ones, before that round
  uint64_t seen_urgent_ = 0;
  std::atomic<uint64_t> wakes_{0};
  std::atomic<uint64_t> urgent_{0};
  std::atomic<bool> asleep_{false};  // until a wake
  Thread thread_;
};

}  // namespace meshcast
