#include <algorithm>
#include <utility>

#include "common/fault_point.h"
#include "run/channel.h"

namespace meshcast {

// One issued message. The tensors stay alive until it has ended.
class OutChannel::Dispatch final : public Outgoing {
 public:
  Dispatch(OutChannel& channel, std::shared_ptr<Run> run, const SendOp& op, int64_t position)
      : channel_(channel), run_(std::move(run)), op_(op), position_(position) {
    run_->pin();
  }

  const std::byte* packed() override { return run_->packed(op_); }
  void read(int64_t offset, int64_t nbytes, std::byte* out) override { run_->read(op_, offset, nbytes, out); }

  void finished() override {
    guarded(channel_.failure_, channel_.peer_, run_, [this] { channel_.sent(*this); });
  }

  void failed(int peer, const TransportError& error) override {
    if (error.cause() != TransportError::Cause::Aborted) channel_.failure_(peer, error, run_);
    run_->unpin();
  }

 private:
  friend class OutChannel;

  OutChannel& channel_;
  const std::shared_ptr<Run> run_;
  const SendOp& op_;  // of the run's program
  const int64_t position_;
};

OutChannel::OutChannel(std::shared_ptr<Transport> transport, int peer, int32_t lane, ChannelFailure failure)
    : transport_(std::move(transport)), peer_(peer), lane_(lane), failure_(std::move(failure)) {}

int64_t OutChannel::enqueue(const std::shared_ptr<Run>& run, const std::vector<int32_t>& ops) {
  const std::lock_guard lock(mutex_);
  const int64_t position = first_ + static_cast<int64_t>(entries_.size());
  if (closed_) return position;
  for (const int32_t index : ops) {
    const SendOp& op = run->program().sends[static_cast<size_t>(index)];
    entries_.push_back({run, &op, op.forward ? State::Waiting : State::Ready});
  }
  return position;
}

void OutChannel::mark_ready(int64_t position) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    entries_[static_cast<size_t>(position - first_)].state = State::Ready;
  }
  pump();
}

OutChannel::Entry* OutChannel::next_locked(int64_t* position) {
  const size_t window = std::min(kWindow, entries_.size());
  for (size_t at = 0; !closed_ && at < window; ++at) {
    Entry& entry = entries_[at];
    if (entry.state != State::Ready || !entry.run->send_order.may_go(entry.op->number)) continue;
    *position = first_ + static_cast<int64_t>(at);
    return &entry;
  }
  return nullptr;
}

// One thread at a time; others leave their messages to it. Messages are issued without the lock, and within the
// window in any order: their keys contain their positions.
void OutChannel::pump(const std::function<void()>& between) {
  std::unique_lock lock(mutex_);
  if (pumping_) return;
  pumping_ = true;
  int64_t position = 0;
  while (Entry* next = next_locked(&position)) {
    next->state = State::Issued;
    const Entry entry = *next;
    lock.unlock();
    MC_FAULT_POINT("send");
    const Envelope to{peer_, lane_, message_key(entry.run->label(), position), entry.run->program().relayed};
    transport_->send(to, entry.op->nbytes, std::make_unique<Dispatch>(*this, entry.run, *entry.op, position));
    if (between) between();
    lock.lock();
  }
  pumping_ = false;
}

void OutChannel::sent(Dispatch& dispatch) {
  const std::shared_ptr<Run>& run = dispatch.run_;
  const SendOp& op = dispatch.op_;
  {
    const std::lock_guard lock(mutex_);
    if (!closed_) {
      entries_[static_cast<size_t>(dispatch.position_ - first_)].state = State::Sent;
      while (!entries_.empty() && entries_.front().state == State::Sent) {
        entries_.pop_front();
        ++first_;
      }
    }
  }
  if (run->send_order.done(op.number)) {
    for (OutChannel* channel : run->out_channels) channel->pump();
  } else {
    pump();
  }
  if (op.carry >= 0) run->carried_sent(op.carry);
  run->complete_ops(1, 0, op.nbytes);
  run->unpin();
}

void OutChannel::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  entries_.clear();
}

}  // namespace meshcast
