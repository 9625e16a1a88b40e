#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <string>

#include "common/forks.h"
#include "common/sync.h"
#include "group/agreed_plan.h"
#include "group/agreement.h"
#include "group/group.h"
#include "plan/plan.h"

namespace meshcast {

// The plans that ranks agree on before anything moves.
struct CompiledPlans {
  PlanText text;
  std::shared_ptr<const Plan> forward;
  std::shared_ptr<const Plan> reverse;  // of the backward; null if there is none
};

// The moves of a call, planned once, and agreed on by all ranks of a group in each of its generations.
// Thread-safe, except for begin() of its commands, which their group orders.
class Transfer {
 public:
  // is_shared: transfers with the same descriptor share an agreement, which the group may forget; else this one
  // has its own.
  Transfer(std::shared_ptr<Group> group, int32_t lane, bool is_shared)
      : group(std::move(group)), lane(lane), is_shared_(is_shared) {}
  virtual ~Transfer() = default;
  Transfer(const Transfer&) = delete;
  Transfer& operator=(const Transfer&) = delete;

  const std::shared_ptr<Group> group;
  const int32_t lane;

  // Whether the ranks have agreed on it in this generation of the group, so that a start need not wait for
  // them.
  bool has_agreed(const std::shared_ptr<GroupCore>& core) const;
  // The agreed plan; the first use compares with the other ranks, before any byte moves, and blocks.
  std::shared_ptr<AgreedPlan> agreed(const std::shared_ptr<GroupCore>& core, CallId call, TimePoint deadline);

  void close(const std::exception_ptr& error);  // later starts fail with it; the first one counts
  std::exception_ptr closed() const;
  void note_failure(const std::exception_ptr& error);
  std::exception_ptr failure() const;  // of the last start or agreement that failed
  bool has_backward() const {          // once it is compiled
    const CompiledPlans* const plans = compiled_.load(std::memory_order_acquire);
    return plans && plans->reverse;
  }
  // Waits for the first command of this transfer to end, with or without an error.
  bool wait_until_tried(TimePoint limit);
  void note_tried();

 protected:
  // Plans; called once, unless it throws. The other ranks are notified of what it throws.
  virtual CompiledPlans compile() = 0;

 private:
  const CompiledPlans& compiled();

  const bool is_shared_;
  mutable Mutex mutex_;
  Condition tried_;
  bool was_tried_ = false;
  std::unique_ptr<const CompiledPlans> plans_;
  std::atomic<const CompiledPlans*> compiled_{nullptr};
  std::shared_ptr<AgreedPlan> own_;
  std::weak_ptr<GroupCore> own_core_;  // with which the ranks have agreed on own_
  std::exception_ptr closed_;
  std::exception_ptr failure_;
};

// Names one call, the same on all its ranks.
struct CallNumber {
  int64_t ordinal = -1;                // in its lane
  int64_t run = -1;                    // how often its plan had run before
  std::shared_ptr<AgreedPlan> agreed;  // if a backward may follow
  std::weak_ptr<GroupCore> core;       // with which `agreed` was made
  std::atomic<bool> failed{false};     // it has no result, and its backward nothing to do
};

// A command: one start of a transfer, on which the ranks agree first if they have not. It is settled once its
// work has been started, or once it has failed.
class Start : public Command {
 public:
  // number: filled by a forward, used by its backward (reverse). timeout_seconds: from now.
  Start(std::shared_ptr<Transfer> transfer, std::shared_ptr<CallNumber> number, double timeout_seconds,
        bool reverse, std::string op);

  double timeout_seconds() const { return timeout_seconds_; }
  const CallNumber& number() const { return *number_; }

  bool is_settled() const;
  std::exception_ptr error() const;  // null unless it has failed

  // Waits until the started work has ended. Throws its error, each time; or that of an earlier call which this
  // rank has still to raise.
  void wait();
  bool is_completed();  // whether wait() would not block; throws nothing
  void make_final();    // from here on it is not begun again
  // The generation of the group in which it has begun; none before that.
  std::optional<int64_t> generation() const;

  bool ready() override;
  Begun begin(const std::shared_ptr<GroupCore>& core, const std::exception_ptr& error) override;
  void refused() override { settle(refusal_error_); }

 protected:
  virtual bool is_brought() { return true; }  // whether start() would not have to wait for the tensors
  // Once the ranks have agreed: makes the other connections that the call needs.
  virtual void connect(const std::shared_ptr<GroupCore>& /*core*/, CallId /*call*/) {}
  // Starts the plan. The other ranks are notified of what it throws.
  virtual void start(const std::shared_ptr<GroupCore>& core, AgreedPlan& agreed, CallId call, bool reverse,
                     double timeout_seconds) = 0;
  virtual void wait_for_work() = 0;  // of start(); throws its error
  virtual bool has_ended() = 0;      // the work of start()
  virtual bool has_succeeded() = 0;  // once it has ended
  virtual void release() {}          // it will not be begun again: its tensors are not needed here
  virtual void settled() {}          // with or without an error; called without a lock
  virtual void began_again() {}

  const std::shared_ptr<Group> group_;
  std::shared_ptr<Transfer> transfer_;  // null once it is final
  const std::shared_ptr<CallNumber> number_;
  const bool reverse_;
  const std::string op_;
  const double timeout_seconds_;

 private:
  std::shared_ptr<AgreedPlan> agree(Transfer& transfer, const std::shared_ptr<GroupCore>& core);
  void settle(const std::exception_ptr& error);
  void await_settled();
  bool begins_again();
  void fails_with_locked(const std::exception_ptr& error);

  const Origin origin_;
  mutable Mutex mutex_;
  Condition changed_;
  bool settles_ = false;  // or has settled
  bool settled_ = false;
  bool final_ = false;
  bool released_ = false;
  std::exception_ptr error_;
  std::weak_ptr<GroupCore> core_;  // in which it was begun
  std::optional<int64_t> generation_;
  std::exception_ptr refusal_error_;
};

// A command: the ranks agree on a transfer that no rank has started yet.
class Agreement : public Command {
 public:
  Agreement(std::shared_ptr<Transfer> transfer, TimePoint deadline)
      : Command(transfer->lane, std::nullopt, deadline, true), transfer_(std::move(transfer)) {}
  Begun begin(const std::shared_ptr<GroupCore>& core, const std::exception_ptr& error) override;

 private:
  const std::shared_ptr<Transfer> transfer_;
};

}  // namespace meshcast
