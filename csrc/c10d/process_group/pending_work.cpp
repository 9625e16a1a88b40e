#include "c10d/process_group/pending_work.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "common/error.h"
#include "common/signals.h"
#include "run/executor.h"
#include "transport/transport.h"

namespace meshcast {

PendingWork::PendingWork(int rank, c10d::OpType op, const char* title, std::vector<at::Tensor> tensors)
    : Work(rank, op, title), tensors_(std::move(tensors)) {}

void PendingWork::settle(c10::intrusive_ptr<c10d::Work> running) { settle_with(std::move(running), nullptr); }

void PendingWork::fail(std::exception_ptr error) { settle_with(nullptr, std::move(error)); }

void PendingWork::settle_with(c10::intrusive_ptr<c10d::Work> running, std::exception_ptr refused) {
  FuturePtr asked;
  std::shared_ptr<void> thread;
  {
    const std::lock_guard lock(state_mutex_);
    running_ = running;
    refused_ = refused;
    asked = future_;
    thread.swap(thread_);
  }
  settled_.notify_all();
  if (!asked) return;
  Executor::of_process().post([asked, tensors = tensors_, running = std::move(running),
                               refused = std::move(refused),
                               thread = std::move(thread)] { complete(asked, tensors, running, refused); });
}

void PendingWork::complete(const FuturePtr& future, const std::vector<at::Tensor>& tensors,
                           const c10::intrusive_ptr<c10d::Work>& running, const std::exception_ptr& refused) {
  if (refused) return future->setError(refused);
  try {
    running->getFuture()->addCallback([future, tensors](c10::ivalue::Future& done) {
      if (done.hasError()) {
        future->setError(done.exception_ptr());
      } else {
        future->markCompleted(c10::IValue(tensors));
      }
    });
  } catch (const Error&) {  // no thread for callbacks
    future->setError(std::current_exception());
  }
}

// A future that is made here has no callbacks yet, so it may be completed here.
c10::intrusive_ptr<c10::ivalue::Future> PendingWork::getFuture() {
  origin_.check();
  c10::intrusive_ptr<c10d::Work> running;
  std::exception_ptr refused;
  auto made = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
  auto thread = Executor::of_process().reserve();
  {
    const std::lock_guard lock(state_mutex_);
    if (future_) return future_;
    future_ = made;
    running = running_;
    refused = refused_;
    if (!running && !refused) thread_ = std::move(thread);
  }
  if (running || refused) complete(made, tensors_, running, refused);
  return made;
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
                  fmt::format("{}: not started after {:.2f} s, the limit given to wait(); the call continues",
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

}  // namespace meshcast
