#include <algorithm>
#include <chrono>
#include <string>
#include <thread>
#include <utility>

#include <fmt/format.h>

#include "rounds/round_engine.h"

// Enqueues the steps of a run on the GPU, one by one.
namespace meshcast {
namespace {

// Between two checks of a communicator that is in progress. A peer in the same group answers within
// microseconds, which a sleep would miss: so the first checks follow each other. After that a pause is a
// sixteenth of the time waited so far, which it lengthens by no more than that.
constexpr int kQuickLooks = 200;
constexpr int kWaitedPerPause = 16;
constexpr Clock::duration kShortestPause = std::chrono::microseconds(20);  // short compared with a launch
constexpr Clock::duration kLongestPause = std::chrono::milliseconds(2);

// The types of a cast; the same pair for all boxes that are only copied.
std::pair<ElementType, ElementType> cast_of(const BoxMove& box) {
  if (box.from_type == box.to_type) return {ElementType::None, ElementType::None};
  return {box.from_type, box.to_type};
}

// The packed form of a part as it travels, as a view.
StridedView packed_view(const Part& part, std::byte* data) {
  StridedView view{data, part.ndim, part.element_bytes, part.extent, {}};
  int64_t stride = part.element_bytes;
  for (int d = view.ndim; d-- > 0;) {
    view.stride[static_cast<size_t>(d)] = stride;
    stride *= part.extent[static_cast<size_t>(d)];
  }
  return view;
}

}  // namespace

// The lock is taken step by step: fail() must get in between, since a group may wait for its peers. A step
// looks at error_ first, so nothing is enqueued on a communicator that has been aborted.
void RoundEngine::enqueue(RoundRun& run, RoundDevice::Stream caller, RoundDevice::Event after) {
  if (after != 0) {
    const std::lock_guard lock(mutex_);
    device_->wait(caller, after);
  }
  begin(run);
  for (const RoundStep& step : run.rounds().steps) {
    {
      const std::lock_guard lock(mutex_);
      if (error_) std::rethrow_exception(error_);
      switch (step.kind) {
        case StepKind::Record:
          device_->record(step_events_[static_cast<size_t>(step.event)], stream(step.stream, caller));
          break;
        case StepKind::Wait:
          device_->wait(stream(step.stream, caller), step_events_[static_cast<size_t>(step.event)]);
          break;
        case StepKind::Kernels: launch(run, step); break;
        case StepKind::Exchange: exchange(run, step); break;
      }
    }
    if (step.kind == StepKind::Exchange) wait_for_group(run, step);
  }
  finish(run, caller);
}

// Events, staging, and the order behind the run before, which may still use the same staging.
void RoundEngine::begin(RoundRun& run) {
  const std::lock_guard lock(mutex_);
  while (step_events_.size() < static_cast<size_t>(run.rounds().events)) step_events_.push_back(take_event());
  const int64_t nbytes = run.rounds().staging_bytes;
  if (nbytes == 0) return;
  if (nbytes > staging_bytes_) {
    staging_ = device_->allocate(nbytes);  // runs in flight keep what they have
    staging_bytes_ = nbytes;
  }
  run.staging_ = staging_;
  if (!ran_) return;
  // The run before reads and writes the same staging on both streams. Each stream is in order by itself, so
  // only the order across the two is missing.
  device_->wait(device_->kernel_stream(), transfer_over_);
  device_->wait(device_->transfer_stream(), kernels_over_);
}

// Also if the run was cut short: the caller's stream comes behind all that was enqueued.
void RoundEngine::finish(RoundRun& run, RoundDevice::Stream caller) {
  const std::lock_guard lock(mutex_);
  if (run.enqueued_) return;
  device_->record(kernels_over_, device_->kernel_stream());
  device_->record(transfer_over_, device_->transfer_stream());
  ran_ = true;
  if (error_) {
    device_->wait(caller, kernels_over_);
    device_->wait(caller, transfer_over_);
  }
  device_->record(run.over_, caller);
  run.enqueued_ = true;
}

void RoundEngine::launch(const RoundRun& run, const RoundStep& step) {
  const RankRounds& rounds = run.rounds();
  const auto type = [&](const Part& part) {
    return (part.side == Side::Source ? rounds.forms.source : rounds.forms.destination)[part.tensor].type;
  };
  moves_.clear();
  reductions_.clear();
  for (int32_t i = step.begin; i < step.end; ++i) {
    const KernelOp& op = rounds.kernels[static_cast<size_t>(i)];
    if (op.kind == KernelKind::Copy) {
      const CopyOp& copy = rounds.program->copies[static_cast<size_t>(op.copy)];
      moves_.push_back({view(run, copy.from), view(run, copy.to), type(copy.from), type(copy.to)});
      continue;
    }
    // Parts lie one behind the other in staging, each row-major in the wire type.
    std::byte* at = run.staging_.get() + op.staging;
    for (int32_t p = op.parts.begin; p < op.parts.end; ++p) {
      const Part& part = rounds.program->parts[static_cast<size_t>(p)];
      const StridedView packed = packed_view(part, at);
      const ElementType wire = rounds.forms.wire[static_cast<size_t>(part.tensor)];
      if (op.kind == KernelKind::Pack)
        moves_.push_back({view(run, part), packed, type(part), wire});
      else if (op.kind == KernelKind::Unpack)
        moves_.push_back({packed, view(run, part), wire, type(part)});
      else
        reductions_.push_back({view(run, part), at, wire, op.reduce, op.divisor});
      at += packed.nbytes();
    }
  }
  // Boxes of one step have no order, and each change of types would cost a launch.
  const auto before = [](const BoxMove& a, const BoxMove& b) { return cast_of(a) < cast_of(b); };
  if (!std::is_sorted(moves_.begin(), moves_.end(), before)) std::sort(moves_.begin(), moves_.end(), before);
  if (!moves_.empty()) device_->move_boxes(device_->kernel_stream(), moves_);
  if (!reductions_.empty()) device_->reduce_boxes(device_->kernel_stream(), reductions_);
}

void RoundEngine::exchange(const RoundRun& run, const RoundStep& step) {
  GroupOutcome outcome = device_->group_start();
  std::string doing = fmt::format("beginning round {}", step.round);
  const auto failed = [&] { return outcome.state == GroupState::Failed; };
  if (failed()) throw group_error(run, outcome, doing);
  for (int32_t i = step.begin; i < step.end && !failed(); ++i) {
    const RoundMessage& message = run.rounds().messages[static_cast<size_t>(i)];
    std::byte* const data = message_data(run, message);
    outcome = message.send ? device_->send(data, message.nbytes, message.peer, device_->transfer_stream())
                           : device_->recv(data, message.nbytes, message.peer, device_->transfer_stream());
    if (failed())
      doing = fmt::format("{} {} bytes {} rank {} in round {}", message.send ? "sending" : "receiving",
                          message.nbytes, message.send ? "to" : "from",
                          group_[static_cast<size_t>(message.peer)], step.round);
  }
  // A group that was begun is always ended: NCCL counts them by thread.
  const GroupOutcome end = device_->group_end();
  if (failed()) throw group_error(run, outcome, doing);
  if (end.state == GroupState::Failed)
    throw group_error(run, end, fmt::format("launching round {}", step.round));
}

// A communicator that does not block sets up connections, or meets its peers, behind its caller's back; until
// it has, nothing may be enqueued on it, nor an event recorded behind the group.
void RoundEngine::wait_for_group(const RoundRun& run, const RoundStep& step) {
  const std::string doing =
      fmt::format("{} for round {}", queue_ ? "meeting the other ranks" : "connecting", step.round);
  const TimePoint begun = Clock::now();
  for (int look = 0;; ++look) {
    {
      const std::lock_guard lock(mutex_);
      if (error_) std::rethrow_exception(error_);
      const GroupOutcome outcome = device_->async_error();
      if (outcome.state == GroupState::Success) return;
      if (outcome.state == GroupState::Failed) throw group_error(run, outcome, doing);
    }
    const TimePoint limit = observer_.failed ? run.deadline_ + kObserverGrace : run.deadline_;
    const TimePoint now = Clock::now();
    if (now >= limit) throw deadline_error(run, doing);
    if (look < kQuickLooks)
      std::this_thread::yield();
    else
      std::this_thread::sleep_for(std::clamp((now - begun) / kWaitedPerPause, kShortestPause, kLongestPause));
  }
}

RoundDevice::Stream RoundEngine::stream(StreamRole role, RoundDevice::Stream caller) const {
  if (role == StreamRole::Caller) return caller;
  return role == StreamRole::Kernels ? device_->kernel_stream() : device_->transfer_stream();
}

StridedView RoundEngine::view(const RoundRun& run, const Part& part) const {
  const bool source = part.side == Side::Source;
  const auto tensor = static_cast<size_t>(part.tensor);
  const RankRounds& rounds = run.rounds();
  const TensorForm& form = (source ? rounds.forms.source : rounds.forms.destination)[tensor];
  return part_view(part, rounds.program->places, form.stride, form.element_bytes,
                   (source ? run.memory_.source : run.memory_.destination)[tensor]);
}

std::byte* RoundEngine::message_data(const RoundRun& run, const RoundMessage& message) const {
  if (message.staging >= 0) return run.staging_.get() + message.staging;
  return view(run, run.rounds().program->parts[static_cast<size_t>(message.part)]).data;
}

}  // namespace meshcast
