#include "run/run_state.h"

#include <algorithm>
#include <chrono>

namespace meshcast {

TimePoint deadline_after(double seconds) {
  const double capped = std::min(seconds, 365.0 * 24 * 3600);
  return Clock::now() + std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(capped));
}

bool RunState::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

double RunState::seconds() const {
  const std::lock_guard lock(mutex_);
  return std::chrono::duration<double>((ended_ ? ended_at_ : Clock::now()) - started_).count();
}

std::exception_ptr RunState::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

bool RunState::wait_until(TimePoint limit) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_until(lock, limit, [&] { return ended_; });
}

void RunState::on_end(std::function<void()> callback) {
  {
    const std::lock_guard lock(mutex_);
    if (!ended_) {
      callbacks_.push_back(std::move(callback));
      return;
    }
  }
  callback();
}

void RunState::end(std::unique_lock<std::mutex> lock, std::shared_ptr<void> tensors) {
  ended_ = true;
  ended_at_ = Clock::now();
  const auto callbacks = std::exchange(callbacks_, {});
  lock.unlock();
  changed_.notify_all();
  tensors.reset();
  for (const auto& callback : callbacks) callback();
}

}  // namespace meshcast
