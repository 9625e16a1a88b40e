#pragma once

#include <mutex>

#include "common/sync.h"

namespace meshcast {

// Admits threads until it is closed; closing waits until the last of them has left. Guards users' threads
// inside an engine that any of them may shut down.
class Admission {
 public:
  // Returns false once it is closed. An admitted thread must call leave().
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

  // Must not be called from inside.
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

// Holds an admission, if it was granted.
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
