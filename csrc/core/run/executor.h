#pragma once

#include <chrono>
#include <cstddef>
#include <functional>
#include <memory>

#include "common/forks.h"
#include "transport/transport.h"

namespace meshcast {

// Threads for work that may block for good: callbacks of futures, which are a user's, commands of groups, and
// reports to stores.
// One task is run after the other, and a thread that has been at its task for longer than `patience` counts as
// blocked: another takes its place. So no task waits for another by more than that, and tasks that end soon
// need one thread. There is none while nothing is to do.
//
// Nobody waits for these threads. A task keeps alive what it uses, and runs to its end though the executor is
// gone.
class Executor {
 public:
  // The callbacks of this process. Lives as long as the process does.
  static Executor& of_process();

  // name: of its threads.
  Executor(const char* name, std::chrono::milliseconds patience);
  ~Executor();
  Executor(const Executor&) = delete;
  Executor& operator=(const Executor&) = delete;

  // Any thread, with any lock held: runs nothing itself. Tasks with one key are run one after the other; null:
  // beside all others. False where no thread can be had; then it is begun as soon as one can.
  bool post(std::function<void()> task, const void* key = nullptr);
  // The same, but false, and the task is not kept, where all threads are busy and no other can be had.
  bool try_post(std::function<void()> task);
  bool call();  // for what is left: tries again where no thread could be had

  // There is a thread for a later post() while what this returns is kept. Throws Error where none can be had.
  std::shared_ptr<void> reserve();

  // The process is about to end: returns once no task is left, or at `limit`. What is left then, or comes
  // later, is not begun any longer, nor freed.
  void finish(TimePoint limit);

  size_t threads() const;

 private:
  struct State;

  static void serve(const std::shared_ptr<State>& state);

  const Origin origin_;
  const std::shared_ptr<State> state_;  // shared with the threads
};

}  // namespace meshcast
