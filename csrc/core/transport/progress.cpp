#include "transport/progress.h"

#include <algorithm>
#include <limits>
#include <stdexcept>
#include <system_error>
#include <utility>

#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include "common/error.h"
#include "common/of_process.h"
#include "common/thread_name.h"

namespace meshcast {
namespace {

OfProcess<Progress> progress_of_process;

Descriptor made(int fd, const char* what) {
  if (fd < 0) fail_with_errno(what);
  return Descriptor(fd);
}

void watch(const Descriptor& poll, const Descriptor& what, int operation, uint32_t events) {
  epoll_event event{};
  event.events = events;
  event.data.fd = what.get();
  if (epoll_ctl(poll.get(), operation, what.get(), &event) != 0) fail_with_errno("epoll_ctl");
}

}  // namespace

std::shared_ptr<Progress> Progress::of_process() {
  return progress_of_process.get([] { return std::make_shared<Progress>(); });
}

// Two sleepers need two polls: an event for a driver must not wake the thread. Doorbells are edge-triggered, so
// that no thread has to read them.
Progress::Progress()
    : changed_(std::make_unique<std::condition_variable>()),
      timer_(made(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK), "timerfd_create")) {
  for (Side& side : sides_) {
    side.poll = made(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
    side.doorbell = made(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK), "eventfd");
    watch(side.poll, side.doorbell, EPOLL_CTL_ADD, EPOLLIN | EPOLLET);
  }
  watch(side(Who::Thread).poll, timer_, EPOLL_CTL_ADD, EPOLLIN);
  try {
    thread_ = std::thread([this] {
      name_this_thread("mc-progress");
      loop();
    });
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::Generic, no_thread("messages", error));
  }
}

Progress::~Progress() {
  if (origin_.foreign()) {
    thread_.detach();                       // it is the parent's
    static_cast<void>(changed_.release());  // its end would wait for threads that are not there
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  ring(Who::Thread);
  thread_.join();
}

void Progress::add(Source& source) {
  const std::lock_guard lock(mutex_);
  const auto free = std::find_if(entries_.begin(), entries_.end(),
                                 [](const Entry& entry) { return !entry.source && entry.inside == 0; });
  if (free == entries_.end()) throw std::logic_error("Progress: too many sources");
  Entry entry;
  if (const auto fds = source.fds(); !fds.empty()) {
    entry.events = made(epoll_create1(EPOLL_CLOEXEC), "epoll_create1");
    for (const int fd : fds) {
      epoll_event event{};
      event.events = EPOLLIN;
      if (epoll_ctl(entry.events.get(), EPOLL_CTL_ADD, fd, &event) != 0) fail_with_errno("epoll_ctl");
    }
    watch(side(Who::Thread).poll, entry.events, EPOLL_CTL_ADD, EPOLLIN);
    watch(side(Who::Driver).poll, entry.events, EPOLL_CTL_ADD, 0);
  }
  if (const int alarm = source.alarm(); alarm >= 0) {
    epoll_event event{};
    event.events = EPOLLIN;
    if (epoll_ctl(side(Who::Thread).poll.get(), EPOLL_CTL_ADD, alarm, &event) != 0)
      fail_with_errno("epoll_ctl");
  }
  entry.source = &source;
  *free = std::move(entry);
  source.kept_by(Keeper::Thread);
  ring(Who::Thread);
}

bool Progress::remove(Source& source, TimePoint limit) {
  std::unique_lock lock(mutex_);
  Entry* const entry = find_locked(&source);
  if (!entry) return true;
  entry->source = nullptr;
  entry->events = Descriptor();  // the polls forget it
  return changed_->wait_until(lock, limit, [entry] { return entry->inside == 0; });
}

void Progress::ring(Who who) const noexcept {
  const uint64_t one = 1;
  [[maybe_unused]] const auto written =
      write(doorbell(who), &one, sizeof(one));  // a full counter rings already
}

void Progress::wake(Who who) noexcept {
  if (origin_.foreign()) return;
  if (who == Who::Thread) asked_ = true;
  if (side(who).sleeps) ring(who);
}

Progress::Entry* Progress::find_locked(const Source* source) {
  const auto found = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& entry) { return source && entry.source == source; });
  return found == entries_.end() ? nullptr : &*found;
}

void Progress::keep_locked(Entry& entry, Keeper keeper) {
  const bool thread = keeper == Keeper::Thread;
  if (entry.events.get() >= 0 && thread != (entry.keeper == Keeper::Thread)) {
    watch(side(thread ? Who::Driver : Who::Thread).poll, entry.events, EPOLL_CTL_MOD, 0);
    watch(side(thread ? Who::Thread : Who::Driver).poll, entry.events, EPOLL_CTL_MOD, EPOLLIN);
  }
  entry.keeper = keeper;
  entry.source->kept_by(keeper);
}

void Progress::set_timer(std::chrono::nanoseconds after) {
  const itimerspec when{{}, {0, after.count()}};
  timerfd_settime(timer_.get(), 0, &when, nullptr);
  timer_runs_ = after.count() > 0;
}

void Progress::enter_locked(std::initializer_list<Source*> sources) {
  if (drivers_++ == 0) close_drives_ = Clock::now() - left_ < kGrace ? close_drives_ + 1 : 0;
  bool more = false;
  for (Source* const source : sources) {
    Entry* const entry = find_locked(source);
    if (!entry || entry->drivers++ > 0) continue;
    entry->in_vain = 0;
    keep_locked(*entry, Keeper::Driver);
    more = true;
  }
  if (more && taken_) ring(Who::Driver);
}

bool Progress::any_nobodys_locked() const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [](const Entry& entry) { return entry.source && entry.keeper == Keeper::Nobody; });
}

// A driver that leaves a source with descriptors has not armed it, so the thread has to check it in any case.
void Progress::leave_locked(std::initializer_list<Source*> sources) {
  left_ = Clock::now();
  bool grace = false;
  for (Source* const source : sources) {
    Entry* const entry = find_locked(source);
    if (!entry || --entry->drivers > 0) continue;
    const bool here = entry->events.get() >= 0 || close_drives_ >= kManyDrives;
    keep_locked(*entry, here ? Keeper::Nobody : Keeper::Thread);
    grace = grace || here;
  }
  // A timer that runs ends earlier: the thread then sets it to the rest.
  if (grace && !timer_runs_) set_timer(kGrace);
  if (--drivers_ > 0) changed_->notify_all();
}

void Progress::take_over_locked() {
  const bool asked = asked_.exchange(false);
  if (!any_nobodys_locked()) return;
  const auto left = left_ + kGrace - Clock::now();
  if (!asked && left > left.zero()) {
    if (!timer_runs_) set_timer(left);
    return;
  }
  for (Entry& entry : entries_) {
    if (entry.source && entry.keeper == Keeper::Nobody) keep_locked(entry, Keeper::Thread);
  }
}

// Calls all sources that may have work for `who`, without the lock. Returns whether any call returned true.
template <typename Call>
bool Progress::each(std::unique_lock<std::mutex>& lock, Who who, const Call& call) {
  struct Called {
    Entry* entry;
    Source* source;
    bool answer;
  };
  std::array<Called, kMostSources> called{};
  size_t count = 0;
  for (Entry& entry : entries_) {
    if (!entry.source || (who == Who::Driver && !keeps(who, entry))) continue;
    ++entry.inside;
    called[count++] = {&entry, entry.source, false};
  }
  lock.unlock();
  for (size_t i = 0; i < count; ++i) called[i].answer = call(*called[i].source);
  lock.lock();
  bool any = false;
  for (size_t i = 0; i < count; ++i) {
    Entry& entry = *called[i].entry;
    any = any || called[i].answer;
    entry.in_vain = called[i].answer ? 0 : std::min(entry.in_vain, std::numeric_limits<int>::max() - 1) + 1;
    if (--entry.inside == 0 && !entry.source) changed_->notify_all();
  }
  return any;
}

bool Progress::turns(std::unique_lock<std::mutex>& lock, Who who) {
  return each(lock, who, [who](Source& source) { return source.turn(who); });
}

// An idle source does not keep a thread awake if another source is active.
bool Progress::may_sleep_locked(Who who) const {
  return std::none_of(entries_.begin(), entries_.end(), [who](const Entry& entry) {
    return entry.source && keeps(who, entry) && entry.in_vain < entry.source->patience();
  });
}

// It announces that it sleeps, checks once more, and then sleeps: an event meanwhile is seen, or rings.
void Progress::sleep(std::unique_lock<std::mutex>& lock, Who who, const std::function<bool()>& done,
                     TimePoint limit) {
  Side& mine = side(who);
  mine.sleeps = true;
  const bool busy = each(lock, who, [who](Source& source) { return !source.arm(who); });
  for (const Entry& entry : entries_) {
    if (entry.source && keeps(who, entry)) limit = std::min(limit, entry.source->due());
  }
  if (!busy && !stopping_ && !(who == Who::Thread && asked_)) {
    // A driver that drives for long wakes no other thread meanwhile.
    if (who == Who::Driver && timer_runs_ && !any_nobodys_locked()) set_timer({});
    lock.unlock();
    const bool timer_ended = !done() && wait(mine, limit);
    lock.lock();
    if (timer_ended) timer_runs_ = false;
  }
  mine.sleeps = false;
  for (const Entry& entry : entries_) {
    if (entry.source) entry.source->disarm(who);
  }
}

// Answers whether the timer has ended.
bool Progress::wait(const Side& mine, TimePoint limit) {
  int milliseconds = -1;
  if (limit != TimePoint::max()) {
    const auto left = std::chrono::ceil<std::chrono::milliseconds>(limit - Clock::now()).count();
    milliseconds = static_cast<int>(std::clamp<int64_t>(left, 0, 3'600'000));
  }
  std::array<epoll_event, 2 + kMostSources> events{};
  const int count = epoll_wait(mine.poll.get(), events.data(), static_cast<int>(events.size()), milliseconds);
  for (int i = 0; i < count; ++i) {
    uint64_t times = 0;
    if (events[static_cast<size_t>(i)].data.fd == timer_.get())
      return read(timer_.get(), &times, sizeof(times)) > 0;
  }
  return false;
}

void Progress::loop() {
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    take_over_locked();
    if (turns(lock, Who::Thread) || !may_sleep_locked(Who::Thread)) continue;
    sleep(
        lock, Who::Thread, [] { return false; }, TimePoint::max());
  }
}

// Several drivers take turns, and one of them sleeps for all (taken_): the others wait until it, or a driver
// that leaves, notifies them.
void Progress::drive(std::initializer_list<Source*> sources, const std::function<bool()>& done,
                     TimePoint limit) {
  if (origin_.foreign()) return;
  std::unique_lock lock(mutex_);
  enter_locked(sources);
  while (!done() && Clock::now() < limit) {
    if (taken_) {
      changed_->wait_until(lock, limit);
      continue;
    }
    if (turns(lock, Who::Driver) || taken_ || !may_sleep_locked(Who::Driver)) continue;
    taken_ = true;
    sleep(lock, Who::Driver, done, limit);
    taken_ = false;
    if (drivers_ > 1) changed_->notify_all();  // the ring may be for another driver, which then sleeps for all
  }
  leave_locked(sources);
}

void drive(std::initializer_list<Source*> sources, const std::function<bool()>& done, TimePoint limit) {
  const auto* const first = std::find_if(sources.begin(), sources.end(), [](const Source* s) { return s; });
  if (first != sources.end()) (*first)->progress().drive(sources, done, limit);
}

void wake_driver(Source* source) noexcept {
  if (source) source->progress().wake(Who::Driver);
}

}  // namespace meshcast
