#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "common/forks.h"
#include "common/sync.h"

namespace meshcast {

// What a process has one of, from the first who asks for it until nobody holds it any more. A forked child has
// its own, and leaves that of its parent alone, whose lock may be held. Thread-safe; for static objects, which
// it outlives.
template <typename T>
class OfProcess {
 public:
  template <typename Make>
  std::shared_ptr<T> get(const Make& make) {
    const std::shared_ptr<State> simulated = simulated_state();
    State& state = simulated ? *simulated : real_state();
    const std::lock_guard lock(state.mutex);
    auto found = state.made.lock();
    if (!found) state.made = found = make();
    return found;
  }

  // Null where there is none, and in a forked child.
  std::shared_ptr<T> there() {
    const std::shared_ptr<State> simulated = simulated_state();
    State* const state = simulated ? simulated.get() : state_.load();
    if (!state || state->origin.foreign()) return nullptr;
    const std::lock_guard lock(state->mutex);
    return state->made.lock();
  }

 private:
  struct State {
    const Origin origin;
    Mutex mutex;
    std::weak_ptr<T> made;
  };

  State& real_state() {
    State* state = state_.load();
    while (!state || state->origin.foreign()) {
      auto fresh = std::make_unique<State>();
      if (state_.compare_exchange_strong(state, fresh.get())) state = fresh.release();
    }
    return *state;
  }

  // Of a process in a simulation, where the caller is in one.
  std::shared_ptr<State> simulated_state() {
    Simulation* const simulation = Simulation::current();
    if (!simulation) return nullptr;
    const std::lock_guard lock(simulated_mutex_);
    auto& found = simulated_[simulation->process()];
    if (!found) found = std::make_shared<State>();
    return found;
  }

  std::atomic<State*> state_{nullptr};
  std::mutex simulated_mutex_;
  std::map<uint64_t, std::shared_ptr<State>> simulated_;
};

}  // namespace meshcast
