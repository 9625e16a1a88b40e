#include "transport/shm_progress.h"

#include <array>
#include <stdexcept>
#include <string>
#include <utility>

#include <sys/epoll.h>
#include <sys/stat.h>

#include "common/of_process.h"

namespace meshcast {
namespace {

OfProcess<ShmProgress> shm_of_process;

}  // namespace

std::shared_ptr<ShmProgress> ShmProgress::of_process() {
  return shm_of_process.get([] { return std::make_shared<ShmProgress>(); });
}

ShmProgress::ShmProgress(std::shared_ptr<Progress> progress)
    : progress_(std::move(progress)), doorbell_(*progress_), watched_(epoll_create1(EPOLL_CLOEXEC)) {
  if (watched_.get() < 0) fail_with_errno("epoll_create1");
  progress_->add(*this);
}

ShmProgress::~ShmProgress() {
  if (!origin_.foreign()) progress_->remove(*this);
}

std::shared_ptr<Doorbell> ShmProgress::doorbell_of_peer(const std::vector<int>& fds) {
  struct stat memory {};
  if (fstat(fds.front(), &memory) != 0) fail_with_errno("fstat");
  const std::lock_guard lock(mutex_);
  std::erase_if(peers_, [](const auto& each) { return each.second.expired(); });
  auto& known = peers_[{memory.st_dev, memory.st_ino}];
  auto doorbell = known.lock();
  if (!doorbell) {
    known = doorbell = std::make_shared<Doorbell>(fds);
    patience_ = patience_locked();
  }
  return doorbell;
}

// If there are fewer cores than processes, a thread that polls keeps the one that it waits for from its core.
int ShmProgress::patience_locked() const {
  auto cores = doorbell_.cores();
  size_t processes = 1;
  for (const auto& each : peers_) {
    const auto peer = each.second.lock();
    if (!peer || peer->cores().none()) return kPatience;
    cores |= peer->cores();
    ++processes;
  }
  return cores.none() || processes <= cores.count() ? kPatience : 1;
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

void ShmProgress::Place::call(ShmHalf half) const { progress_->doorbell_.call(number_, half); }

void ShmProgress::Place::enter(Group& group) const {
  {
    const std::lock_guard lock(progress_->mutex_);
    progress_->entries_[number_].group = &group;
  }
  // Earlier calls found no group.
  call(ShmHalf::Sending);
  call(ShmHalf::Receiving);
}

// After this no thread is in a turn of the group, or will be: it may be destroyed.
void ShmProgress::Place::leave() const {
  std::unique_lock lock(progress_->mutex_);
  progress_->entries_[number_].group = nullptr;
  progress_->left_.wait(lock, [this] { return progress_->entries_[number_].inside() == 0; });
}

// Reports once: the end of a peer is final.
void ShmProgress::Place::watch(int fd) const {
  epoll_event event{};
  event.events = EPOLLIN | EPOLLRDHUP | EPOLLONESHOT;
  event.data.u64 = number_;
  progress_->watches_ = true;
  if (epoll_ctl(progress_->watched_.get(), EPOLL_CTL_ADD, fd, &event) != 0) fail_with_errno("epoll_ctl");
}

// Answers whether anything that is watched has happened.
bool ShmProgress::look() {
  std::array<epoll_event, 16> events{};
  const int count = epoll_wait(watched_.get(), events.data(), static_cast<int>(events.size()), 0);
  for (int i = 0; i < count; ++i) {
    const auto number = static_cast<uint32_t>(events[static_cast<size_t>(i)].data.u64);
    {
      const std::lock_guard lock(mutex_);
      if (!entries_[number].group) continue;  // it has ended
      entries_[number].group->alarmed();
    }
    doorbell_.call(number, ShmHalf::Sending);
    doorbell_.call(number, ShmHalf::Receiving);
  }
  return count > 0;
}

// A group's half has one thread at a time. A thread that comes meanwhile sets `again`, and the thread inside
// calls the half once more when it leaves: so no call is lost, and no thread waits with a lock held while bytes
// are copied.
bool ShmProgress::serve(ShmHalf half, Who who) {
  auto& cursor = cursors_[static_cast<size_t>(half)];
  uint32_t next = cursor;
  const int taken = doorbell_.take(half, &next);
  if (taken < 0) return false;
  cursor = next;
  const auto number = static_cast<uint32_t>(taken);
  const auto gate = [&]() -> Gate& { return entries_[number].gates[static_cast<size_t>(half)]; };
  std::unique_lock lock(mutex_);
  // A call for a group that has ended, or has not entered yet: that one calls itself when it enters.
  if (number >= entries_.size() || !entries_[number].group) return true;
  if (std::exchange(gate().taken, true)) {
    gate().again = true;
    return true;
  }
  Group* group = entries_[number].group;
  lock.unlock();
  const bool more = group->turn(half, who);
  lock.lock();
  gate().taken = false;
  // The half may be another thread's by now.
  if (std::exchange(gate().again, false) || more) doorbell_.call(number, half);
  if (!entries_[number].group) left_.notify_all();
  return true;
}

// Announces the sleeper of each half: none if a thread is awake that will look.
void ShmProgress::announce_locked() {
  const ShmSleeper thread =
      sleeps(Who::Thread) && keeper_ != Keeper::Nobody ? ShmSleeper::Thread : ShmSleeper::Nobody;
  const ShmSleeper driver = sleeps(Who::Driver) ? ShmSleeper::Driver : ShmSleeper::Nobody;
  const bool driven = keeper_ == Keeper::Driver;
  doorbell_.announce(ShmHalf::Receiving, driven ? driver : thread);
  doorbell_.announce(ShmHalf::Sending, driven ? (sleeps(Who::Thread) ? driver : ShmSleeper::Nobody) : thread);
}

// A driver receives, and the thread sends: then both directions run at the same time on two cores. Without a
// driver the thread does both.
bool ShmProgress::turn(Who who) {
  const bool sends = who == Who::Thread || sleeps(Who::Thread);
  const bool receives = who == Who::Driver || keeper_ != Keeper::Driver;
  const bool received = receives && serve(ShmHalf::Receiving, who);
  return (sends && serve(ShmHalf::Sending, who)) || received;
}

bool ShmProgress::arm(Who who) {
  {
    const std::lock_guard lock(mutex_);
    sleeps_[static_cast<size_t>(who)] = true;
    announce_locked();
  }
  if (who == Who::Thread && watches_ && look()) return false;
  const bool sends = who == Who::Thread || sleeps(Who::Thread);
  const bool receives = who == Who::Driver || keeper_ != Keeper::Driver;
  return !(receives && doorbell_.called(ShmHalf::Receiving)) && !(sends && doorbell_.called(ShmHalf::Sending));
}

void ShmProgress::disarm(Who who) {
  const std::lock_guard lock(mutex_);
  sleeps_[static_cast<size_t>(who)] = false;
  announce_locked();
}

void ShmProgress::kept_by(Keeper keeper) {
  {
    const std::lock_guard lock(mutex_);
    keeper_ = keeper;
    announce_locked();
  }
  // The thread takes over work that a driver has left, or that came meanwhile.
  if (keeper != Keeper::Driver && sleeps(Who::Thread) &&
      (doorbell_.called(ShmHalf::Sending) || doorbell_.called(ShmHalf::Receiving)))
    doorbell_.wake(ShmSleeper::Thread);
}

void ShmProgress::help() {
  {
    const std::lock_guard lock(mutex_);
    if (!sleeps(Who::Thread)) return;
    sleeps_[static_cast<size_t>(Who::Thread)] = false;  // from now on, not only once it runs
    announce_locked();
  }
  doorbell_.wake(ShmSleeper::Thread);
}

}  // namespace meshcast
