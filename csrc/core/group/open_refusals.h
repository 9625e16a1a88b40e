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

// A call that this rank refused without knowing of which group it was: its arguments name no ranks, or not all.
// It is open until one group is told. One may be open in several process groups at once. Thread-safe.
class OpenRefusal {
 public:
  // known: ranks that are in the call. prepares: it was no call, but prepare(). timeout_seconds: of what tells
  // the other ranks.
  OpenRefusal(std::string why, std::vector<int32_t> known, bool prepares, double timeout_seconds);

 private:
  friend class OpenRefusals;

  bool fits(const std::vector<int32_t>& ranks) const;
  bool is_open() const { return !claimed_; }
  bool claim() { return !claimed_.exchange(true); }   // by the one who tells
  void tell(Group& group);                            // once it is claimed
  std::shared_ptr<Refusal> told_by(TimePoint limit);  // null where nobody is told by then

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

// The open refusals of one process group of the user. In the background, ranks that wait for this one are
// looked for, and told: a rank that waits for others to meet writes in the store which group meets, and one
// that waits for an agreement, or in a transfer, has written so for its group. A refusal that nobody waits for
// stays open: it is taken for a call of the group that this rank uses next, as it is where all ranks refused
// their own. Thread-safe.
class OpenRefusals : public std::enable_shared_from_this<OpenRefusals> {
 public:
  // The process group: its store, and its private groups.
  class Site {
   public:
    virtual ~Site() = default;
    virtual std::shared_ptr<Store> store() = 0;
    // The group of these ranks, made where there is none.
    virtual std::shared_ptr<Group> group_of(const std::vector<int32_t>& ranks) = 0;
  };

  OpenRefusals(std::vector<int32_t> ranks, int32_t rank, std::shared_ptr<Site> site);

  void know(const std::shared_ptr<Group>& group);  // one of the process group

  // Opens a refusal in each process group that its call may be of. Returns once the other ranks can know of it,
  // or soon. Where nobody is seen to wait, but only one group can be meant, that is told, if it is up: others
  // may see one up that is between two generations here.
  static void refuse(const std::shared_ptr<OpenRefusal>& refusal,
                     const std::vector<std::shared_ptr<OpenRefusals>>& where);

  // Before a call of a group: what is open was meant for it, where it may have been.
  void assume(Group& group) {
    if (keeps_any_.load(std::memory_order_relaxed)) tell_open(group);
  }

  // Writes that this rank waits for the ranks of a group to meet: for prepare(), or for a call. Throws what the
  // store throws.
  void meets(const std::vector<int32_t>& ranks, bool prepares);
  void has_met(const std::vector<int32_t>& ranks);  // or does not meet any longer

  // Before the groups are closed: they are told of what is still open. Nobody is looked for any longer; waits
  // up to half a second for who looks, whom the store may hold up.
  void close();

 private:
  struct Open {
    std::shared_ptr<OpenRefusal> refusal;
    bool keeps = false;  // of the only process group that it can be of
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
  std::shared_ptr<Site> site() const;  // throws where it is closed
  std::vector<Meeting> others_meetings() const;
  void write_meetings();
  Conversation conversation() const;
  size_t crowd() const { return 1 + ranks_.size() / 16; }  // how much less often one of so many looks

  const std::vector<int32_t> ranks_;
  const int32_t rank_;
  const std::shared_ptr<Executor> control_;

  Mutex order_;  // held while one is told: calls are counted in the order in which they were refused
  mutable Mutex mutex_;
  Condition changed_;
  std::shared_ptr<Site> site_;  // null once it is closed
  std::vector<std::weak_ptr<Group>> groups_;
  std::vector<Open> open_;  // the oldest first
  bool searches_ = false;   // in a thread
  uint64_t added_ = 0;      // refusals, since ever
  std::atomic<bool> keeps_any_{false};

  Mutex meetings_mutex_;  // held over a request to the store, which only what is below waits for
  std::map<std::vector<int32_t>, bool> meetings_;  // with whether it prepares
};

}  // namespace meshcast
