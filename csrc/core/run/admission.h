#pragma once

#include <mutex>

#include "common/sync.h"

namespace meshcast {

// Lets threads in until it is closed; closing waits until the last of them has left. Guards what users' threads
// do inside an engine that any of them may shut down.
class Admission {
 public:
  // False once it is closed. Who got in calls leave().
  bool enter() {
    const std::lock_guard lock(mutex_);
    if (closed_) return false;
    ++inside_;
    return true;
  }

  void leave() {
    const std::lock_guard lock(mutex_);
    if (--inside_ == 0 && closed_) left_.notify_all();
  }

  // Not from inside.
  void close() {
    std::unique_lock lock(mutex_);
    closed_ = true;
    left_.wait(lock, [this] { return inside_ == 0; });
  }

 private:
  Mutex mutex_;
  Condition left_;
  int inside_ = 0;
  bool closed_ = false;
};

// Inside an admission, if it let us in.
class Entered {
 public:
  explicit Entered(Admission& admission) : admission_(admission.enter() ? &admission : nullptr) {}
  ~Entered() {
    if (admission_) admission_->leave();
  }
  Entered(const Entered&) = delete;
  Entered& operator=(const Entered&) = delete;
  explicit operator bool() const { return admission_ != nullptr; }

 private:
  Admission* const admission_;
};

}  // namespace meshcast
