#include <utility>

#include "run/channel.h"

namespace meshcast {

// One posted receive.
class InChannel::Receipt final : public Message {
 public:
  Receipt(InChannel& channel, std::shared_ptr<Run> run, const RecvOp& op)
      : channel_(channel), run_(std::move(run)), op_(op) {
    run_->pin();
  }

  void finished() override { channel_.arrived(*this); }

  void failed(int peer, const TransportError& error) override {
    // An abort is this engine's own doing.
    if (error.cause() != TransportError::Cause::Aborted) channel_.failure_(peer, error, run_);
    run_->unpin();
  }

 private:
  friend class InChannel;

  InChannel& channel_;
  const std::shared_ptr<Run> run_;
  const RecvOp& op_;                // of the run's program
  std::vector<std::byte> staging_;  // empty: straight into the destination
};

InChannel::InChannel(std::shared_ptr<Transport> transport, int peer, int32_t lane, Arrived arrived,
                     ChannelFailure failure)
    : transport_(std::move(transport)),
      peer_(peer),
      lane_(lane),
      arrived_(std::move(arrived)),
      failure_(std::move(failure)) {}

void InChannel::enqueue(const std::shared_ptr<Run>& run, const std::vector<const RecvOp*>& ops) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  for (const RecvOp* op : ops) entries_.push_back({run, op});
}

bool InChannel::may_post_locked() const {
  if (closed_ || posted_ >= kWindow || entries_.empty()) return false;
  const Entry& front = entries_.front();
  if (!front.run->recv_order.may_go(front.op->number)) return false;
  return front.op->carry < 0 || front.run->carries.may_take(front.op->carry);
}

// In order and without gaps, so that what is posted is the front of the window that the sender counts on too.
// Without the lock while the transport is told: a message that is there already is finished at once, which
// makes room for the next.
void InChannel::resume() {
  std::unique_lock lock(mutex_);
  if (posting_) return;
  posting_ = true;
  while (may_post_locked()) {
    Entry entry = std::move(entries_.front());
    entries_.pop_front();
    ++posted_;
    const Envelope from{peer_, lane_, message_key(entry.run->label(), first_++)};
    const int64_t nbytes = entry.op->nbytes;
    std::byte* data = nullptr;
    auto receipt = receipt_for(std::move(entry), &data);
    lock.unlock();
    transport_->recv(from, data, nbytes, std::move(receipt));
    lock.lock();
  }
  posting_ = false;
}

std::unique_ptr<InChannel::Receipt> InChannel::receipt_for(Entry entry, std::byte** data) {
  const RecvOp& op = *entry.op;
  auto receipt = std::make_unique<Receipt>(*this, std::move(entry.run), op);
  if (op.carry >= 0) {
    receipt->staging_ = receipt->run_->carries.take(op.nbytes);
  } else if (op.reduce == ReduceOp::None && receipt->run_->direct(op.parts, data)) {
    return receipt;
  } else {
    if (!pool_.empty()) {
      receipt->staging_ = std::move(pool_.back());
      pool_.pop_back();
    }
    receipt->staging_.resize(static_cast<size_t>(op.nbytes));
  }
  *data = receipt->staging_.data();
  return receipt;
}

// Phase 1: post the next, which travels while this one is unpacked. Phase 2: put it in place. Phase 3: tell
// those that forward it.
void InChannel::arrived(Receipt& receipt) {
  const std::shared_ptr<Run>& run = receipt.run_;
  const RecvOp& op = receipt.op_;
  {
    const std::lock_guard lock(mutex_);
    --posted_;
  }
  if (run->recv_order.done(op.number)) {
    for (InChannel* channel : run->in_channels) channel->resume();
  } else {
    resume();
  }

  if (op.reduce != ReduceOp::None) run->reduce(op, receipt.staging_.data());
  if (op.carry >= 0) run->carries.keep(op.carry, std::exchange(receipt.staging_, {}));
  if (!receipt.staging_.empty()) {
    const std::byte* packed = receipt.staging_.data();
    for (int32_t i = op.parts.begin; i < op.parts.end; ++i) {
      const StridedView view = run->view(run->part(i));
      unpack(packed, view, run->write_of(op));
      packed += view.nbytes();
    }
    give_back(std::move(receipt.staging_));
  }
  arrived_(run, op);
  run->complete_ops(1, op.nbytes);
  run->unpin();
}

void InChannel::give_back(std::vector<std::byte> staging) {
  const std::lock_guard lock(mutex_);
  if (pool_.size() < kWindow) pool_.push_back(std::move(staging));
}

void InChannel::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  entries_.clear();
  pool_.clear();
}

}  // namespace meshcast
