#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "common/forks.h"
#include "transport/doorbell.h"
#include "transport/progress.h"

namespace meshcast {

// The shared memory of all groups of a process, as a source. A driver receives, and also sends while the thread
// sleeps; the thread does the rest. So a small message wakes one thread, that which waits for it, and large
// ones are copied in and out at the same time.
class ShmProgress final : public Source {
 public:
  // A group's halves. A turn does a bounded part of the work that is due and waits for nothing; one thread at a
  // time is in a half. Returns whether another is due. A driver may call help() instead of copying at length.
  class Group {
   public:
    virtual ~Group() = default;
    virtual bool turn(ShmHalf half, Who who) = 0;
    // Something that it watches has happened; both halves have a turn afterwards. Must not call back.
    virtual void alarmed() {}
  };

  // A group's number on the doorbell, from before any peer learns it until the group has ended.
  class Place {
   public:
    explicit Place(std::shared_ptr<ShmProgress> progress);  // throws std::runtime_error where none is left
    ~Place();
    Place(const Place&) = delete;
    Place& operator=(const Place&) = delete;

    ShmProgress& progress() const { return *progress_; }
    uint32_t number() const { return number_; }
    void call(ShmHalf half) const;   // for this rank's own work
    void enter(Group& group) const;  // it has turns from now on ...
    void leave() const;              // ... and none afterwards, nor is one under way; not from a turn
    void watch(int fd) const;        // alarmed() once it is readable or has hung up; until it is closed

   private:
    const std::shared_ptr<ShmProgress> progress_;
    uint32_t number_ = 0;
  };

  static std::shared_ptr<ShmProgress> of_process();  // made for the first group, destroyed with the last

  explicit ShmProgress(std::shared_ptr<Progress> progress = Progress::of_process());
  ~ShmProgress() override;
  ShmProgress(const ShmProgress&) = delete;
  ShmProgress& operator=(const ShmProgress&) = delete;

  Progress& progress() override { return *progress_; }
  bool turn(Who who) override;
  bool arm(Who who) override;
  void disarm(Who who) override;
  int alarm() override { return watched_.get(); }
  void kept_by(Keeper keeper) override;
  int patience() override { return patience_; }

  const Doorbell& doorbell() const { return doorbell_; }
  // The doorbell of a peer's process, given its Doorbell::fds() as received. One for all groups with that
  // process.
  std::shared_ptr<Doorbell> doorbell_of_peer(const std::vector<int>& fds);

  // From a turn of a driver: the thread is to do the sending.
  void help();

 private:
  static constexpr int kPatience = 256;  // about 10 us: a peer that makes its next call is seen awake

  // The thread that is in a half. A thread that comes while another is inside leaves it to that one.
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

  bool serve(ShmHalf half, Who who);
  bool sleeps(Who who) const { return sleeps_[static_cast<size_t>(who)]; }
  void announce_locked();
  bool look();
  int patience_locked() const;

  const Origin origin_;
  const std::shared_ptr<Progress> progress_;
  Doorbell doorbell_;
  const Descriptor watched_;          // epoll: what groups watch
  std::atomic<bool> watches_{false};  // anything, ever
  std::mutex mutex_;
  std::condition_variable left_;                                            // a turn is over
  std::vector<Entry> entries_;                                              // by number
  std::map<std::pair<uint64_t, uint64_t>, std::weak_ptr<Doorbell>> peers_;  // by their memory
  std::array<std::atomic<uint32_t>, 2> cursors_{};                          // of each half
  std::atomic<int> patience_{kPatience};
  // Written with the lock held. While the thread is awake and another drives, the sending is the thread's.
  std::atomic<Keeper> keeper_{Keeper::Thread};
  std::array<std::atomic<bool>, 2> sleeps_{};  // as of Who
};

}  // namespace meshcast
