#include <cstring>
#include <utility>

#include "common/fault_point.h"
#include "run/channel.h"

namespace meshcast {

// One posted receive.
class InChannel::Receipt final : public Incoming {
 public:
  Receipt(InChannel& channel, std::shared_ptr<Run> run, const RecvOp& op, std::vector<std::byte> staging)
      : channel_(channel), run_(std::move(run)), op_(op), staging_(std::move(staging)) {
    run_->pin();
  }

  std::byte* packed() override { return staging_.empty() ? run_->packed(op_) : staging_.data(); }

  void write(int64_t offset, int64_t nbytes, const std::byte* in) override {
    if (staging_.empty()) return run_->write(op_, offset, nbytes, in);
    std::memcpy(staging_.data() + offset, in, static_cast<size_t>(nbytes));
  }

  void finished() override {
    guarded(channel_.failure_, channel_.peer_, run_, [this] { channel_.arrived(*this); });
  }

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
  std::vector<std::byte> staging_;  // where partial values are assembled; empty: written directly into place
};

InChannel::InChannel(std::shared_ptr<Transport> transport, int peer, int32_t lane, Arrived arrived,
                     ChannelFailure failure)
    : transport_(std::move(transport)),
      peer_(peer),
      lane_(lane),
      arrived_(std::move(arrived)),
      failure_(std::move(failure)) {}

void InChannel::enqueue(const std::shared_ptr<Run>& run, const std::vector<int32_t>& ops) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  for (const int32_t op : ops) entries_.push_back({run, &run->program().recvs[static_cast<size_t>(op)]});
}

bool InChannel::may_post_locked() const {
  if (closed_ || posted_ >= kWindow || entries_.empty()) return false;
  const Entry& front = entries_.front();
  if (!front.run->recv_order.may_go(front.op->number)) return false;
  return front.op->carry < 0 || front.run->carries.may_take(front.op->carry);
}

// Posts in order and without gaps, so that posted receives are the front of the window that the sender assumes.
// Calls the transport without the lock: a message that has already arrived is finished at once, which makes
// room for the next.
void InChannel::resume() {
  std::unique_lock lock(mutex_);
  if (posting_) return;
  posting_ = true;
  while (may_post_locked()) {
    Entry entry = std::move(entries_.front());
    entries_.pop_front();
    ++posted_;
    const Envelope from{peer_, lane_, message_key(entry.run->label(), first_++), entry.run->program().relayed};
    const int64_t nbytes = entry.op->nbytes;
    auto staging = staging_for_locked(entry);
    lock.unlock();
    const RecvOp& op = *entry.op;
    transport_->recv(from, nbytes,
                     std::make_unique<Receipt>(*this, std::move(entry.run), op, std::move(staging)));
    lock.lock();
  }
  posting_ = false;
}

// Pieces of a message may cut elements, so partial values are assembled before they are combined.
std::vector<std::byte> InChannel::staging_for_locked(const Entry& entry) {
  const RecvOp& op = *entry.op;
  if (op.reduce == ReduceOp::None) return {};
  if (op.carry >= 0) return entry.run->carries.take(op.nbytes);
  std::vector<std::byte> staging;
  if (!pool_.empty()) {
    staging = std::move(pool_.back());
    pool_.pop_back();
  }
  staging.resize(static_cast<size_t>(op.nbytes));
  return staging;
}

// Phase 1: post the next, which is in flight while this one is combined. Phase 2: combine it. Phase 3: notify
// the sends that forward it.
void InChannel::arrived(Receipt& receipt) {
  MC_FAULT_POINT("arrive");
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

  if (op.reduce != ReduceOp::None) {
    run->reduce(op, receipt.staging_.data());
    if (op.carry >= 0) {
      run->carries.keep(op.carry, std::exchange(receipt.staging_, {}));
    } else {
      run->write(op, 0, op.nbytes, receipt.staging_.data());
      give_back(std::move(receipt.staging_));
    }
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
