#include "c10d/process_group/message_work.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "c10d/process_group/point_to_point.h"
#include "common/signals.h"
#include "transport/progress.h"

namespace meshcast {
namespace {

// A message that was given up releases its memory within this time.
constexpr auto kEndGrace = std::chrono::seconds(2);
// So that "no limit" in any spelling cannot overflow the clock.
constexpr std::chrono::milliseconds kLongest = std::chrono::hours(24 * 365);

}  // namespace

void MessageState::end(std::exception_ptr error) {
  std::shared_ptr<RecycleBin::Bag> memory;
  std::shared_ptr<Transport> driven;
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(ended_, true)) return;
    error_ = error && decided_ ? decided_ : std::move(error);
    memory.swap(memory_);
    if (driven_) driven = transport_.lock();
  }
  changed_.notify_all();
  if (driven) wake_driver(driven->source());
}

bool MessageState::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}

std::exception_ptr MessageState::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

void MessageState::travels_over(const std::shared_ptr<Transport>& transport) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(travels_, true)) return;
    transport_ = transport;
  }
  changed_.notify_all();
}

void MessageState::comes_from(int source, int32_t peer) {
  const std::lock_guard lock(mutex_);
  source_ = source;
  label_.peer = peer;
}

int MessageState::source() const {
  const std::lock_guard lock(mutex_);
  return source_;
}

void MessageState::decide(std::exception_ptr error) {
  const std::lock_guard lock(mutex_);
  if (!decided_) decided_ = std::move(error);
}

std::exception_ptr MessageState::decided() const {
  const std::lock_guard lock(mutex_);
  return decided_;
}

bool MessageState::wait_until(TimePoint limit) {
  std::shared_ptr<Transport> transport;
  {
    std::unique_lock lock(mutex_);
    changed_.wait_until(lock, limit, [this] { return ended_ || travels_; });
    if (ended_) return true;
    transport = transport_.lock();
    driven_ = driven_ || transport;
  }
  if (transport)
    drive(
        {transport->source()}, [this] { return ended(); }, limit);
  std::unique_lock lock(mutex_);  // it may have been driven to an end that another thread is about to report
  return changed_.wait_until(lock, limit, [this] { return ended_; });
}

Error MessageState::problem(ErrorKind kind, const std::string& what, double limit) const {
  ErrorContext context;
  std::string with;
  {
    const std::lock_guard lock(mutex_);
    context.rank = label_.rank;
    context.peer = label_.peer;
    context.op = label_.sends ? "send" : "recv";
    context.elapsed = std::chrono::duration<double>(Clock::now() - started_).count();
    context.limit = limit;
    context.phase = travels_ ? "transfer" : "connect";
    with = fmt::format("rank {}: {} of {} bytes {} {}, tag {}", label_.rank, context.op, label_.nbytes,
                       label_.sends ? "to" : "from",
                       label_.peer < 0 ? "any rank" : fmt::format("rank {}", label_.peer), label_.tag);
  }
  return {kind, fmt::format("{}: {}", with, what), context};
}

MessageWork::MessageWork(c10d::OpType op, const char* title, const at::Tensor& tensor, int rank,
                         std::shared_ptr<MessageState> state, std::shared_ptr<PointToPoint> owner,
                         std::chrono::milliseconds limit)
    : Work(rank, op, title, std::vector<at::Tensor>{tensor}),
      state_(std::move(state)),
      owner_(std::move(owner)),
      limit_(limit) {}

bool MessageWork::isCompleted() {
  if (origin_.foreign()) return true;  // wait() raises at once
  if (!state_->ended()) return false;
  close_record();
  return true;
}

int MessageWork::sourceRank() const {
  if (opType_ == c10d::OpType::SEND) return Work::sourceRank();  // refuses, with torch's text
  return state_->source();
}

bool MessageWork::wait(std::chrono::milliseconds timeout) {
  origin_.check();
  const auto ended_by = [this](TimePoint when) {
    return wait_in_slices(when, [this](TimePoint slice) { return state_->wait_until(slice); });
  };
  const auto limit = std::min(timeout == kNoTimeout ? limit_ : timeout, kLongest);
  if (!ended_by(Clock::now() + limit)) {
    const double seconds = std::chrono::duration<double>(limit).count();
    if (timeout != kNoTimeout)
      throw state_->problem(
          ErrorKind::DeadlineExceeded,
          fmt::format("not complete after {:.2f} s, the limit given to wait(); the message continues", seconds),
          seconds);
    owner_->give_up(state_, seconds);
    if (!ended_by(Clock::now() + kEndGrace))
      std::rethrow_exception(state_->decided());  // it keeps its tensor, which may still be written to
  }
  close_record();
  if (const auto error = state_->error()) std::rethrow_exception(error);
  return true;
}

// The profiler's, which torch begins with the work.
void MessageWork::close_record() {
  if (recordFunctionEndCallback_) finish(state_->error());
}

}  // namespace meshcast
