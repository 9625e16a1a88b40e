#include "c10d/process_group/pending_work.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "common/error.h"
#include "common/signals.h"

namespace meshcast {

PendingWork::PendingWork(int rank, c10d::OpType op, const char* title, std::vector<at::Tensor> tensors,
                         std::shared_ptr<RecycleBin> bin)
    : Work(rank, op, title),
      bin_(std::move(bin)),
      tensors_(std::move(tensors)),
      future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {}

void PendingWork::settle(c10::intrusive_ptr<c10d::Work> running) {
  {
    const std::lock_guard lock(state_mutex_);
    running_ = running;
  }
  settled_.notify_all();
  // Called by a thread of the engine, which must not be the one that frees a tensor: hence the bag.
  running->getFuture()->addCallback([bag = bin_->bag({tensors_, future_})](c10::ivalue::Future& done) {
    if (done.hasError()) {
      bag->future->setError(done.exception_ptr());
    } else {
      bag->future->markCompleted(c10::IValue(bag->tensors));
    }
  });
}

void PendingWork::fail(std::exception_ptr error) {
  {
    const std::lock_guard lock(state_mutex_);
    refused_ = error;
  }
  settled_.notify_all();
  future_->setError(std::move(error));
}

c10::intrusive_ptr<c10d::Work> PendingWork::running() const {
  if (origin_.foreign()) return nullptr;
  const std::lock_guard lock(state_mutex_);
  return running_;
}

std::exception_ptr PendingWork::refused() const {
  if (origin_.foreign()) return nullptr;
  const std::lock_guard lock(state_mutex_);
  return refused_;
}

bool PendingWork::isCompleted() {
  if (origin_.foreign()) return true;  // wait() raises at once
  const auto work = running();
  return work ? work->isCompleted() : refused() != nullptr;
}

bool PendingWork::isSuccess() const {
  const auto work = running();
  return work && work->isSuccess();
}

std::exception_ptr PendingWork::exception() const {
  const auto work = running();
  return work ? work->exception() : refused();
}

std::vector<at::Tensor> PendingWork::result() { return tensors_; }

void PendingWork::synchronize() { wait(kNoTimeout); }

bool PendingWork::wait(std::chrono::milliseconds timeout) {
  origin_.check();
  // The thread that is to start it gives up at its deadline.
  const auto limit = timeout == kNoTimeout ? TimePoint::max() : Clock::now() + timeout;
  const auto settled_by = [this](TimePoint slice) {
    std::unique_lock lock(state_mutex_);
    return settled_.wait_until(lock, slice, [this] { return running_ || refused_; });
  };
  const bool settled = wait_in_slices(limit, settled_by);
  c10::intrusive_ptr<c10d::Work> work;
  {
    const std::lock_guard lock(state_mutex_);
    if (!settled) {
      ErrorContext context;
      context.rank = rank_;
      context.phase = "wait";
      context.limit = std::chrono::duration<double>(timeout).count();
      throw Error(ErrorKind::DeadlineExceeded,
                  fmt::format("{}: not started after {:.2f} s, the limit given to wait(); the call goes on",
                              c10d::opTypeToString(opType_), context.limit),
                  context);
    }
    if (refused_) std::rethrow_exception(refused_);
    work = running_;
  }
  if (timeout == kNoTimeout) return work->wait(timeout);
  const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(limit - Clock::now());
  return work->wait(std::max(left, std::chrono::milliseconds(1)));  // 0 would be no limit
}

c10::intrusive_ptr<c10::ivalue::Future> PendingWork::getFuture() { return future_; }

}  // namespace meshcast
