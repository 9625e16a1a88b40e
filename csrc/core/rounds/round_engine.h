#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "common/error.h"
#include "common/forks.h"
#include "rounds/device.h"
#include "rounds/rank_rounds.h"
#include "rounds/start_queue.h"
#include "run/run.h"

namespace meshcast {

// The addresses of a run's tensors, by problem; null if the rank holds nothing. `keepalive` owns them and is
// dropped once the GPU is done with them.
struct RoundMemory {
  std::vector<std::byte*> source;
  std::vector<std::byte*> destination;
  std::shared_ptr<void> keepalive;
};

// One execution of a rank's rounds. Its work on the GPU is over once it has ended; a failed run ends at once,
// and its memory is kept for as long as the GPU needs it. Thread-safe.
class RoundRun final : public RunState {
 public:
  RoundRun(std::shared_ptr<const RankRounds> rounds, RoundMemory memory, RunLabel label, TimePoint deadline)
      : RunState(rounds->program, std::move(label), deadline),
        rounds_(std::move(rounds)),
        memory_(std::move(memory)) {}

  const RankRounds& rounds() const { return *rounds_; }

  // A GPU reports nothing before it has finished.
  int64_t received_bytes() const override;
  int64_t sent_bytes() const override;

 private:
  friend class RoundEngine;
  void end_with(const std::exception_ptr& error);  // the first call counts

  const std::shared_ptr<const RankRounds> rounds_;
  RoundMemory memory_;  // the engine's, see below

  // The engine's, guarded by its mutex.
  std::shared_ptr<std::byte> staging_;
  RoundDevice::Event over_ = 0;  // on the caller's stream, behind everything
  bool enqueued_ = false;        // over_ has been recorded
  bool settled_ = false;         // enqueued, or given up
};

// The owner, which knows more than one rank's engine and decides how a failure is reported. Called from any
// thread that is inside the engine, without its mutex.
struct RoundObserver {
  std::function<void()> begun;                                                 // a run is in flight
  std::function<void(const Error&, const std::shared_ptr<RoundRun>&)> failed;  // the observer calls fail() soon
};

// An observer asks other ranks before it decides. A thread that waits for that gives it this long, even beyond
// a deadline, which the observer also sees.
inline constexpr auto kObserverGrace = std::chrono::seconds(4);

// Staging that was not needed for so long goes back to its pool, and from there to the GPU: longer than a step
// of a training, since CUDA may then wait for all that runs on the GPU.
inline constexpr auto kStagingRest = std::chrono::seconds(10);

// Enqueues rounds on one communicator, which is that of one lane: all ranks start its runs in one order. Runs
// of an engine share staging, so each begins on the engine's streams where the one before ended. The owner
// calls poll() now and then while runs are in flight; the engine has a thread of its own only if groups wait
// for the hosts of other ranks (RoundDevice::meets_hosts). The first failure aborts the communicator, ends all
// runs with its error and refuses new ones. An observer, if there is one, is notified of the transport's errors
// and fails the engine with the error that it chooses; it also handles deadlines. Thread-safe.
class RoundEngine {
 public:
  // Errors name global ranks: `rank`, and `group` by group-local rank.
  RoundEngine(std::shared_ptr<RoundDevice> device, int32_t rank, std::vector<int32_t> group,
              RoundObserver observer = {});
  ~RoundEngine();

  // Enqueues everything behind the current work of `caller`, and lets its later work wait for the result. Waits
  // for no GPU; for NCCL only while it is setting up connections, until `deadline` at the longest. Throws
  // Error, AbortedError with the first cause where the engine has failed. `after`: an event that `caller` waits
  // for first; its record is over or under way. 0: none. Where groups meet hosts, the engine's thread does all
  // this later, except for the wait for `after`: `caller` then belongs to the run alone until that is over.
  std::shared_ptr<RoundRun> start(std::shared_ptr<const RankRounds> rounds, RoundMemory memory,
                                  RoundDevice::Stream caller, RunLabel label, TimePoint deadline,
                                  RoundDevice::Event after = 0);

  // Later work of `stream` comes behind the run, also if that has failed. Waits for nothing, or, where groups
  // meet hosts, until the run has been enqueued, which takes the calls of its peers: until its deadline.
  void follow(const RoundRun& run, RoundDevice::Stream stream);

  // Ends the runs that are complete, checks for errors of NCCL, and fails the engine where a deadline has
  // passed.
  void poll(TimePoint now);

  // Gives staging back that no run has needed for kStagingRest. Returns whether a later call has more to do.
  bool rest(TimePoint now);

  // Ends every run in flight with `error`. The first call counts.
  void fail(std::exception_ptr error);

  // Waits until no thread of the engine enqueues anything or calls the observer any longer. After fail().
  void drain();

  std::exception_ptr error() const;
  std::vector<std::shared_ptr<RoundRun>> in_flight() const;
  bool idle() const;  // the GPU touches no memory of any run

 private:
  void enqueue(RoundRun& run, RoundDevice::Stream caller, RoundDevice::Event after);
  void enqueue_late(const std::shared_ptr<RoundRun>& run, RoundDevice::Stream caller);
  void cut_short(const std::shared_ptr<RoundRun>& run, RoundDevice::Stream caller);
  void begin(RoundRun& run);
  void ask_observer(const Error& error, const std::shared_ptr<RoundRun>& run);
  void launch(const RoundRun& run, const RoundStep& step);
  void exchange(const RoundRun& run, const RoundStep& step);
  void wait_for_group(const RoundRun& run, const RoundStep& step);
  void finish(RoundRun& run, RoundDevice::Stream caller);

  void leave_in_child();
  RoundDevice::Event take_event();
  RoundDevice::Stream stream(StreamRole role, RoundDevice::Stream caller) const;
  StridedView view(const RoundRun& run, const Part& part) const;
  std::byte* message_data(const RoundRun& run, const RoundMessage& message) const;

  void refuse_if_failed(const RunLabel& label) const;
  Error group_error(const RoundRun& run, const GroupOutcome& outcome, const std::string& doing) const;
  Error deadline_error(const RoundRun& run, const std::string& doing) const;
  ErrorContext context(const RoundRun& run) const;

  const Origin origin_;
  const std::shared_ptr<RoundDevice> device_;
  const int32_t rank_;
  const std::vector<int32_t> group_;
  const RoundObserver observer_;

  std::mutex starting_;  // one run is enqueued, or queued, at a time, in the order of the calls

  // Guards the device and the members below. Held only for calls that return at once, so that a failure waits
  // for no start().
  mutable std::mutex mutex_;
  std::deque<std::shared_ptr<RoundRun>> runs_;  // those whose memory the GPU may touch
  std::shared_ptr<std::byte> staging_;
  int64_t staging_bytes_ = 0;
  TimePoint idle_since_;
  bool rested_ = true;                           // nothing is left to give back
  std::vector<RoundDevice::Event> step_events_;  // by event of the steps; reused once all are enqueued
  std::vector<RoundDevice::Event> spare_events_;
  RoundDevice::Event kernels_over_ = 0;  // of the last run
  RoundDevice::Event transfer_over_ = 0;
  bool ran_ = false;            // both have been recorded
  std::vector<BoxMove> moves_;  // of one launch; kept for their memory
  std::vector<BoxReduce> reductions_;
  bool told_ = false;  // the observer has been notified of a failure that poll() found
  std::exception_ptr error_;
  std::condition_variable settled_;  // a run is enqueued, or given up

  std::unique_ptr<StartQueue> queue_;  // where groups meet hosts; goes first, since its jobs use all the rest
};

}  // namespace meshcast
