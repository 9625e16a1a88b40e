#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/sync.h"
#include "run/program.h"
#include "transport/transport.h"

namespace meshcast {

// What messages and other ranks call a plan that was agreed on.
struct PlanText {
  std::string op;
  std::string descriptor;  // what the ranks agreed on, in words
};

// Names a run towards the other ranks and in messages.
struct RunLabel {
  int32_t slot = 0;      // agreed number of the plan in the group
  bool reverse = false;  // backward direction of the same call
  int32_t lane = 0;
  int64_t ordinal = 0;                   // number of the call in the lane, those that a rank refused included
  std::shared_ptr<const PlanText> text;  // never null in a run; shared by all runs of a plan

  const std::string& op() const { return text->op; }
  const std::string& descriptor() const { return text->descriptor; }
};

// From now on, in seconds. Capped at a year, so that "no limit" in any spelling cannot overflow the clock.
TimePoint deadline_after(double seconds);

// What a run is wherever its tensors are: one execution of a program that has a deadline, ends once, with an
// error or without, and then wakes whoever waits. Whichever thread ends it may hold locks of a transport and is
// needed there, so it calls nothing of a user's: callbacks are the executor's. Thread-safe.
class RunState {
 public:
  RunState(std::shared_ptr<const Program> program, RunLabel label, TimePoint deadline)
      : program_(std::move(program)), label_(std::move(label)), started_(Clock::now()), deadline_(deadline) {}
  virtual ~RunState();
  RunState(const RunState&) = delete;
  RunState& operator=(const RunState&) = delete;

  const Program& program() const { return *program_; }
  const RunLabel& label() const { return label_; }
  TimePoint started() const { return started_; }
  TimePoint deadline() const { return deadline_; }

  bool ended() const;
  double seconds() const;  // start to end, or to now
  std::exception_ptr error() const;
  bool wait_until(TimePoint limit) const;  // false: still running at `limit`
  // Since when threads have come to the limits of such waits, one after the other without a pause of a second.
  std::optional<TimePoint> awaited_since(TimePoint now) const;
  // Called by a thread of the executor once it has ended, or at once if it has: such a thread may wait for what
  // it likes. Throws Error where none can be had.
  void on_end(std::function<void()> callback);

  virtual int64_t received_bytes() const = 0;
  virtual int64_t sent_bytes() const = 0;  // counted by receiver, as Program::bytes_sent
  // Of what arrived of a tensor on this rank; none where no digest is taken of all of it. Whole once the run
  // has ended well.
  virtual std::optional<uint64_t> digest(size_t /*tensor*/) const { return std::nullopt; }
  int64_t expected_bytes() const { return program_->bytes_received; }

  // Ends with an error of its own, before that of its group comes; the first counts. Not of a GPU's.
  virtual void fail(std::exception_ptr /*error*/) {}

  // After a failure: ends without waiting for what still touches the tensors.
  virtual void force_end() {}

  // For a thread that is about to wait: lends a hand until `limit` at most, see Run.
  virtual void drive(TimePoint /*limit*/) noexcept {}

 protected:
  // Lets go of the tensors, marks the end and tells everybody, the last without the lock. `lock` holds mutex_.
  // `tensors` frees nothing itself, see RecycleBin.
  void end(std::unique_lock<Mutex> lock, std::shared_ptr<void> tensors);

  // It has ended: wakes a thread that drives. Without the lock.
  virtual void wake_driver() noexcept {}

  const std::shared_ptr<const Program> program_;
  const RunLabel label_;
  const TimePoint started_;
  const TimePoint deadline_;

  mutable Mutex mutex_;  // guards what is below, and what a run adds
  bool ended_ = false;
  std::exception_ptr error_;

 private:
  TimePoint ended_at_{};
  mutable Condition changed_;
  mutable TimePoint awaited_since_{};
  mutable TimePoint awaited_last_{};
  std::vector<std::function<void()>> callbacks_;  // each with its thread, see Executor::reserve
};

}  // namespace meshcast
