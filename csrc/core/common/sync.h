#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>

namespace meshcast {

// Time, locks and threads of all code that decides how a call ends. Each is the standard library's, unless a
// simulation is installed, which then sees every acquisition, wait and start of a thread, decides which thread
// runs next, and gives the time. Otherwise this costs the load of a pointer.
using TimePoint = std::chrono::steady_clock::time_point;

class Condition;
class Mutex;

class Simulation {
 public:
  virtual ~Simulation() = default;

  // Null if the calling thread is not one of the simulation; it then uses the standard library.
  static Simulation* current() noexcept {
    Simulation* const found = installed_.load(std::memory_order_relaxed);
    return found && found->runs_here() ? found : nullptr;
  }
  // Null ends it. Must not be called while a thread of a simulation runs.
  static void install(Simulation* simulation) noexcept { installed_ = simulation; }

  virtual bool runs_here() const noexcept = 0;
  virtual TimePoint now() noexcept = 0;
  // The process of the caller, which has its own singletons. Never 0; a later process may have the same number.
  virtual uint64_t process() noexcept = 0;

  virtual void keep(std::shared_ptr<void> thing) = 0;  // until the process of the caller ends

  virtual void lock(const Mutex& mutex) = 0;
  virtual void unlock(const Mutex& mutex) noexcept = 0;
  // The caller holds no lock that others need. Returns false at `limit`.
  virtual bool wait(const Condition& condition, TimePoint limit) = 0;
  virtual void notify(const Condition& condition, bool all) noexcept = 0;
  virtual void sleep_until(TimePoint limit) = 0;

  virtual uint64_t start(std::function<void()> body) = 0;  // never 0; throws std::system_error
  virtual void join(uint64_t thread) = 0;

 private:
  static inline std::atomic<Simulation*> installed_{nullptr};
};

struct Clock {
  using duration = std::chrono::steady_clock::duration;
  using rep = duration::rep;
  using period = duration::period;
  using time_point = TimePoint;
  static constexpr bool is_steady = true;
  static time_point now() noexcept {
    Simulation* const simulation = Simulation::current();
    return simulation ? simulation->now() : std::chrono::steady_clock::now();
  }
};

class Mutex {
 public:
  Mutex() = default;
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  // A simulated thread takes the real lock, too, so that sanitizers see which thread holds it.
  void lock() {
    if (Simulation* const simulation = Simulation::current()) simulation->lock(*this);
    real_.lock();
  }
  void unlock() noexcept {
    real_.unlock();
    if (Simulation* const simulation = Simulation::current()) simulation->unlock(*this);
  }

 private:
  friend class Condition;
  std::mutex real_;
};

class Condition {
 public:
  Condition() = default;
  Condition(const Condition&) = delete;
  Condition& operator=(const Condition&) = delete;

  void notify_one() noexcept { notify(false); }
  void notify_all() noexcept { notify(true); }

  void wait(std::unique_lock<Mutex>& lock) {
    if (Simulation* const simulation = Simulation::current()) {
      simulated_wait(*simulation, lock, TimePoint::max());
    } else {
      std::unique_lock real(lock.mutex()->real_, std::adopt_lock);
      real_.wait(real);
      real.release();
    }
  }
  std::cv_status wait_until(std::unique_lock<Mutex>& lock, TimePoint limit) {
    if (Simulation* const simulation = Simulation::current()) return simulated_wait(*simulation, lock, limit);
    std::unique_lock real(lock.mutex()->real_, std::adopt_lock);
    const auto status = real_.wait_until(real, limit);
    real.release();
    return status;
  }
  template <typename Reached>
  void wait(std::unique_lock<Mutex>& lock, const Reached& reached) {
    while (!reached()) wait(lock);
  }
  template <typename Reached>
  bool wait_until(std::unique_lock<Mutex>& lock, TimePoint limit, const Reached& reached) {
    while (!reached())
      if (wait_until(lock, limit) == std::cv_status::timeout) return reached();
    return true;
  }

 private:
  void notify(bool all) noexcept {
    if (Simulation* const simulation = Simulation::current()) return simulation->notify(*this, all);
    all ? real_.notify_all() : real_.notify_one();
  }
  // No other thread runs between unlock() and wait(), so no notification is lost.
  std::cv_status simulated_wait(Simulation& simulation, std::unique_lock<Mutex>& lock, TimePoint limit) {
    lock.unlock();
    const bool told = simulation.wait(*this, limit);
    lock.lock();
    return told ? std::cv_status::no_timeout : std::cv_status::timeout;
  }

  std::condition_variable real_;
};

// Must be joined or detached before it is destroyed, like std::thread.
class Thread {
 public:
  Thread() = default;
  explicit Thread(std::function<void()> body) {
    if (Simulation* const simulation = Simulation::current()) {
      simulated_ = simulation->start(std::move(body));
    } else {
      real_ = std::thread(std::move(body));
    }
  }

  bool joinable() const noexcept { return simulated_ != 0 || real_.joinable(); }
  void join() {
    if (simulated_ == 0) return real_.join();
    Simulation::current()->join(std::exchange(simulated_, 0));
  }
  void detach() {
    if (std::exchange(simulated_, 0) == 0) real_.detach();
  }

 private:
  std::thread real_;
  uint64_t simulated_ = 0;
};

inline void sleep_until(TimePoint limit) {
  if (Simulation* const simulation = Simulation::current()) return simulation->sleep_until(limit);
  std::this_thread::sleep_until(limit);
}
inline void sleep_for(Clock::duration time) { sleep_until(Clock::now() + time); }

}  // namespace meshcast
