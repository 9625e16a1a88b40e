#include "run/run_state.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/sync.h"
#include "run/executor.h"

namespace meshcast {

namespace {

constexpr auto kStillAwaited = std::chrono::seconds(1);  // a wait in slices repeats much sooner

}  // namespace

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
  if (changed_.wait_until(lock, limit, [&] { return ended_; })) return true;
  const TimePoint now = Clock::now();
  if (now - awaited_last_ > kStillAwaited) awaited_since_ = now;
  awaited_last_ = now;
  return false;
}

std::optional<TimePoint> RunState::awaited_since(TimePoint now) const {
  const std::lock_guard lock(mutex_);
  if (now - awaited_last_ > kStillAwaited) return std::nullopt;
  return awaited_since_;
}

// A callback of a run that never ended is not called, and is freed on a thread that may block.
RunState::~RunState() {
  if (!callbacks_.empty()) Executor::of_process().post([callbacks = std::move(callbacks_)] {});
}

void RunState::on_end(std::function<void()> callback) {
  if (!ended()) {
    auto kept = [callback, thread = Executor::of_process().reserve()] { callback(); };
    const std::lock_guard lock(mutex_);
    if (!ended_) {
      callbacks_.emplace_back(std::move(kept));
      return;
    }
  }
  callback();
}

// The tensors first: a thread that sees the end may expect them to be freed.
void RunState::end(std::unique_lock<Mutex> lock, std::shared_ptr<void> tensors) {
  tensors.reset();
  ended_ = true;
  ended_at_ = Clock::now();
  auto callbacks = std::exchange(callbacks_, {});
  lock.unlock();
  changed_.notify_all();
  wake_driver();
  for (auto& callback : callbacks) Executor::of_process().post(std::move(callback));
}

}  // namespace meshcast
