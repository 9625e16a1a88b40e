#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/sync.h"
#include "group/conversation.h"
#include "group/store.h"

namespace meshcast {

class Executor;
class Group;
class OpenRefusals;
class Refusal;

// A call that this rank refused without knowing its group: its arguments name no ranks, or not all. It is open
// until one group is notified. One may be open in several process groups at once. Thread-safe.
class OpenRefusal {
 public:
  // known: ranks that are in the call. prepares: it was prepare() rather than a call. timeout_seconds: of the
  // Refusal that notifies the other ranks.
  OpenRefusal(std::string why, std::vector<int32_t> known, bool prepares, double timeout_seconds);

 private:
  friend class OpenRefusals;

  bool fits(const std::vector<int32_t>& ranks) const;
  bool is_open() const { return !claimed_; }
  bool claim() { return !claimed_.exchange(true); }   // by the thread that notifies a group
  void tell(Group& group);                            // once it is claimed
  std::shared_ptr<Refusal> told_by(TimePoint limit);  // null if no group is notified by then

  const std::string why_;
  const std::vector<int32_t> known_;  // ascending
  const bool prepares_;
  const double timeout_seconds_;
  const TimePoint deadline_;
  std::atomic<bool> claimed_{false};
  Mutex mutex_;
  Condition changed_;
  std::shared_ptr<Refusal> told_;
};

// The open refusals of one process group of the user. In the background, it looks for ranks that wait for this
// one and notifies them: a rank that waits for others to meet writes in the store which group meets, and one
// that waits for an agreement, or in a transfer, has written so for its group. A refusal that no rank waits for
// stays open, and counts as a call of the group that this rank uses next, which is right if all ranks refused
// theirs. Thread-safe.
class OpenRefusals : public std::enable_shared_from_this<OpenRefusals> {
 public:
  // The process group: its store, and its private groups.
  class Site {
   public:
    virtual ~Site() = default;
    virtual std::shared_ptr<Store> store() = 0;
    // The group of these ranks, made if there is none.
    virtual std::shared_ptr<Group> group_of(const std::vector<int32_t>& ranks) = 0;
  };

  OpenRefusals(std::vector<int32_t> ranks, int32_t rank, std::shared_ptr<Site> site);

  void know(const std::shared_ptr<Group>& group);  // a group of the process group

  // Opens a refusal in each process group that its call may belong to. Returns once the other ranks can know of
  // it, or soon. If no rank is seen to wait, but only one group can be meant, it notifies that one if it is up:
  // a group that is between two generations here may be up on other ranks.
  static void refuse(const std::shared_ptr<OpenRefusal>& refusal,
                     const std::vector<std::shared_ptr<OpenRefusals>>& where);

  // Before a call of a group: open refusals that may have been meant for it count for it.
  void assume(Group& group) {
    if (keeps_any_.load(std::memory_order_relaxed)) tell_open(group);
  }

  // Writes that this rank waits for the ranks of a group to meet: for prepare(), or for a call. Throws what the
  // store throws.
  void meets(const std::vector<int32_t>& ranks, bool prepares);
  void has_met(const std::vector<int32_t>& ranks);  // or does not meet any longer

  // Before the groups are closed: notifies them of what is still open, and ends the search. Waits up to half a
  // second for its thread, which the store may block.
  void close();

 private:
  struct Open {
    std::shared_ptr<OpenRefusal> refusal;
    bool keeps = false;  // no other process group can be meant
  };
  struct Meeting {
    std::vector<int32_t> ranks;
    bool prepares = false;
  };

  void add(const std::shared_ptr<OpenRefusal>& refusal, bool keeps);
  void search();
  void look_for(const std::vector<std::shared_ptr<OpenRefusal>>& refusals);
  std::shared_ptr<Group> awaiting(const OpenRefusal& refusal, const std::vector<Meeting>& meetings) const;
  std::vector<std::shared_ptr<Group>> fitting(const OpenRefusal& refusal) const;
  void tell(OpenRefusal& refusal, Group& group);
  void tell_open(Group& group);
  void tell_left();
  void forget_closed();
  bool is_closed() const;
  std::shared_ptr<Site> site() const;  // throws if it is closed
  std::vector<Meeting> others_meetings() const;
  void write_meetings();
  Conversation conversation() const;
  size_t crowd() const { return 1 + ranks_.size() / 16; }  // by this factor each rank looks less often

  const std::vector<int32_t> ranks_;
  const int32_t rank_;
  const std::shared_ptr<Executor> control_;

  Mutex order_;  // held while a refusal is passed on: calls are counted in the order of their refusals
  mutable Mutex mutex_;
  Condition changed_;
  std::shared_ptr<Site> site_;  // null once it is closed
  std::vector<std::weak_ptr<Group>> groups_;
  std::vector<Open> open_;  // the oldest first
  bool searches_ = false;   // in a thread
  uint64_t added_ = 0;      // refusals, ever
  std::atomic<bool> keeps_any_{false};

  Mutex meetings_mutex_;  // held during a request to the store; guards only what is below
  std::map<std::vector<int32_t>, bool> meetings_;  // with whether it prepares
};

}  // namespace meshcast
