#include "transport/shm_progress.h"

#include <stdexcept>
#include <string>
#include <utility>

#include "common/of_process.h"
#include "common/thread_name.h"

namespace meshcast {
namespace {

// So many drives since it last fell asleep, and the thread looks by itself: being woken costs more.
constexpr uint64_t kManyDrives = 4;

OfProcess<ShmProgress> progress_of_process;

}  // namespace

std::shared_ptr<ShmProgress> ShmProgress::of_process() {
  return progress_of_process.get([] { return std::make_shared<ShmProgress>(); });
}

ShmProgress::~ShmProgress() {
  if (origin_.foreign()) {
    if (thread_.joinable()) thread_.detach();  // it is the parent's, and so is the bell
    return;
  }
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
  }
  bell_.wake(ShmSleeper::Thread);
  if (thread_.joinable()) thread_.join();
}

ShmProgress::Place::Place(std::shared_ptr<ShmProgress> progress) : progress_(std::move(progress)) {
  const std::lock_guard lock(progress_->mutex_);
  auto& entries = progress_->entries_;
  while (number_ < entries.size() && entries[number_].placed) ++number_;
  if (number_ == kMaxShmGroups) {
    throw std::runtime_error("this process has " + std::to_string(kMaxShmGroups) +
                             " groups with shared memory; more are not possible");
  }
  if (number_ == entries.size()) entries.emplace_back();
  entries[number_].placed = true;
}

ShmProgress::Place::~Place() {
  if (progress_->origin_.foreign()) return;  // in a forked child the lock may be held for ever
  const std::lock_guard lock(progress_->mutex_);
  progress_->entries_[number_].placed = false;
}

void ShmProgress::Place::call(ShmHalf half) const { progress_->bell_.call(number_, half); }

void ShmProgress::Place::enter(Group& group) const {
  {
    const std::lock_guard lock(progress_->mutex_);
    if (!progress_->thread_.joinable()) {
      progress_->thread_ = std::thread([progress = progress_.get()] {
        name_this_thread("mc-shm");
        progress->loop();
      });
    }
    progress_->entries_[number_].group = &group;
  }
  // Calls that came before this found nobody.
  call(ShmHalf::Sending);
  call(ShmHalf::Receiving);
}

// After this no thread is in a turn of the group, or will be: it may be destroyed.
void ShmProgress::Place::leave() const {
  std::unique_lock lock(progress_->mutex_);
  progress_->entries_[number_].group = nullptr;
  progress_->left_.wait(lock, [this] { return progress_->entries_[number_].inside() == 0; });
}

// A group's half has one thread at a time. Who comes meanwhile leaves a note (`again`), and who is inside calls
// the half once more when it leaves: so no call is lost, and nobody waits with a lock held while bytes are
// copied.
bool ShmProgress::serve(ShmHalf half, bool driver, uint32_t* cursor) {
  const int taken = bell_.take(half, cursor);
  if (taken < 0) return false;
  const auto number = static_cast<uint32_t>(taken);
  const auto gate = [&]() -> Gate& { return entries_[number].gates[static_cast<size_t>(half)]; };
  std::unique_lock lock(mutex_);
  // A call for a group that has gone, or is still to come: that one calls itself then.
  if (number >= entries_.size() || !entries_[number].group) return true;
  if (std::exchange(gate().taken, true)) {
    gate().again = true;
    return true;
  }
  Group* group = entries_[number].group;
  lock.unlock();
  const bool more = group->turn(half, driver);
  lock.lock();
  gate().taken = false;
  // The half may be another thread's by now.
  if (std::exchange(gate().again, false) || more) bell_.call(number, half);
  if (!entries_[number].group) left_.notify_all();
  return true;
}

// Who is woken by what. Nobody, where somebody is awake who will look.
void ShmProgress::announce_locked() {
  const ShmSleeper thread = thread_sleeps_ && !dozes_ ? ShmSleeper::Thread : ShmSleeper::Nobody;
  const ShmSleeper driver = driver_sleeps_ ? ShmSleeper::Driver : ShmSleeper::Nobody;
  bell_.announce(ShmHalf::Receiving, driven_ ? driver : thread);
  bell_.announce(ShmHalf::Sending, driven_ ? (thread_sleeps_ ? driver : ShmSleeper::Nobody) : thread);
}

// A driver takes in what arrives, and this thread sends beside it: then both directions go on at once on two
// cores. Without a driver it does both. Rings are read before it says that it sleeps, so that one in between is
// not slept through.
void ShmProgress::loop() {
  uint32_t cursors[2] = {0, 0};
  uint64_t drives = 0;  // at the last time that this fell asleep
  for (;;) {
    bool driven = false;
    bool stopping = false;
    {
      const std::lock_guard lock(mutex_);
      driven = driven_;
      stopping = stopping_;
    }
    if (stopping) return;
    bool any = serve(ShmHalf::Sending, false, &cursors[0]);
    if (!driven) any |= serve(ShmHalf::Receiving, false, &cursors[1]);
    if (any) continue;
    const uint32_t rings = bell_.rings();
    TimePoint limit = TimePoint::max();
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      thread_sleeps_ = true;
      driven = driven_;
      dozes_ = drives_ - std::exchange(drives, drives_) >= kManyDrives;
      announce_locked();
      if (dozes_) limit = Clock::now() + kGrace;
    }
    if (!bell_.called(ShmHalf::Sending) && (driven || !bell_.called(ShmHalf::Receiving)))
      bell_.sleep(ShmSleeper::Thread, rings, limit);
    const std::lock_guard lock(mutex_);
    thread_sleeps_ = false;
    announce_locked();
  }
}

void ShmProgress::drive(const std::function<bool()>& done, TimePoint limit) {
  {
    const std::lock_guard lock(mutex_);
    if (driven_ || stopping_) return;
    driven_ = true;
    ++drives_;
    announce_locked();
  }
  uint32_t cursors[2] = {0, 0};
  while (!done()) {
    bool any = serve(ShmHalf::Receiving, true, &cursors[1]);
    if (thread_sleeps_) any |= serve(ShmHalf::Sending, true, &cursors[0]);
    if (Clock::now() >= limit) break;
    if (any) continue;
    const uint32_t rings = bell_.rings();
    const auto sleeps = [&](bool now) {
      const std::lock_guard lock(mutex_);
      driver_sleeps_ = now;
      announce_locked();
    };
    sleeps(true);
    if (!done() && !bell_.called(ShmHalf::Receiving) && !(thread_sleeps_ && bell_.called(ShmHalf::Sending)))
      bell_.sleep(ShmSleeper::Driver, rings, limit);
    sleeps(false);
  }
  bool alone = false;
  {
    const std::lock_guard lock(mutex_);
    driven_ = false;
    announce_locked();
    alone = thread_sleeps_;
  }
  // What is left, or came meanwhile, is the thread's.
  if (alone && (bell_.called(ShmHalf::Sending) || bell_.called(ShmHalf::Receiving)))
    bell_.wake(ShmSleeper::Thread);
}

void ShmProgress::wake() noexcept {
  bool sleeps = false;
  {
    const std::lock_guard lock(mutex_);
    sleeps = driver_sleeps_;
  }
  if (sleeps) bell_.wake(ShmSleeper::Driver);
}

void ShmProgress::help() {
  {
    const std::lock_guard lock(mutex_);
    if (!thread_sleeps_) return;
    thread_sleeps_ = false;  // from now on, not only once it runs
    announce_locked();
  }
  bell_.wake(ShmSleeper::Thread);
}

}  // namespace meshcast
