#pragma once

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "common/forks.h"
#include "transport/shm_bell.h"
#include "transport/transport.h"

namespace meshcast {

// Who moves the messages of all groups of a process that have shared memory: its own thread, and a user's
// thread that waits anyway ("drives", one at a time). Who drives does the receiving, and the sending too while
// the thread sleeps; the thread does what is left. So a small message wakes one thread, that which waits for
// it, and large ones are copied in and out at once. Who drove is likely to be back soon: for kGrace the thread
// is not woken by what comes meanwhile, but looks itself. Whoever is asleep costs nothing.
class ShmProgress {
 public:
  // A group's halves. A turn does a bounded part of what is to be done and waits for nothing; one thread at a
  // time is in a half. Answers whether another is due. `driver`: it may call help() instead of copying at
  // length.
  class Group {
   public:
    virtual ~Group() = default;
    virtual bool turn(ShmHalf half, bool driver) = 0;
  };

  // A group's number on the bell, from before any peer learns it until the group has gone.
  class Place {
   public:
    explicit Place(std::shared_ptr<ShmProgress> progress);  // throws std::runtime_error where none is left
    ~Place();
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    ShmProgress& progress() const { return *progress_; }
    uint32_t number() const { return number_; }
    void call(ShmHalf half) const;   // this rank's own news
    void enter(Group& group) const;  // it has turns from now on ...
    void leave() const;              // ... and none afterwards, nor is one under way; not from a turn

   private:
    const std::shared_ptr<ShmProgress> progress_;
    uint32_t number_ = 0;
  };

  static std::shared_ptr<ShmProgress> of_process();  // made for the first group, gone with the last

  ShmProgress() = default;
  ~ShmProgress();
  ShmProgress(const ShmProgress&) = delete;
  ShmProgress& operator=(const ShmProgress&) = delete;

  ShmBell& bell() { return bell_; }

  // For a thread that is about to wait until `done`. Returns at once where another thread drives.
  void drive(const std::function<bool()>& done, TimePoint limit);
  void wake() noexcept;  // `done` may have become true by something else

  // From a turn of who drives: the thread is to do the sending.
  void help();

 private:
  static constexpr std::chrono::microseconds kGrace{200};

  // Whose turn in a half it is. A thread that comes while another is inside leaves it to that one.
  struct Gate {
    bool taken = false;
    bool again = false;
  };
  struct Entry {
    bool placed = false;
    Group* group = nullptr;
    Gate gates[2];
    int inside() const { return static_cast<int>(gates[0].taken) + static_cast<int>(gates[1].taken); }
  };

  void loop();
  bool serve(ShmHalf half, bool driver, uint32_t* cursor);
  void announce_locked();

  const Origin origin_;
  ShmBell bell_;
  std::mutex mutex_;
  std::condition_variable left_;  // a turn is over
  std::vector<Entry> entries_;    // by number
  bool driven_ = false;
  bool driver_sleeps_ = false;
  uint64_t drives_ = 0;  // how often somebody began to drive
  bool dozes_ = false;   // the thread sleeps for kGrace only, and nobody wakes it
  // Written with the lock held. While the thread is awake and another drives, the sending is the thread's.
  std::atomic<bool> thread_sleeps_{false};
  bool stopping_ = false;
  std::thread thread_;  // starts with the first group that enters
};

}  // namespace meshcast
