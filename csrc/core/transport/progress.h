#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <initializer_list>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "common/forks.h"
#include "transport/transport.h"
#include "transport/unix_socket.h"

namespace meshcast {

class Progress;

// The drivers of messages: the process's own thread, or a user's thread that waits anyway and drives.
enum class Who : uint8_t { Thread, Driver };

// The keeper of a source. `Nobody`: its last driver has just left and is likely to be back soon. Events wake no
// thread until the thread looks by itself.
enum class Keeper : uint8_t { Thread, Driver, Nobody };

// A path of messages, such as all connections of a process over one network. Several threads may call it at a
// time.
class Source {
 public:
  virtual ~Source() = default;

  virtual Progress& progress() = 0;

  // Does a bounded part of the work that is due, and waits for nothing. Returns whether anything happened.
  virtual bool turn(Who who) = 0;
  // `who` is about to sleep, and checks once more: false if there is work. Until disarm(), events ring the
  // doorbell of `who`, or make a descriptor of fds() readable.
  virtual bool arm(Who who) = 0;

  // Called under a lock of Progress: these must not call back.
  virtual void disarm(Who /*who*/) {}
  virtual void kept_by(Keeper keeper) = 0;
  virtual int patience() { return 1; }                  // turns without an event before its keeper sleeps
  virtual TimePoint due() { return TimePoint::max(); }  // when a turn is needed without an event
  virtual std::vector<int> fds() { return {}; }         // always the same
  // Readable when the thread has to arm() the source, whatever its keeper: for rare events. -1: there is none.
  virtual int alarm() { return -1; }
};

// Drives the messages of a process: one thread, and users' threads that wait anyway. While nothing happens they
// sleep in the kernel, and an event wakes the keeper of its source. So a message to a driver wakes no other
// thread. A driver keeps the sources that it waits for, and the thread all others; several drivers take turns,
// and one of them sleeps for all. If drives follow each other closely, the thread checks the sources that they
// kept only kGrace after the last.
class Progress {
 public:
  static std::shared_ptr<Progress> of_process();  // made for the first source, destroyed with the last

  Progress();  // throws Error where no thread can be had, std::system_error where no descriptor can
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void add(Source& source);
  // Afterwards it has no more turns, and none is under way; not from a turn. Returns whether that was reached
  // within the limit: a callback may block the thread.
  bool remove(Source& source, TimePoint limit = TimePoint::max());

  // See drive() below.
  void drive(std::initializer_list<Source*> sources, const std::function<bool()>& done, TimePoint limit);

  // To be called when the condition of a sleeper may have changed. Any thread, with any lock held.
  void wake(Who who) noexcept;

  int doorbell(Who who) const { return side(who).doorbell.get(); }  // an eventfd: a write wakes its sleeper

 private:
  static constexpr size_t kMostSources = 2;
  static constexpr uint32_t kManyDrives = 4;  // that follow each other within kGrace
  static constexpr std::chrono::microseconds kGrace{200};

  struct Entry {
    Source* source = nullptr;
    Keeper keeper = Keeper::Thread;
    int drivers = 0;
    int inside = 0;     // threads that call it
    Descriptor events;  // epoll: its fds(); none where it has none
    int in_vain = 0;    // turns since something happened, up to that many
  };
  // The descriptors of one of the two sleepers.
  struct Side {
    Descriptor poll;  // epoll: `doorbell`, and the events of entries that it keeps
    Descriptor doorbell;
    std::atomic<bool> sleeps{false};
  };

  Side& side(Who who) { return sides_[static_cast<size_t>(who)]; }
  const Side& side(Who who) const { return sides_[static_cast<size_t>(who)]; }
  static bool keeps(Who who, const Entry& entry) {
    return (who == Who::Thread) == (entry.keeper == Keeper::Thread);
  }

  void loop();
  void ring(Who who) const noexcept;
  Entry* find_locked(const Source* source);
  void take_over_locked();
  bool any_nobodys_locked() const;
  void keep_locked(Entry& entry, Keeper keeper);
  void enter_locked(std::initializer_list<Source*> sources);
  void leave_locked(std::initializer_list<Source*> sources);
  void set_timer(std::chrono::nanoseconds after);
  bool turns(std::unique_lock<std::mutex>& lock, Who who);
  bool may_sleep_locked(Who who) const;
  void sleep(std::unique_lock<std::mutex>& lock, Who who, const std::function<bool()>& done, TimePoint limit);
  bool wait(const Side& mine, TimePoint limit);
  template <typename Call>
  bool each(std::unique_lock<std::mutex>& lock, Who who, const Call& call);

  const Origin origin_;
  std::mutex mutex_;
  std::unique_ptr<std::condition_variable> changed_;  // of drivers_, taken_ and `inside`
  std::array<Entry, kMostSources> entries_;
  std::array<Side, 2> sides_;
  Descriptor timer_;         // timerfd, in the thread's poll: the grace is over
  bool timer_runs_ = false;  // or has ended, and the thread has not seen it yet
  int drivers_ = 0;
  bool taken_ = false;  // a driver sleeps for all
  TimePoint left_{};    // when the last driver did
  uint32_t close_drives_ = 0;
  std::atomic<bool> asked_{false};  // the thread was woken for something
  bool stopping_ = false;
  std::thread thread_;
};

// For a thread that is about to wait until `done`: drives the messages of these sources meanwhile (null: one
// that cannot be driven), so that no thread has to be woken to wake this one. Returns at `limit`, or earlier.
void drive(std::initializer_list<Source*> sources, const std::function<bool()>& done, TimePoint limit);

// To be called when the condition of a driver of this source may have become true for another reason.
void wake_driver(Source* source) noexcept;

}  // namespace meshcast
