#include "c10d/reshard_work.h"

#include <utility>

#include <fmt/format.h>

#include "common/error.h"
#include "common/signals.h"
#include "group/watcher.h"
#include "run/executor.h"

namespace meshcast {

std::shared_ptr<RecycleBin::Bag> RecycleBin::bag(std::vector<at::Tensor> tensors) {
  return {new Bag{std::move(tensors)}, [bin = shared_from_this()](Bag* bag) {
            if (bin->origin_.foreign()) return;  // its lock may be held for ever
            {
              const std::lock_guard lock(bin->mutex_);
              bag->next = std::move(bin->bags_);
              bin->bags_.reset(bag);
            }
            // No work is left to empty it.
            if (bin.use_count() == 1) Executor::of_process().post([bin] {});
          }};
}

// Freed without the lock, and one after the other: a long chain would free itself too deep down the stack.
void RecycleBin::empty() {
  if (origin_.foreign()) return;
  std::unique_ptr<Bag> bags;
  {
    const std::lock_guard lock(mutex_);
    bags = std::move(bags_);
  }
  while (bags) bags = std::move(bags->next);
}

ReshardWork::ReshardWork(int rank, std::shared_ptr<RunState> run, std::shared_ptr<RecycleBin> bin,
                         std::vector<at::Tensor> outputs, std::weak_ptr<Watcher> watcher)
    : Work(rank, c10d::OpType::UNKNOWN, "meshcast:reshard"),
      run_(std::move(run)),
      bin_(std::move(bin)),
      outputs_(std::move(outputs)),
      watcher_(std::move(watcher)) {}

int ReshardWork::sourceRank() const { throw Error(ErrorKind::Generic, "a reshard has no single source rank"); }

bool ReshardWork::wait(std::chrono::milliseconds timeout) {
  origin_.check();
  // The watcher ends every run soon after its deadline; the minute only guards against its own failure.
  const TimePoint limit =
      timeout == kNoTimeout ? run_->deadline() + std::chrono::minutes(1) : Clock::now() + timeout;
  if (!ended_by(limit, timeout == kNoTimeout)) {
    const RunLabel& label = run_->label();
    ErrorContext context;
    context.rank = rank_;
    context.op = label.op();
    context.sequence = label.ordinal;
    context.phase = "wait";
    context.elapsed = run_->seconds();
    context.limit = std::chrono::duration<double>(timeout).count();
    throw Error(
        ErrorKind::DeadlineExceeded,
        fmt::format(
            "{} call {}: not complete after {:.2f} s, the limit given to wait(); the transfer continues",
            label.op(), label.ordinal, run_->seconds()),
        context);
  }
  return raise_or_true();
}

bool ReshardWork::ended_by(TimePoint limit, bool driven) {
  try {
    return wait_in_slices(limit, [&](TimePoint slice) {
      if (driven) run_->drive(slice);
      return run_->wait_until(slice);
    });
  } catch (const std::exception& raised) {
    // By a handler of a signal. The others would wait for a rank that may never come back.
    const std::string text = raised.what();
    if (const auto watcher = watcher_.lock()) {
      watcher->abort(fmt::format("rank {} was interrupted in {} call {}: {}", watcher->rank(),
                                 run_->label().op(), run_->label().ordinal, text.substr(0, text.find('\n'))));
    }
    throw;
  }
}

bool ReshardWork::raise_or_true() const {
  bin_->empty();
  if (const auto error = run_->error()) std::rethrow_exception(error);
  return true;
}

bool ReshardWork::isCompleted() {
  if (origin_.foreign()) return true;
  if (!run_->ended()) return false;
  bin_->empty();
  return true;
}

c10::intrusive_ptr<c10::ivalue::Future> ReshardWork::getFuture() {
  origin_.check();
  Promise made = promise();
  {
    const std::lock_guard lock(mutex_);
    if (future_) return future_;
    future_ = made.future;
  }
  // The run holds the callback, and its engine holds the run until it has ended.
  run_->on_end(
      [promise = std::move(made), outputs = outputs_, bin = bin_, run = std::weak_ptr<RunState>(run_)] {
        bin->empty();
        const auto self = run.lock();
        const auto error = self ? self->error() : nullptr;
        if (error)
          promise.future->setError(error);
        else
          promise.complete(*promise.future, outputs);
      });
  return future_;
}

ReshardWork::Promise ReshardWork::promise() const {
  return {c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get())),
          [](c10::ivalue::Future& future, const std::vector<at::Tensor>& outputs) {
            future.markCompleted(c10::IValue(outputs));
          }};
}

}  // namespace meshcast
