#include "rounds/round_engine.h"

#include <algorithm>
#include <chrono>
#include <optional>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "common/keep_for_good.h"

namespace meshcast {
namespace {

constexpr auto kObserverPause = std::chrono::milliseconds(1);

}  // namespace

int64_t RoundRun::received_bytes() const {
  const std::lock_guard lock(mutex_);
  return ended_ && !error_ ? expected_bytes() : 0;
}

int64_t RoundRun::sent_bytes() const {
  const std::lock_guard lock(mutex_);
  return ended_ && !error_ ? program().bytes_sent : 0;
}

void RoundRun::end_with(const std::exception_ptr& error) {
  std::unique_lock lock(mutex_);
  if (ended_) return;
  error_ = error;
  end(std::move(lock), nullptr);
}

RoundEngine::RoundEngine(std::shared_ptr<RoundDevice> device, int32_t rank, std::vector<int32_t> group,
                         RoundObserver observer)
    : device_(std::move(device)), rank_(rank), group_(std::move(group)), observer_(std::move(observer)) {
  {
    const std::lock_guard lock(mutex_);
    kernels_over_ = device_->make_event();
    transfer_over_ = device_->make_event();
  }
  if (device_->meets_hosts()) queue_ = std::make_unique<StartQueue>();
}

// In a forked child a work may hold the last reference. Everything of the parent stays as it is.
void RoundEngine::leave_in_child() {
  static_cast<void>(queue_.release());  // a condition whose waiter is the parent's cannot be destroyed
  new std::shared_ptr<RoundDevice>(device_);
  new auto(std::move(staging_));
  for (const auto& run : runs_) new std::shared_ptr<RoundRun>(run);
}

RoundEngine::~RoundEngine() {
  if (origin_.foreign()) {
    leave_in_child();
    return;
  }
  try {
    poll(Clock::now());
  } catch (const std::exception&) {
    // CUDA has failed for this process: what was under way will not be seen to end.
  }
  if (!idle())
    fail(std::make_exception_ptr(Error(ErrorKind::Aborted, fmt::format("rank {}: the group was closed while "
                                                                       "transfers were under way",
                                                                       rank_))));
  // Failed runs end at once. The queue's jobs read queue_ itself, so it stays where it is until they are done.
  if (queue_) queue_->finish();
  for (const auto& run : runs_) {
    keep_for_good(std::move(run->memory_.keepalive));
    keep_for_good(std::move(run->staging_));
    device_->free_event(run->over_);
  }
  for (const RoundDevice::Event event : step_events_) device_->free_event(event);
  for (const RoundDevice::Event event : spare_events_) device_->free_event(event);
  device_->free_event(kernels_over_);
  device_->free_event(transfer_over_);
}

std::shared_ptr<RoundRun> RoundEngine::start(std::shared_ptr<const RankRounds> rounds, RoundMemory memory,
                                             RoundDevice::Stream caller, RunLabel label, TimePoint deadline,
                                             RoundDevice::Event after) {
  const std::lock_guard one_at_a_time(starting_);
  auto run = std::make_shared<RoundRun>(std::move(rounds), std::move(memory), std::move(label), deadline);
  {
    const std::lock_guard lock(mutex_);
    refuse_if_failed(run->label_);
    run->over_ = take_event();
    runs_.push_back(run);
    rested_ = false;
  }
  if (observer_.begun) observer_.begun();
  try {
    if (queue_) {
      if (after != 0) {
        const std::lock_guard lock(mutex_);
        device_->wait(caller, after);
      }
      queue_->push([this, run, caller] { enqueue_late(run, caller); });
    } else {
      enqueue(*run, caller, after);
    }
  } catch (...) {
    cut_short(run, caller);
    std::rethrow_exception(this->error());
  }
  return run;
}

// Called where an exception is being handled: the ranks would no longer agree on what has been sent.
// The others wait for messages that this one has not enqueued. So the engine fails as a whole; the observer may
// replace its error first. finish() still orders the caller's stream behind what has been enqueued.
void RoundEngine::cut_short(const std::shared_ptr<RoundRun>& run, RoundDevice::Stream caller) {
  const std::exception_ptr cause = std::current_exception();
  try {
    throw;
  } catch (const Error& error) {
    ask_observer(error, run);
  } catch (const std::exception& error) {
    // No other rank could know more of it; but if no caller is left to raise it, the others must be notified.
    if (queue_)
      ask_observer(
          Error(ErrorKind::Generic, fmt::format("rank {}: {} number {} could not be enqueued: {}", rank_,
                                                run->label_.op(), run->label_.ordinal, error.what())),
          run);
  }
  fail(cause);
  finish(*run, caller);
}

// A job of the queue.
void RoundEngine::enqueue_late(const std::shared_ptr<RoundRun>& run, RoundDevice::Stream caller) {
  try {
    try {
      enqueue(*run, caller, 0);
    } catch (...) {
      cut_short(run, caller);
    }
  } catch (const std::exception&) {
    // CUDA has failed for this process: what was under way will not be seen to end.
  }
  const std::lock_guard lock(mutex_);
  run->settled_ = true;
  settled_.notify_all();
}

void RoundEngine::ask_observer(const Error& error, const std::shared_ptr<RoundRun>& run) {
  if (!observer_.failed || this->error()) return;
  observer_.failed(error, run);
  const TimePoint limit = Clock::now() + kObserverGrace;
  while (!this->error() && Clock::now() < limit) std::this_thread::sleep_for(kObserverPause);
}

void RoundEngine::follow(const RoundRun& run, RoundDevice::Stream stream) {
  std::unique_lock lock(mutex_);
  if (queue_) settled_.wait(lock, [&] { return run.settled_; });
  // A run that is over needs no wait, and its event may be another run's by now.
  const bool over = std::none_of(runs_.begin(), runs_.end(), [&](const auto& r) { return r.get() == &run; });
  if (!over && run.enqueued_) device_->wait(stream, run.over_);
}

void RoundEngine::poll(TimePoint now) {
  // Phase 1, under the lock: runs that have ended, and a failure.
  std::vector<std::shared_ptr<RoundRun>> over;
  std::optional<Error> failure;
  std::shared_ptr<RoundRun> failed;
  {
    const std::lock_guard lock(mutex_);
    std::copy_if(runs_.begin(), runs_.end(), std::back_inserter(over),
                 [&](const auto& run) { return run->enqueued_ && device_->reached(run->over_); });
    if (!error_) {
      // Checked after the GPU. If this rank reads a peer's memory, and that peer gives up and reuses it, the
      // run may end with torn bytes: it must not count as done before the peer's end has shown.
      const bool late = queue_ && !over.empty();
      if (late || runs_.size() > over.size()) {
        const GroupOutcome outcome = device_->async_error();
        if (outcome.state == GroupState::Failed) {
          failed = runs_.front();
          failure = group_error(*failed, outcome, "moving data");
          if (late) over.clear();  // they end with the failure
        }
      }
      for (const auto& run : runs_)
        if (!failure && !observer_.failed && now >= run->deadline_)
          failure = deadline_error(*run, "moving data");
      if (failure && observer_.failed && std::exchange(told_, true)) failure.reset();
    }
    for (const auto& run : over) {
      spare_events_.push_back(run->over_);
      std::erase(runs_, run);
    }
    if (!over.empty()) idle_since_ = now;
  }
  // Phase 2: the ends, without the lock.
  for (const auto& run : over) {
    // Before its end is reported: a thread that sees it may free the tensors at once.
    run->memory_.keepalive.reset();
    run->staging_.reset();
    run->end_with(nullptr);  // does nothing where it has failed before
  }
  // Phase 3: the failure, without the lock: the observer may call back.
  if (!failure) return;
  if (observer_.failed)
    observer_.failed(*failure, failed);
  else
    fail(std::make_exception_ptr(*failure));
}

bool RoundEngine::rest(TimePoint now) {
  const std::lock_guard lock(mutex_);
  if (!runs_.empty() || error_) return false;
  const auto idle = now - idle_since_;
  if (!rested_) {
    if (idle < kStagingRest) return true;
    device_->retire(staging_.get());
    staging_.reset();
    staging_bytes_ = 0;
    rested_ = true;
  }
  const bool more = device_->rest();
  return more || idle < 2 * kStagingRest;  // peers whose last run ended later give theirs back later
}

void RoundEngine::fail(std::exception_ptr error) {
  std::vector<std::shared_ptr<RoundRun>> ending;
  {
    const std::lock_guard lock(mutex_);
    if (error_) return;
    error_ = error;
    device_->abort();
    ending.assign(runs_.begin(), runs_.end());
  }
  // They keep their memory until the GPU has finished with it, see poll().
  for (const auto& run : ending) run->end_with(error);
}

void RoundEngine::drain() {
  std::unique_lock lock(mutex_);
  if (queue_)
    settled_.wait(lock, [this] {
      return std::all_of(runs_.begin(), runs_.end(), [](const auto& run) { return run->settled_; });
    });
}

std::exception_ptr RoundEngine::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

std::vector<std::shared_ptr<RoundRun>> RoundEngine::in_flight() const {
  const std::lock_guard lock(mutex_);
  std::vector<std::shared_ptr<RoundRun>> out;
  std::copy_if(runs_.begin(), runs_.end(), std::back_inserter(out),
               [](const auto& run) { return !run->ended(); });
  return out;
}

bool RoundEngine::idle() const {
  const std::lock_guard lock(mutex_);
  return runs_.empty();
}

RoundDevice::Event RoundEngine::take_event() {
  if (spare_events_.empty()) return device_->make_event();
  const RoundDevice::Event event = spare_events_.back();
  spare_events_.pop_back();
  return event;
}

void RoundEngine::refuse_if_failed(const RunLabel& label) const {
  if (!error_) return;
  ErrorContext where;
  where.rank = rank_;
  where.op = label.op();
  where.sequence = label.ordinal;
  throw Error(ErrorKind::Aborted,
              fmt::format("rank {}: {} was not started, because its group has failed before: {}", rank_,
                          label.op(), text_of(error_)),
              where);
}

ErrorContext RoundEngine::context(const RoundRun& run) const {
  ErrorContext out;
  out.rank = rank_;
  out.op = run.label_.op();
  out.sequence = run.label_.ordinal;
  out.phase = "transfer";
  out.elapsed = std::chrono::duration<double>(Clock::now() - run.started_).count();
  out.limit = std::chrono::duration<double>(run.deadline_ - run.started_).count();
  return out;
}

Error RoundEngine::group_error(const RoundRun& run, const GroupOutcome& outcome,
                               const std::string& doing) const {
  ErrorContext where = context(run);
  std::string who;
  if (outcome.peer >= 0) {
    where.peer = group_[static_cast<size_t>(outcome.peer)];
    who = fmt::format("rank {} ", where.peer);
  }
  return {outcome.remote ? ErrorKind::PeerLost : ErrorKind::Generic,
          fmt::format("rank {}: {} number {} failed in {} while {}: {}{}", rank_, run.label_.op(),
                      run.label_.ordinal, device_->transport(), doing, who, outcome.text),
          where};
}

Error RoundEngine::deadline_error(const RoundRun& run, const std::string& doing) const {
  const ErrorContext where = context(run);
  return {ErrorKind::DeadlineExceeded,
          fmt::format(
              "rank {}: {} number {} was not complete after {:.3g} s while {}: a rank has not called it, is "
              "slow or has exited; give it more time, or look at what the other ranks are doing",
              rank_, run.label_.op(), run.label_.ordinal, where.limit, doing),
          where};
}

}  // namespace meshcast
