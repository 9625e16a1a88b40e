#include "run/local_channel.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/fault_point.h"

namespace meshcast {
namespace {

// Read by the thread that copies; the pin of send_local keeps the tensors alive until finished() or failed().
class LocalSend final : public Outgoing {
 public:
  LocalSend(std::shared_ptr<Run> run, const SendOp& op, const ChannelFailure& failure)
      : run_(std::move(run)), op_(op), failure_(failure) {}

  void read(int64_t offset, int64_t nbytes, std::byte* out) override { run_->read(op_, offset, nbytes, out); }

  void finished() override {
    guarded(failure_, op_.targets.front().peer, run_, [this] {
      if (op_.carry >= 0) run_->carried_sent(op_.carry);
      run_->complete_ops(1, 0, op_.nbytes * static_cast<int64_t>(op_.targets.size()));
      run_->unpin();
    });
  }

  void failed(int peer, const TransportError& error) override {
    if (error.cause() != TransportError::Cause::Aborted) failure_(peer, error, run_);
    run_->unpin();
  }

 private:
  const std::shared_ptr<Run> run_;
  const SendOp& op_;  // of the run's program
  const ChannelFailure& failure_;
};

}  // namespace

// One posted receive.
class LocalInChannel::Receipt final : public Incoming {
 public:
  Receipt(LocalInChannel& channel, std::shared_ptr<Run> run, const RecvOp& op)
      : channel_(channel), run_(std::move(run)), op_(op) {}

  void write(int64_t offset, int64_t nbytes, const std::byte* in) override {
    // Fragments may cut elements: partial values are assembled first. The memory is taken when the first
    // fragment arrives, since a sender copies one message at a time and many are posted.
    if (op_.reduce != ReduceOp::None) {
      if (staging_.empty())
        staging_ = op_.carry >= 0 ? run_->carries.take(op_.nbytes) : channel_.take_staging(op_.nbytes);
      std::memcpy(staging_.data() + offset, in, static_cast<size_t>(nbytes));
      return;
    }
    run_->write(op_, offset, nbytes, in);
  }

  void finished() override {
    guarded(channel_.failure_, channel_.peer_, run_, [this] {
      if (op_.reduce != ReduceOp::None) {
        run_->reduce(op_, staging_.data());
        if (op_.carry >= 0) {
          run_->carries.keep(op_.carry, std::move(staging_));
        } else {
          run_->write(op_, 0, op_.nbytes, staging_.data());
          channel_.give_back(std::move(staging_));
        }
      }
      channel_.arrived(run_, op_);
    });
  }

  void failed(int peer, const TransportError& error) override {
    // An abort is this engine's own doing.
    if (error.cause() != TransportError::Cause::Aborted) channel_.failure_(peer, error, run_);
    run_->unpin();
  }

 private:
  LocalInChannel& channel_;
  const std::shared_ptr<Run> run_;
  const RecvOp& op_;
  std::vector<std::byte> staging_;
};

LocalInChannel::LocalInChannel(std::shared_ptr<LocalTransport> transport, int peer, Arrived arrived,
                               ChannelFailure failure)
    : transport_(std::move(transport)),
      peer_(peer),
      arrived_(std::move(arrived)),
      failure_(std::move(failure)) {}

void LocalInChannel::enqueue(const std::shared_ptr<Run>& run, const std::vector<int32_t>& ops) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  for (const int32_t op : ops) entries_.push_back({run, &run->program().recvs[static_cast<size_t>(op)]});
  post_locked();
}

void LocalInChannel::post_locked() {
  while (!closed_ && posted_ < kLocalWindow && !entries_.empty()) {
    const RecvOp& front = *entries_.front().op;
    if (front.carry >= 0 && !entries_.front().run->carries.may_take(front.carry)) return;
    Entry next = std::move(entries_.front());
    entries_.pop_front();
    ++posted_;
    next.run->pin();
    const RecvOp& op = *next.op;
    const uint64_t key = message_key(next.run->label(), first_++);
    transport_->recv(peer_, key, op.nbytes, std::make_unique<Receipt>(*this, std::move(next.run), op));
  }
}

// The next receive is posted before this arrival is reported, so its sender need not wait for what the arrival
// triggers.
void LocalInChannel::arrived(const std::shared_ptr<Run>& run, const RecvOp& op) {
  MC_FAULT_POINT("arrive");
  {
    const std::lock_guard lock(mutex_);
    --posted_;
    post_locked();
  }
  arrived_(run, op);
  run->complete_ops(1, op.nbytes);
  run->unpin();
}

std::vector<std::byte> LocalInChannel::take_staging(int64_t nbytes) {
  std::vector<std::byte> out;
  {
    const std::lock_guard lock(mutex_);
    if (!pool_.empty()) {
      out = std::move(pool_.back());
      pool_.pop_back();
    }
  }
  out.resize(static_cast<size_t>(nbytes));
  return out;
}

void LocalInChannel::give_back(std::vector<std::byte> staging) {
  const std::lock_guard lock(mutex_);
  if (!staging.empty() && pool_.size() < kWindow) pool_.push_back(std::move(staging));
}

void LocalInChannel::resume() {
  const std::lock_guard lock(mutex_);
  post_locked();
}

void LocalInChannel::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  entries_.clear();
  pool_.clear();
}

void send_local(LocalTransport& transport, const std::shared_ptr<Run>& run, const SendOp& op,
                const ChannelFailure& failure) {
  std::vector<LocalTarget> targets;
  targets.reserve(op.targets.size());
  for (const Target& target : op.targets) {
    targets.push_back({target.peer, message_key(run->label(), run->local_position(target))});
  }
  MC_FAULT_POINT("send");
  run->pin();
  transport.send(std::move(targets), op.nbytes, std::make_unique<LocalSend>(run, op, failure));
}

}  // namespace meshcast
