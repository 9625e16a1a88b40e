#pragma once

#include <atomic>
#include <memory>
#include <mutex>

#include "common/forks.h"

namespace meshcast {

// What a process has one of, from the first who asks for it until nobody holds it any more. A forked child has
// its own, and leaves that of its parent alone, whose lock may be held. Thread-safe; for static objects, which
// it outlives.
template <typename T>
class OfProcess {
 public:
  template <typename Make>
  std::shared_ptr<T> get(const Make& make) {
    State* state = state_.load();
    while (!state || state->origin.foreign()) {
      auto fresh = std::make_unique<State>();
      if (state_.compare_exchange_strong(state, fresh.get())) state = fresh.release();
    }
    const std::lock_guard lock(state->mutex);
    auto found = state->made.lock();
    if (!found) state->made = found = make();
    return found;
  }

  // Null where there is none, and in a forked child.
  std::shared_ptr<T> there() {
    State* state = state_.load();
    if (!state || state->origin.foreign()) return nullptr;
    const std::lock_guard lock(state->mutex);
    return state->made.lock();
  }

 private:
  struct State {
    const Origin origin;
    std::mutex mutex;
    std::weak_ptr<T> made;
  };
  std::atomic<State*> state_{nullptr};
};

}  // namespace meshcast
