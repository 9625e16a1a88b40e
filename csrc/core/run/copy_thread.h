#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>

#include <sys/types.h>

namespace meshcast {

// The thread of a process that copies and packs what is too much for the caller of a start, for all engines in
// turn: copies of several would only share the memory's rate. Starts with the first task.
class CopyThread {
 public:
  static std::shared_ptr<CopyThread> of_process();  // made for the first engine, gone with the last

  CopyThread();
  ~CopyThread();
  CopyThread(const CopyThread&) = delete;
  CopyThread& operator=(const CopyThread&) = delete;

  void post(const void* owner, std::function<void()> task);  // throws where no thread can be had

  // Returns once no task of this owner is left, queued or running. Not from a task.
  void drain(const void* owner);

 private:
  struct Task {
    const void* owner = nullptr;
    std::function<void()> run;
  };

  void loop();

  const pid_t pid_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> tasks_;
  const void* running_ = nullptr;  // whose task it is
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace meshcast
