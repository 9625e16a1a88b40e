#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>

#include "common/forks.h"
#include "transport/transport.h"

namespace meshcast {

// Threads for work that may block for ever: users' callbacks of futures, commands of groups, and reports to
// stores. Tasks are run one after the other, and a thread that has run its task for longer than `patience`
// counts as blocked: another replaces it. So no task waits for another for longer than that, and short tasks
// need one thread. There is no thread while there is no task.
//
// These threads are never joined. A task keeps alive what it uses, and runs to its end even if the executor is
// destroyed.
class Executor {
 public:
  // The executor for callbacks of this process. Lives as long as the process.
  static Executor& of_process();

  // name: of its threads.
  Executor(const char* name, std::chrono::milliseconds patience);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // May be called from any thread, with any lock held: runs nothing itself. Tasks with the same key are run one
  // after the other; null: next to all others. False if no thread is available; the task then begins as soon as
  // one is.
  bool post(std::function<void()> task, const void* key = nullptr);
  // The same, but if all threads are busy and no other is available, returns false and does not keep the task.
  bool try_post(std::function<void()> task);
  bool call();  // for queued tasks: tries again to start a thread if there was none

  // Reserves a thread for a later post() while the returned object lives. Throws Error if no thread is
  // available.
  std::shared_ptr<void> reserve();

  // The process is about to end: returns once no task is left, or at `limit`. Later and remaining tasks are
  // neither begun nor freed.
  void finish(TimePoint limit);

  size_t threads() const;

 private:
  struct State;

  static void serve(const std::shared_ptr<State>& state);

  const Origin origin_;
  const std::shared_ptr<State> state_;  // shared with the threads
};

}  // namespace meshcast
