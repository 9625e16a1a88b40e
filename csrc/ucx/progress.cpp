#include "ucx/progress.h"

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <system_error>
#include <utility>

#include <poll.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "common/error.h"
#include "common/thread_name.h"

namespace meshcast::ucx {
namespace {

int checked(int result, const char* what) {
  if (result < 0) throw std::system_error(errno, std::generic_category(), what);
  return result;
}

void watch(int poll, int fd, int operation, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.fd = fd;
  checked(epoll_ctl(poll, operation, fd, &event), "epoll_ctl");
}

// A full counter would be an error here, and is none: the bell rings already.
void ring(int bell) {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written = write(bell, &one, sizeof(one));
}

void silence(int bell) {
  uint64_t count = 0;
  [[maybe_unused]] const auto got = read(bell, &count, sizeof(count));
}

}  // namespace

Progress::Progress(std::mutex& mutex, const std::vector<int>& event_fds, Calls calls)
    : mutex_(mutex), calls_(std::move(calls)) {
  try {
    begin(event_fds);
  } catch (...) {  // no thread, no descriptor: what there is goes
    close_all();
    throw;
  }
}

Progress::~Progress() { close_all(); }

// Two sleepers need two polls: an event that wakes a driver must not wake the thread as well. events_ is in
// both, and `watch` with no events takes it out of the thread's without forgetting it.
void Progress::begin(const std::vector<int>& event_fds) {
  events_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
  thread_poll_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
  driver_poll_ = checked(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
  thread_bell_ = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
  driver_bell_ = checked(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
  grace_ = checked(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK), "timerfd_create");
  for (const int fd : event_fds) watch(events_, fd, EPOLL_CTL_ADD, EPOLLIN);
  for (const int fd : {events_, thread_bell_, grace_}) watch(thread_poll_, fd, EPOLL_CTL_ADD, EPOLLIN);
  for (const int fd : {events_, driver_bell_}) watch(driver_poll_, fd, EPOLL_CTL_ADD, EPOLLIN);
  try {
    thread_ = std::thread([this] {
      name_this_thread("mc-ucx");
      loop();
    });
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::Generic, no_thread("messages over UCX", error));
  }
}

void Progress::close_all() {
  for (const int fd : {events_, thread_poll_, driver_poll_, thread_bell_, driver_bell_, grace_})
    if (fd >= 0) close(fd);
}

bool Progress::stop(TimePoint limit) {
  {
    std::unique_lock lock(mutex_);
    stopping_ = true;
    changed_.notify_all();
    ring(thread_bell_);
    ring(driver_bell_);
    if (!changed_.wait_until(lock, limit, [this] { return drivers_ == 0 && ended_; })) return false;
  }
  if (thread_.joinable()) thread_.join();
  return true;
}

// Where the driver leaves at this moment, the thread still looks once its grace is over.
void Progress::wake() {
  if (drivers_ > 0) {
    if (driver_sleeps_) ring(driver_bell_);
  } else if (thread_sleeps_) {
    ring(thread_bell_);
  }
}

// Who moves messages does not tell in every case that it did: this looks again soon.
void Progress::wait(std::unique_lock<std::mutex>& lock, const std::function<bool()>& reached) {
  while (!reached() && !stopping_) {
    wake();
    changed_.wait_for(lock, std::chrono::milliseconds(5));
  }
}

// Until an event, a ring, or the limit.
void Progress::sleep(int fd, TimePoint limit) {
  const auto left = std::max<int64_t>(0, std::chrono::nanoseconds(limit - Clock::now()).count());
  const timespec time{static_cast<time_t>(left / 1'000'000'000), static_cast<long>(left % 1'000'000'000)};
  pollfd what{fd, POLLIN, 0};
  ppoll(&what, 1, &time, nullptr);
}

// While drivers have the part, the thread sleeps without a limit that matters: leave() starts the grace timer,
// and that wakes it. It listens to events again only then, so that a driver's messages cost no wake-up here.
void Progress::loop() {
  std::unique_lock lock(mutex_);
  int empty = 0;
  while (!stopping_) {
    if (drivers_ == 0) {
      if (!std::exchange(listens_, true)) watch(thread_poll_, events_, EPOLL_CTL_MOD, EPOLLIN);
      const bool busy = calls_.turn();
      if (busy) {
        lock.unlock();
        calls_.tell();
        lock.lock();
        changed_.notify_all();
      }
      // Arming costs a system call for each worker, so some turns are tried in vain before.
      empty = busy ? 0 : empty + 1;
      if (empty < kEmptyTurns || drivers_ > 0 || stopping_ || !calls_.arm()) continue;
    }
    empty = 0;
    const TimePoint due = drivers_ > 0 ? Clock::now() + std::chrono::hours(1) : calls_.due();
    thread_sleeps_ = true;
    lock.unlock();
    sleep(thread_poll_, due);
    thread_sleeps_ = false;
    silence(thread_bell_);
    silence(grace_);
    lock.lock();
  }
  ended_ = true;
  changed_.notify_all();
}

// The first driver silences the thread: it no longer hears of events, or its grace does not end.
void Progress::enter() {
  if (drivers_++ > 0) return;
  if (std::exchange(listens_, false)) {
    watch(thread_poll_, events_, EPOLL_CTL_MOD, 0);
  } else {
    const itimerspec never{};
    timerfd_settime(grace_, 0, &never, nullptr);
  }
}

void Progress::leave() {
  if (--drivers_ == 0) {
    const itimerspec soon{{}, {0, std::chrono::nanoseconds(kGrace).count()}};
    timerfd_settime(grace_, 0, &soon, nullptr);
  }
  changed_.notify_all();
}

// Several drivers take turns under the lock. One of them sleeps for all (taken_): the others wait until it, or
// who leaves, notifies them.
void Progress::drive(const std::function<bool()>& done, TimePoint limit) {
  std::unique_lock lock(mutex_);
  if (stopping_) return;
  enter();
  int empty = 0;
  while (!stopping_ && !done() && Clock::now() < limit) {
    if (taken_) {
      changed_.wait_until(lock, limit);
      continue;
    }
    const bool busy = calls_.turn();
    if (busy) {
      changed_.notify_all();  // another driver may have turns meanwhile
      lock.unlock();
      calls_.tell();
      lock.lock();
      changed_.notify_all();
    }
    empty = busy ? 0 : empty + 1;
    if (taken_ || empty < kEmptyTurns || !calls_.arm()) continue;
    empty = 0;
    const TimePoint due = std::min(limit, calls_.due());
    taken_ = true;
    driver_sleeps_ = true;
    lock.unlock();
    if (!done()) sleep(driver_poll_, due);  // asked again: wake() rings only for who sleeps
    driver_sleeps_ = false;
    silence(driver_bell_);
    lock.lock();
    taken_ = false;
    if (drivers_ > 1) changed_.notify_all();  // the ring, and the part, may be for one that waits for it
  }
  leave();
}

}  // namespace meshcast::ucx
