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

// The name of an agreed plan in messages and towards other ranks.
struct PlanText {
  std::string op;
  std::string descriptor;  // what the ranks agreed on, in words
};

// Names a run towards the other ranks and in messages.
struct RunLabel {
  int32_t slot = 0;      // agreed number of the plan in the group
  bool reverse = false;  // backward direction of the same call
  int32_t lane = 0;
  int64_t ordinal = 0;                   // number of the call in the lane, including calls that a rank refused
  std::shared_ptr<const PlanText> text;  // never null in a run; shared by all runs of a plan

  const std::string& op() const { return text->op; }
  const std::string& descriptor() const { return text->descriptor; }
};

// From now on, in seconds. Capped at a year, so that no form of "no limit" can overflow the clock.
TimePoint deadline_after(double seconds);

// The base of runs on CPUs and GPUs: one execution of a program that has a deadline, ends once, with an error
// or without, and then wakes all waiting threads. The thread that ends it may hold locks of a transport, so it
// calls no code of a user: callbacks run on the executor. Thread-safe.
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
  // Since when waits have reached their limits, one after the other without a pause of a second.
  std::optional<TimePoint> awaited_since(TimePoint now) const;
  // Called by a thread of the executor, which may block, once the run has ended, or at once if it has. Throws
  // Error if no thread is available.
  void on_end(std::function<void()> callback);

  virtual int64_t received_bytes() const = 0;
  virtual int64_t sent_bytes() const = 0;  // counted by receiver, as Program::bytes_sent
  // The digest of what arrived of a tensor on this rank; none if it does not cover all of it. Complete once the
  // run has ended without an error.
  virtual std::optional<uint64_t> digest(size_t /*tensor*/) const { return std::nullopt; }
  int64_t expected_bytes() const { return program_->bytes_received; }

  // Ends this run with an error of its own, before that of its group comes; the first counts. No effect on GPU
  // runs.
  virtual void fail(std::exception_ptr /*error*/) {}

  // After a failure: ends without waiting for requests that still touch the tensors.
  virtual void force_end() {}

  // For a thread that is about to wait: makes progress until `limit` at most, see Run.
  virtual void drive(TimePoint /*limit*/) noexcept {}

 protected:
  // Releases the tensors and marks the end; then, without the lock, wakes waiting threads and posts callbacks.
  // `lock` holds mutex_. `tensors` frees nothing itself, see RecycleBin.
  void end(std::unique_lock<Mutex> lock, std::shared_ptr<void> tensors);

  // It has ended: wakes a thread in drive(). Called without the lock.
  virtual void wake_driver() noexcept {}

  const std::shared_ptr<const Program> program_;
  const RunLabel label_;
  const TimePoint started_;
  const TimePoint deadline_;

  mutable Mutex mutex_;  // guards what is below, and members of derived classes
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
