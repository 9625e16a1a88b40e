#include "group/transfer.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>

#include "common/error.h"
#include "common/signals.h"

namespace meshcast {
namespace {

// Granted to a control thread beyond the limit of a call, to report it.
constexpr auto kGrace = std::chrono::milliseconds(1600);

// In seconds, above zero: the call itself reports a limit that has passed.
double seconds_to(TimePoint deadline) {
  return std::max(std::chrono::duration<double>(deadline - Clock::now()).count(), 1e-3);
}

void rethrow_unless_up(const std::shared_ptr<GroupCore>& core, const std::exception_ptr& error) {
  if (core) return;
  if (error) std::rethrow_exception(error);
  throw Error(ErrorKind::Generic, "the private group is not up");
}

bool is_aborted(const std::exception& error) {
  const auto* typed = dynamic_cast<const Error*>(&error);
  return typed && typed->kind() == ErrorKind::Aborted;
}

// Whether this call was refused in the generation in which it began: the next does not begin it.
bool is_refused(const std::exception& error, CallId call) {
  const auto* typed = dynamic_cast<const Error*>(&error);
  return typed && typed->kind() == ErrorKind::PlanMismatch && typed->context().sequence == call.ordinal &&
         !dynamic_cast<const BrokenError*>(typed);
}

}  // namespace

bool Transfer::has_agreed(const std::shared_ptr<GroupCore>& core) const {
  const CompiledPlans* const plans = compiled_.load(std::memory_order_acquire);
  if (!plans) return false;
  if (is_shared_) return group->has_agreed(core, plans->text.descriptor);
  const std::lock_guard lock(mutex_);
  return own_ && own_core_.lock() == core;
}

std::shared_ptr<AgreedPlan> Transfer::agreed(const std::shared_ptr<GroupCore>& core, CallId call,
                                             TimePoint deadline) {
  std::shared_ptr<AgreedPlan> found;
  const CompiledPlans* plans = compiled_.load(std::memory_order_acquire);
  if (!plans) {
    try {
      plans = &compiled();
    } catch (const std::exception& error) {
      core->refuse(call, error.what(), false);
      throw;
    }
  }
  if (is_shared_) {
    found = group->use_agreed(core, plans->text.descriptor);
  } else {
    const std::lock_guard lock(mutex_);
    if (own_core_.lock() == core) found = own_;
  }
  if (!found) {
    try {
      found = core->agree_on(call, plans->text, plans->forward, plans->reverse, seconds_to(deadline));
    } catch (const Error& error) {
      // A rank is missing: from here on, the ranks do not count calls in the same way.
      if (error.kind() == ErrorKind::Aborted || error.kind() == ErrorKind::DeadlineExceeded ||
          error.kind() == ErrorKind::PeerLost)
        core->abort(error.what());
      throw;
    }
    if (is_shared_) {
      group->add_agreed(core, plans->text.descriptor, found);
    } else {
      const std::lock_guard lock(mutex_);
      own_ = found;
      own_core_ = core;
    }
  }
  return found;
}

const CompiledPlans& Transfer::compiled() {
  auto plans = std::make_unique<const CompiledPlans>(compile());
  const std::lock_guard lock(mutex_);
  if (!plans_) {
    plans_ = std::move(plans);
    compiled_.store(plans_.get(), std::memory_order_release);
  }
  return *plans_;
}

void Transfer::close(const std::exception_ptr& error) {
  const std::lock_guard lock(mutex_);
  if (!closed_) closed_ = error;
}

std::exception_ptr Transfer::closed() const {
  const std::lock_guard lock(mutex_);
  return closed_;
}

void Transfer::note_failure(const std::exception_ptr& error) {
  const std::lock_guard lock(mutex_);
  failure_ = error;
}

std::exception_ptr Transfer::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

void Transfer::note_tried() {
  const std::lock_guard lock(mutex_);
  if (std::exchange(was_tried_, true)) return;
  tried_.notify_all();
}

bool Transfer::wait_until_tried(TimePoint limit) {
  std::unique_lock lock(mutex_);
  return tried_.wait_until(lock, limit, [this] { return was_tried_; });
}

Start::Start(std::shared_ptr<Transfer> transfer, std::shared_ptr<CallNumber> number, double timeout_seconds,
             bool reverse, std::string op)
    // A backward has the ordinal of its forward, in the lane of backwards.
    : Command(reverse ? AgreedPlan::kReverseLane : transfer->lane,
              reverse ? std::optional(number->ordinal) : std::nullopt, deadline_after(timeout_seconds), true),
      group_(transfer->group),
      transfer_(std::move(transfer)),
      number_(std::move(number)),
      reverse_(reverse),
      op_(std::move(op)),
      timeout_seconds_(timeout_seconds) {}

bool Start::ready() {
  if (!is_brought()) return false;
  return reverse_ || transfer_->has_agreed(group_->core());
}

bool Start::is_settled() const {
  if (origin_.foreign()) return true;
  const std::lock_guard lock(mutex_);
  return settled_;
}

std::exception_ptr Start::error() const {
  if (origin_.foreign()) return nullptr;
  const std::lock_guard lock(mutex_);
  return error_;
}

std::optional<int64_t> Start::generation() const {
  const std::lock_guard lock(mutex_);
  return generation_;
}

void Start::make_final() {
  if (origin_.foreign()) return;
  std::shared_ptr<Transfer> transfer;  // freed without the lock
  {
    const std::lock_guard lock(mutex_);
    final_ = true;
    if (!settled_ || std::exchange(released_, true)) return;
    transfer.swap(transfer_);
  }
  release();
}

// Null: it runs. A start that was given up may still run: it has failed. Waiting threads continue once
// settled() has returned.
void Start::settle(const std::exception_ptr& error) {
  {
    const std::lock_guard lock(mutex_);
    if (std::exchange(settles_, true)) return;
    if (error) fails_with_locked(error);
  }
  settled();
  bool is_final = error != nullptr;
  {
    const std::lock_guard lock(mutex_);
    settled_ = true;
    is_final = is_final || final_;
    changed_.notify_all();
  }
  if (is_final) make_final();
}

void Start::fails_with_locked(const std::exception_ptr& error) {
  error_ = error;
  if (!reverse_) number_->failed = true;
}

void Start::await_settled() {
  const auto is_so = [this](TimePoint slice) {
    std::unique_lock lock(mutex_);
    return changed_.wait_until(lock, slice, [this] { return settled_; });
  };
  if (is_settled()) return;
  // A control thread applies the limit itself, and its error says more.
  if (wait_in_slices(std::max(deadline, Clock::now()) + kGrace, is_so)) return;
  group_->give_up_if_stuck();
  if (is_settled()) return;
  throw Error(
      ErrorKind::DeadlineExceeded,
      fmt::format("{} was still queued behind earlier calls of its group after {:g} s", op_, timeout_seconds_),
      {.op = op_, .phase = "agree", .elapsed = timeout_seconds_, .limit = timeout_seconds_});
}

bool Start::begins_again() {
  std::shared_ptr<GroupCore> core;
  {
    const std::lock_guard lock(mutex_);
    core = core_.lock();
    if (reverse_ || final_ || !core) return false;
    settled_ = settles_ = false;
  }
  const bool again = group_->begin_again(shared_from_this(), core);
  if (!again) {
    const std::lock_guard lock(mutex_);
    settled_ = settles_ = true;
  }
  return again;
}

void Start::wait() {
  origin_.check();
  Group& group = *group_;
  for (;;) {
    await_settled();
    if (const auto failed = error()) {
      if (const auto news = group.take_news()) {
        const std::lock_guard lock(mutex_);
        fails_with_locked(std::make_exception_ptr(*news));
      }
      std::rethrow_exception(error());
    }
    try {
      wait_for_work();
      break;
    } catch (const Error&) {
      const auto failed = std::current_exception();
      if (begins_again()) {
        began_again();
        continue;
      }
      make_final();
      const auto news = group.take_news();
      const std::lock_guard lock(mutex_);
      fails_with_locked(news ? std::make_exception_ptr(*news) : failed);
      std::rethrow_exception(error_);
    }
  }
  make_final();
}

bool Start::is_completed() {
  if (origin_.foreign() || error()) return true;
  if (!is_settled() || !has_ended()) return false;
  if (has_succeeded()) make_final();
  return true;
}

// For a backward: what its forward agreed on, in this generation of the group.
std::shared_ptr<AgreedPlan> Start::agree(Transfer& transfer, const std::shared_ptr<GroupCore>& core) {
  if (!reverse_) {
    auto agreed = transfer.agreed(core, call(), deadline);
    connect(core, call());
    return agreed;
  }
  if (!number_->agreed) {
    if (const auto failure = transfer.failure()) std::rethrow_exception(failure);
    throw Error(ErrorKind::Generic, fmt::format("{}: the call itself has failed", op_));
  }
  if (number_->core.lock() != core) {
    const GroupIdentity& group = group_->identity();
    throw group_error(
        group, ErrorKind::Aborted,
        fmt::format("rank {}: {} call {} of {}: the group began again after the forward of this call, "
                    "because a rank refused another one; run the step again",
                    group.rank, op_, *ordinal, group.name),
        {.op = op_, .sequence = *ordinal, .phase = "start"});
  }
  return number_->agreed;
}

Command::Begun Start::begin(const std::shared_ptr<GroupCore>& core, const std::exception_ptr& error) {
  Group& group = *group_;
  std::shared_ptr<Transfer> transfer;
  {
    const std::lock_guard lock(mutex_);
    if (settles_) return Begun::Done;  // it was given up
    core_ = core;
    generation_ = group.generation();
    transfer = transfer_;
    if (!reverse_) number_->ordinal = *ordinal;  // a thread that gives it up may be here at the same time
  }
  bool starts = false;
  Begun begun = Begun::Done;
  try {
    rethrow_unless_up(core, error);
    if (const auto closed = transfer->closed()) std::rethrow_exception(closed);
    const auto agreed = agree(*transfer, core);
    if (!reverse_) {
      number_->run = agreed->next_run();
      if (transfer->has_backward()) {
        number_->agreed = agreed;
        number_->core = core;
      }
    }
    starts = true;
    start(core, *agreed, call(), reverse_, seconds_to(deadline));
    settle(nullptr);
  } catch (const std::exception& raised) {
    std::exception_ptr cause = std::current_exception();
    if (core) {
      if (group.left(core, call()) && !reverse_ && !is_refused(raised, call())) return Begun::Again;
      if (starts && !core->error()) {
        refusal = raised.what();
        refusal_error_ = cause;
        begun = Begun::Refused;
      } else if (is_aborted(raised)) {
        if (const auto refused = group.error_of_refusal(*core, call()))
          cause = std::make_exception_ptr(*refused);
      }
    }
    transfer->note_failure(cause);
    if (begun == Begun::Done) settle(cause);
  }
  transfer->note_tried();
  return begun;
}

Command::Begun Agreement::begin(const std::shared_ptr<GroupCore>& core, const std::exception_ptr& error) {
  try {
    rethrow_unless_up(core, error);
    transfer_->agreed(core, call(), deadline);
  } catch (const std::exception&) {
    const std::exception_ptr cause = std::current_exception();
    if (core && transfer_->group->left(core, call())) return Begun::Again;
    transfer_->close(cause);
  }
  transfer_->note_tried();
  return Begun::Done;
}

}  // namespace meshcast
