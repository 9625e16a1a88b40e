#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <thread>
#include <vector>

#include "transport/transport.h"

namespace meshcast::ucx {

// Who makes the workers of a process go on: its own thread, or users' threads that wait anyway. One of them at
// a time has the part. While nothing happens it sleeps in the kernel and is woken by what arrives, so a user's
// thread that waits for a message is woken by that message itself and not by another thread. A user's thread
// that has left is likely to be back soon: the own thread looks at the workers again only after kGrace.
class Progress {
 public:
  // turn: with the lock held, looks once at every worker; answers whether anything happened, or is to be told.
  // arm: makes the file descriptors readable at the next event, or answers false if there has been one. tell:
  // called without the lock after such a turn. due: when a turn is needed though nothing arrives.
  struct Calls {
    std::function<bool()> turn;
    std::function<bool()> arm;
    std::function<void()> tell;
    std::function<TimePoint()> due;
  };

  Progress(std::mutex& mutex, const std::vector<int>& event_fds, Calls calls);
  ~Progress();  // stop() comes before

  void drive(const std::function<bool()>& done, TimePoint limit);

  // Waits, with the lock held, until messages have made it true. After stop() none do.
  void wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& reached);

  // What a sleeper waits for may have changed. Any thread, with or without the lock.
  void wake();

  // Joins the thread, and waits until no user's thread is left in drive(). Answers whether that was so within
  // the limit: what a thread tells may hold it up.
  bool stop(TimePoint limit = TimePoint::max());

 private:
  static constexpr int kEmptyTurns = 64;  // before the part's holder falls asleep
  static constexpr std::chrono::microseconds kGrace{200};

  void begin(const std::vector<int>& event_fds);
  void close_all();
  void loop();
  void enter();
  void leave();
  static void sleep(int fd, TimePoint limit);

  std::mutex& mutex_;
  const Calls calls_;
  int events_ = -1;       // epoll: the workers
  int thread_poll_ = -1;  // epoll: events_ while listens_, thread_bell_, grace_
  int driver_poll_ = -1;  // epoll: events_ and driver_bell_
  int thread_bell_ = -1;  // eventfds
  int driver_bell_ = -1;
  int grace_ = -1;  // timerfd: since the last driver left

  std::condition_variable changed_;  // drivers, the part, stopping_, ended_; also after each telling
  std::atomic<int> drivers_{0};      // changed with the lock held
  bool taken_ = false;               // a driver has the part
  bool listens_ = true;              // the own thread is woken by events
  std::atomic<bool> thread_sleeps_{false};
  std::atomic<bool> driver_sleeps_{false};
  bool stopping_ = false;
  bool ended_ = false;  // the thread has left loop()
  std::thread thread_;
};

}  // namespace meshcast::ucx
