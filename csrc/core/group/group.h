#pragma once

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/forks.h"
#include "common/sync.h"
#include "group/agreement.h"
#include "group/agreements.h"
#include "group/group_core.h"
#include "group/meeting.h"
#include "group/open_refusals.h"
#include "group/refusals.h"
#include "run/executor.h"

namespace meshcast {

// Something that a group does in the order of its calls.
class Command : public std::enable_shared_from_this<Command> {
 public:
  enum class Begun : uint8_t {
    Done,
    Again,   // this generation of the group is over, and nothing has begun: in the next one
    Refused  // nothing has begun, and the other ranks do not know yet; refusal says why
  };

  Command(int32_t lane, std::optional<int64_t> ordinal, TimePoint deadline, bool meets)
      : lane(lane), ordinal(ordinal), deadline(deadline), meets(meets) {}
  virtual ~Command() = default;
  Command(const Command&) = delete;
  Command& operator=(const Command&) = delete;

  // Whether begin() would not have to wait. Only asked while no other command of the group runs.
  virtual bool ready() { return false; }
  // Begins with the group that has come up; if there is none (null), `error` says why. Throws nothing.
  virtual Begun begin(const std::shared_ptr<GroupCore>& core, const std::exception_ptr& error) = 0;
  // After Refused: the other ranks know by now, as far as they can.
  virtual void refused() {}
  virtual bool tells() const { return false; }  // notifies the other ranks of a refusal of this one

  CallId call() const { return {lane, ordinal.value_or(0)}; }

  const int32_t lane;
  std::optional<int64_t> ordinal;  // in the lane; none until the group has counted it
  const TimePoint deadline;
  const bool meets;  // whether it brings the group up
  std::string refusal;
};

// An object that a layer above keeps with a generation of a group, under its own key.
class Attachment {
 public:
  virtual ~Attachment() = default;
  virtual void abort(const std::string& reason) = 0;  // that generation has failed; any thread, never blocks
  virtual void close() = 0;  // it ends: nothing new comes, and what waits inside is released
};

class Refusal;

// The ranks of both meshes of a transfer, over all generations of their connections. It counts calls per lane,
// the same on all ranks, and begins them in that order: at once in the caller's thread if they need not wait,
// else in a control thread, which also meets the other ranks at the first use. All groups of a process share
// these threads, and a thread that waits is replaced: no order in which ranks meet groups can block them, and a
// group that waits for a rank does not delay others.
//
// A call that a rank refused while others were in it ends a generation of the group; calls behind it begin in
// the next, for which the ranks meet again as they come to them.
//
// Thread-safe. Only connect() and close() wait, and submit() for a moment if it has to report a refusal.
class Group : public std::enable_shared_from_this<Group> {
 public:
  // kept: agreements that a generation remembers, the same number on all ranks. open: those of its process
  // group, to which this group is not added yet; may be null.
  Group(GroupIdentity identity, std::shared_ptr<Connector> connector, std::shared_ptr<KnownOffers> known,
        size_t kept, std::shared_ptr<OpenRefusals> open = nullptr);
  ~Group();

  const GroupIdentity& identity() const { return identity_; }
  bool has(int32_t rank) const {
    return std::binary_search(identity_.ranks.begin(), identity_.ranks.end(), rank);
  }

  // Counts a command, unless it has an ordinal, and begins it after all earlier ones and after refusals that
  // may have been meant for this group. Throws AbortedError in a forked child.
  void submit(const std::shared_ptr<Command>& command);
  // Brings the group up, unless it is up. Throws what prevents that.
  void connect(double timeout_seconds);
  // For a caller that waits for an overdue command: if the running command should have ended, the store blocks
  // it, maybe for ever, and the group has failed.
  void give_up_if_stuck();

  // Notifies the other ranks in the background that this one refused its arguments of a call: they raise at
  // once instead of waiting. ordinal: of a call that has been counted.
  std::shared_ptr<Refusal> refuse(int32_t lane, std::optional<int64_t> ordinal, const std::string& why,
                                  double timeout_seconds);
  // The same for the next call of a lane, even if earlier refusals are open.
  std::shared_ptr<Refusal> refuse_next(int32_t lane, const std::string& why, double timeout_seconds);
  // The same for a call that this rank began in generation `generation`, and whose source it changed while that
  // may have been in flight. Ranks in the call raise, and others do as they next wait for a call of this group.
  std::shared_ptr<Refusal> retract(CallId call, const std::string& why, double timeout_seconds,
                                   std::function<std::optional<int64_t>()> generation);

  int64_t next_ordinal(int32_t lane);
  bool is_awaited() const;  // by another rank, in the next call of lane 0, as far as the store knows
  bool is_up() const { return core() != nullptr; }
  bool was_used() const;      // it is up, or a call was ever counted: it may be between two generations
  bool is_untouched() const;  // it is neither up nor on the way there
  // Whether a refused call has ended this generation, according to the store, and this rank does not yet meet
  // for the next, as others may.
  bool is_over() const;
  // Numbers the ranks' current connections; a refused call may end them.
  int64_t generation() const { return generations_; }
  std::shared_ptr<GroupCore> core() const;

  std::shared_ptr<Attachment> attached(const std::string& key) const;  // to this generation; null
  void attach(const std::string& key, std::shared_ptr<Attachment> thing);

  // Whether this generation of the group is over because a rank refused a call in flight, and `call` did not
  // end with it, but is one for the next generation.
  bool left(const std::shared_ptr<GroupCore>& core, CallId call);
  // The error of a call that ended with it; none if the core failed for another reason.
  std::optional<Error> error_of_refusal(const GroupCore& core, CallId call) const;
  // For a caller that waits for a failed call: begins it again, if it failed because others had begun a new
  // generation before it, and no later call has been counted.
  bool begin_again(const std::shared_ptr<Command>& command, const std::shared_ptr<GroupCore>& core);

  // What the ranks have agreed on in this generation for calls that are made once; see Agreements. Null, or
  // false, if `core` is not that of this generation.
  bool has_agreed(const std::shared_ptr<GroupCore>& core, const std::string& descriptor) const;
  std::shared_ptr<AgreedPlan> use_agreed(const std::shared_ptr<GroupCore>& core, const std::string& descriptor);
  void add_agreed(const std::shared_ptr<GroupCore>& core, const std::string& descriptor,
                  const std::shared_ptr<AgreedPlan>& agreed);

  // The error of an earlier call that this rank has still to raise, once.
  std::optional<Error> take_news();
  bool has_news() const { return has_news_.load(std::memory_order_relaxed); }

  // Why the group was aborted, by this rank or another; asks the store. None if it was not.
  std::optional<std::string> cause() const;
  std::optional<std::string> posted_cause() const;  // only what the store has

  // Fails the calls of the group, here and on the other ranks, with AbortedError(reason). Never blocks;
  // idempotent.
  void abort(const std::string& reason);
  // Ends the group in any state. Commands in the queue fail. Blocks to `limit`, for what runs.
  void close(TimePoint limit);

 private:
  struct Generation {
    std::shared_ptr<GroupCore> core;
    std::map<std::string, std::shared_ptr<Attachment>> attached;
    Ordinals first;
    Agreements agreements;

    explicit Generation(size_t kept) : agreements(kept) {}
  };
  enum class Next : uint8_t { Command, SameAgain, Nothing };

  friend class Refusal;

  void assume_open();
  int64_t counted(int32_t lane) const;
  std::shared_ptr<Refusal> refuse_now(int32_t lane, std::optional<int64_t> ordinal, const std::string& why,
                                      double timeout_seconds);
  std::shared_ptr<Refusal> enqueue(std::shared_ptr<Command> command);
  std::shared_ptr<Refusal> begin_here(std::unique_lock<Mutex>& lock, std::shared_ptr<Command> command);
  bool has_refusals() const;
  bool is_idle() const;
  std::shared_ptr<Refusal> refusal_of(const std::shared_ptr<Command>& command);
  void start_thread(std::unique_lock<Mutex>& lock);
  void fail_without_thread(std::unique_lock<Mutex>& lock);
  void run(uint64_t turn);
  void run_commands(uint64_t turn);
  Next begin(const std::shared_ptr<Command>& command, uint64_t turn);
  bool bring_up(const Command& command, uint64_t turn);
  bool take(Met met, uint64_t turn);
  GenerationKeys next_generation();
  void note_boards();
  void erase_old_keys();
  Ordinals stated() const;
  bool may_begin_again(const std::shared_ptr<GroupCore>& core, CallId call);
  void end_left();
  std::shared_ptr<Store> control() const;

  Error error_of(const RefusedCall& refused, CallId call) const;
  void note_refused(const RefusedCall& refused);
  std::optional<Error> ended_before(CallId call) const;
  std::optional<Error> refused_last(CallId call) const;
  std::exception_ptr skipped(int64_t ordinal) const;
  std::exception_ptr keep_first_cause();

  const Origin origin_;  // in a forked child nothing of the group may be touched
  const GroupIdentity identity_;
  const std::shared_ptr<Connector> connector_;
  const std::shared_ptr<KnownOffers> known_;
  const size_t kept_;
  const std::shared_ptr<OpenRefusals> open_;
  const std::shared_ptr<Executor> control_;  // of all groups of the process

  mutable Mutex mutex_;
  Condition idle_;  // no command runs, or a refusal has been posted
  std::deque<std::shared_ptr<Command>> queue_;
  std::shared_ptr<Command> running_;  // in the control thread, or in that of a caller
  bool has_thread_ = false;           // or is about to have one
  TimePoint begun_{};                 // when running_ did, or a thread was asked for
  uint64_t turn_ = 0;                 // of the threads that may run commands; grows when they are given up
  std::map<int32_t, int64_t> ordinals_;
  Generation generation_;
  std::vector<Generation> left_;  // of refused calls, to be ended
  // The boards with the keys of this rank: of this generation, of those since the last that came up, and of
  // those before it, whose keys no rank reads any longer.
  enum : size_t { kThis, kLast, kOver };
  std::array<std::vector<std::shared_ptr<BoardStore>>, 3> boards_;
  std::optional<RefusedCall> refused_;  // that ended the last generation
  std::exception_ptr error_;            // why the group has failed
  std::string closing_;                 // why the group ends, once it does
  std::optional<Error> news_;
  std::atomic<bool> has_news_{false};

  std::string origin_of_generations_;  // of their keys
  std::atomic<int64_t> generations_{0};
};

// A command: this rank refused its arguments of a call. Never runs in the caller's own thread, since the store
// may block it. If the ranks have yet to meet, those that do raise, and may meet again.
class Refusal final : public Command {
 public:
  struct Told {
    bool agreed = false;  // this rank has agreed on the call
    // The generation in which the call has begun, none before that. In another, no rank is to be notified.
    std::function<std::optional<int64_t>()> generation;
  };

  Refusal(const std::shared_ptr<Group>& group, int32_t lane, std::optional<int64_t> ordinal, TimePoint deadline,
          std::string why, Told told);

  // Returns once all ranks can know of it, or soon: a call made at once could end before they do.
  void wait();
  Begun begin(const std::shared_ptr<GroupCore>& core, const std::exception_ptr& error) override;
  bool tells() const override { return true; }

 private:
  Begun tell(const std::shared_ptr<GroupCore>& core, bool failed);

  const std::weak_ptr<Group> group_;
  const std::string why_;
  const Told told_;
  Mutex mutex_;
  Condition over_;
  bool is_over_ = false;
};

// In the text of a refusal: the call has run, maybe to its end.
constexpr const char* kChanged = "was changed in place before wait()";

}  // namespace meshcast
