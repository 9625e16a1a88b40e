#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "common/forks.h"
#include "common/sync.h"

namespace meshcast {

// One object for each process, made at its first use and never freed. A forked child has its own, and does not
// touch that of its parent, whose lock may be held. Thread-safe; for static objects.
template <typename T>
class PerProcess {
 public:
  T& get() {
    Kept* found = kept_.load();
    while (!found || found->origin.foreign()) {
      auto fresh = std::make_unique<Kept>();
      if (kept_.compare_exchange_strong(found, fresh.get())) found = fresh.release();
    }
    return found->thing;
  }

  // Null if there is none, and in a forked child.
  T* there() {
    Kept* const found = kept_.load();
    return found && !found->origin.foreign() ? &found->thing : nullptr;
  }

 private:
  struct Kept {
    const Origin origin;
    T thing;
  };

  std::atomic<Kept*> kept_{nullptr};
};

// One object for each process, from the first get() until no reference is held any longer. A forked child has
// its own, and does not touch that of its parent, whose lock may be held. Thread-safe; for static objects,
// which it outlives.
template <typename T>
class OfProcess {
 public:
  template <typename Make>
  std::shared_ptr<T> get(const Make& make) {
    const std::shared_ptr<State> simulated = simulated_state();
    State& state = simulated ? *simulated : state_.get();
    const std::lock_guard lock(state.mutex);
    auto found = state.made.lock();
    if (!found) state.made = found = make();
    return found;
  }

  // Null if there is none, and in a forked child.
  std::shared_ptr<T> there() {
    const std::shared_ptr<State> simulated = simulated_state();
    State* const state = simulated ? simulated.get() : state_.there();
    if (!state) return nullptr;
    const std::lock_guard lock(state->mutex);
    return state->made.lock();
  }

 private:
  struct State {
    Mutex mutex;
    std::weak_ptr<T> made;
  };

  // The state of the simulated process, if the caller is in a simulation.
  std::shared_ptr<State> simulated_state() {
    Simulation* const simulation = Simulation::current();
    if (!simulation) return nullptr;
    const std::lock_guard lock(simulated_mutex_);
    auto& found = simulated_[simulation->process()];
    if (!found) found = std::make_shared<State>();
    return found;
  }

  PerProcess<State> state_;
  std::mutex simulated_mutex_;
  std::map<uint64_t, std::shared_ptr<State>> simulated_;
};

}  // namespace meshcast
