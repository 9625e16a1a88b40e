#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <stdexcept>
#include <string>
#include <unordered_map>
#include <vector>

#include "common/sync.h"

#if defined(__SANITIZE_THREAD__)
#include <sanitizer/tsan_interface.h>
extern "C" {
void AnnotateIgnoreReadsBegin(const char* file, int line);
void AnnotateIgnoreReadsEnd(const char* file, int line);
void AnnotateIgnoreWritesBegin(const char* file, int line);
void AnnotateIgnoreWritesEnd(const char* file, int line);
}
#endif

namespace meshcast::simulation {

// ThreadSanitizer sees simulated threads as threads that nothing orders but the locks of the core. What the
// simulation itself does in them is not looked at; where it hands something from one to another, it says so.
#if defined(__SANITIZE_THREAD__)
#define MESHCAST_UNWATCHED __attribute__((no_sanitize("thread"), noinline))
class Unwatched {
 public:
  Unwatched() {
    AnnotateIgnoreReadsBegin(__FILE__, __LINE__);
    AnnotateIgnoreWritesBegin(__FILE__, __LINE__);
  }
  ~Unwatched() {
    AnnotateIgnoreWritesEnd(__FILE__, __LINE__);
    AnnotateIgnoreReadsEnd(__FILE__, __LINE__);
  }
  Unwatched(const Unwatched&) = delete;
  Unwatched& operator=(const Unwatched&) = delete;
};
inline void hand_over(void* what) { __tsan_release(what); }
inline void take_over(void* what) { __tsan_acquire(what); }
#else
#define MESHCAST_UNWATCHED
struct Unwatched {
  Unwatched() {}  // not defaulted: it is a variable that nobody uses
};
inline void hand_over(void* /*what*/) {}
inline void take_over(void* /*what*/) {}
#endif

// A property that a program must have does not hold.
struct Violation : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Runs simulated threads one at a time, in virtual time: a seed decides at each lock, wait and request who runs
// next, so a program that fails does so again. Threads are fibers of the thread that calls run(); each belongs
// to a process, which can be frozen. While somebody can run, an action takes some microseconds; else time jumps
// to the next limit that somebody waits for.
class Scheduler final : public Simulation {
 public:
  explicit Scheduler(uint64_t seed);
  ~Scheduler() override;

  std::mt19937_64& random() { return random_; }
  int64_t draw(int64_t low, int64_t high);  // either may come
  bool chance(int64_t one_in) { return draw(1, one_in) == 1; }

  uint64_t start_in(uint64_t process, std::function<void()> body);
  // Until all threads have ended. Throws Violation where some wait without a limit and nobody can wake them, or
  // at a virtual time of `limit`; and what a thread threw.
  void run(Clock::duration limit);

  void freeze(uint64_t process);  // its threads do not run from here on, also the calling one
  void thaw(uint64_t process);
  void at(TimePoint when, std::function<void()> event);  // runs between threads, and must not wait
  void yield();
  bool inside() const { return running_ != nullptr; }
  uint64_t thread() const;  // that runs
  uint64_t hand_overs() const { return hand_overs_; }
  Clock::duration elapsed() const { return time_ - TimePoint(kEpoch); }
  // Lets go of what singletons of a process were kept for.
  void end_process(uint64_t process) { kept_.erase(process); }

  bool runs_here() const noexcept override;
  TimePoint now() noexcept override;
  uint64_t process() noexcept override;
  void keep(std::shared_ptr<void> thing) override;
  void lock(const Mutex& mutex) override;
  void unlock(const Mutex& mutex) noexcept override;
  bool wait(const Condition& condition, TimePoint limit) override;
  void notify(const Condition& condition, bool all) noexcept override;
  void sleep_until(TimePoint limit) override;
  uint64_t start(std::function<void()> body) override;
  void join(uint64_t thread) override;

 private:
  struct Fiber;
  static constexpr std::chrono::hours kEpoch{1000};  // some time, so that differences do not underflow

  static void enter(unsigned high, unsigned low);
  bool block(const void* on, TimePoint limit);  // false at the limit
  void park(Fiber& me, const void* on, TimePoint limit);
  void leave_ready(const Fiber& fiber);
  void wake(Fiber& fiber, bool told);
  void wake_all(const void* on);
  void live(Fiber& me);
  void switch_to(Fiber& fiber);
  void switch_back();
  bool is_frozen(const Fiber& fiber) const;
  Fiber* choose();
  bool advance(TimePoint limit);

  std::mt19937_64 random_;
  TimePoint time_{kEpoch};
  // All orders are those of the seed: what is looked up by address is never gone over.
  std::unordered_map<uint64_t, std::unique_ptr<Fiber>> fibers_;
  std::vector<Fiber*> ready_;
  std::unordered_map<const void*, std::vector<Fiber*>> waiting_;  // by what they wait on
  std::multimap<TimePoint, Fiber*> limits_;                       // of those that wait
  std::vector<const void*> held_;                                 // mutexes
  std::multimap<TimePoint, std::function<void()>> events_;
  std::map<uint64_t, std::vector<std::shared_ptr<void>>> kept_;
  std::vector<uint64_t> frozen_;
  std::unique_ptr<Fiber> main_;
  Fiber* const hub_;  // the same, for code that sanitizers do not look at
  Fiber* running_ = nullptr;
  std::exception_ptr thrown_;
  uint64_t next_ = 1;
  uint64_t hand_overs_ = 0;
};

}  // namespace meshcast::simulation
