#include <algorithm>
#include <utility>

#include "run/channel.h"

namespace meshcast {

// One issued message. The tensors stay until it has gone.
class OutChannel::Dispatch final : public Message {
 public:
  Dispatch(OutChannel& channel, std::shared_ptr<Run> run, const SendOp& op, int64_t position,
           std::vector<std::byte> staging)
      : channel_(channel), run_(std::move(run)), op_(op), position_(position), staging_(std::move(staging)) {
    run_->pin();
  }

  void finished() override { channel_.sent(*this); }

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
  std::vector<std::byte> staging_;
};

OutChannel::OutChannel(std::shared_ptr<Transport> transport, int peer, int32_t lane, ChannelFailure failure)
    : transport_(std::move(transport)), peer_(peer), lane_(lane), failure_(std::move(failure)) {}

int64_t OutChannel::enqueue(const std::shared_ptr<Run>& run, const std::vector<const SendOp*>& ops) {
  const std::lock_guard lock(mutex_);
  const int64_t position = first_ + static_cast<int64_t>(entries_.size());
  if (closed_) return position;
  for (const SendOp* op : ops) entries_.push_back({run, op, op->forward ? State::Waiting : State::Ready});
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

// One thread at a time: others that find it here leave their work to it. Packing and issuing are done without
// the lock. Entries within the window may be issued out of order: their positions are in their keys.
void OutChannel::pump(const std::function<void()>& between) {
  std::unique_lock lock(mutex_);
  if (pumping_) return;
  pumping_ = true;
  int64_t position = 0;
  while (Entry* next = next_locked(&position)) {
    next->state = State::Issued;
    const Entry entry = *next;
    std::vector<std::byte> staging;
    if (!pool_.empty()) {
      staging = std::move(pool_.back());
      pool_.pop_back();
    }
    lock.unlock();
    issue(entry, position, std::move(staging));
    if (between) between();
    lock.lock();
  }
  pumping_ = false;
}

void OutChannel::issue(const Entry& entry, int64_t position, std::vector<std::byte> staging) {
  const SendOp& op = *entry.op;
  auto dispatch = std::make_unique<Dispatch>(*this, entry.run, op, position, std::move(staging));
  std::byte* data = nullptr;
  if (op.carry >= 0) {
    data = entry.run->carries.data(op.carry);
  } else if (!entry.run->direct(op.parts, &data)) {
    dispatch->staging_.resize(static_cast<size_t>(op.nbytes));
    data = dispatch->staging_.data();
    std::byte* out = data;
    for (int32_t i = op.parts.begin; i < op.parts.end; ++i) {
      const StridedView view = entry.run->view(entry.run->part(i));
      pack(view, out);
      out += view.nbytes();
    }
  }
  const Envelope to{peer_, lane_, message_key(entry.run->label(), position)};
  transport_->send(to, data, op.nbytes, std::move(dispatch));
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
      if (dispatch.staging_.capacity() > 0 && pool_.size() < kWindow) {
        pool_.push_back(std::move(dispatch.staging_));
      }
    }
  }
  if (run->send_order.done(op.number)) {
    for (OutChannel* channel : run->out_channels) channel->pump();
  } else {
    pump();
  }
  if (op.carry >= 0) run->carried_sent(op.carry);
  run->complete_ops(1, 0);
  run->unpin();
}

void OutChannel::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  entries_.clear();
  pool_.clear();
}

}  // namespace meshcast
