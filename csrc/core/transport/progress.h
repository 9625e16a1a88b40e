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

// Who makes messages go on: the process's own thread, or a user's thread that waits anyway and drives.
enum class Who : uint8_t { Thread, Driver };

// Whose a source is at a time. Nobody's: its last driver has just left and is likely to be back soon. What
// comes wakes nobody until the thread looks by itself.
enum class Keeper : uint8_t { Thread, Driver, Nobody };

// One way for messages to go: what a process has of a network, say. Several threads may call it at a time.
class Source {
 public:
  virtual ~Source() = default;

  virtual Progress& progress() = 0;

  // Does a bounded part of what there is to do, and waits for nothing. Answers whether anything happened.
  virtual bool turn(Who who) = 0;
  // `who` is about to sleep, and looks once more: false where there is something to do. Until disarm(), what
  // comes rings the doorbell of `who`, or makes a descriptor of fds() readable.
  virtual bool arm(Who who) = 0;

  // Called under a lock of Progress: these call nobody.
  virtual void disarm(Who /*who*/) {}
  virtual void kept_by(Keeper keeper) = 0;
  virtual int patience() { return 1; }                  // turns in vain before whoever keeps it falls asleep
  virtual TimePoint due() { return TimePoint::max(); }  // when a turn is needed though nothing comes
  virtual std::vector<int> fds() { return {}; }         // always the same
  // Readable where the thread is to arm() the source, whoever keeps it: for what is rare. -1: there is none.
  virtual int alarm() { return -1; }
};

// Makes the messages of a process go on: one thread, and users' threads that wait anyway. While nothing happens
// they sleep in the kernel, and what comes wakes the one that keeps its source. So a message to who drives
// wakes no other thread. Who drives keeps the sources that it waits for, and the thread all others; several
// drivers take turns, and one of them sleeps for all. Where drives follow each other closely, the thread looks
// at what they kept only kGrace after the last.
class Progress {
 public:
  static std::shared_ptr<Progress> of_process();  // made for the first source, gone with the last

  Progress();  // throws Error where no thread can be had, std::system_error where no descriptor can
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  void add(Source& source);
  // It has no turn any longer afterwards, nor is one under way; not from a turn. Answers whether that was so
  // within the limit: what a thread tells may hold it up.
  bool remove(Source& source, TimePoint limit = TimePoint::max());

  // See drive() below.
  void drive(std::initializer_list<Source*> sources, const std::function<bool()>& done, TimePoint limit);

  // What a sleeper waits for may have changed. Any thread, with any lock held.
  void wake(Who who) noexcept;

  int doorbell(Who who) const {
    return side(who).doorbell.get();
  }  // an eventfd: who writes to it wakes its sleeper

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
  // What one of the two sleeps on.
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
  std::unique_ptr<std::condition_variable> changed_;  // drivers, the sleeping one, who is inside
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

// For a thread that is about to wait until `done`: makes the messages of these sources go on meanwhile (null:
// one that cannot be driven), so that no thread has to be woken to wake this one. Returns at `limit`, or
// earlier.
void drive(std::initializer_list<Source*> sources, const std::function<bool()>& done, TimePoint limit);

// What a driver of this source waits for may have become true by something else.
void wake_driver(Source* source) noexcept;

}  // namespace meshcast
