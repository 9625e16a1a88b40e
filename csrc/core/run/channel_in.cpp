#include <utility>

#include "common/thread_name.h"
#include "run/channel.h"

namespace meshcast {

InChannel::InChannel(std::shared_ptr<Transport> transport, int peer, Arrived arrived, ChannelFailure failure)
    : transport_(std::move(transport)),
      peer_(peer),
      arrived_(std::move(arrived)),
      failure_(std::move(failure)) {
  thread_ = std::thread([this] {
    name_this_thread("mc-recv");
    loop();
  });
}

InChannel::~InChannel() {
  close();
  join();
}

void InChannel::join() {
  if (thread_.joinable()) thread_.join();
}

void InChannel::enqueue(const std::shared_ptr<Run>& run, const std::vector<const RecvOp*>& ops, bool driven) {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  for (const RecvOp* op : ops) entries_.push_back({run, op, nullptr, {}});
  post_locked();
  if (!driven) changed_.notify_all();
}

// In order and without gaps, so that what is posted is the front of the window that the sender counts on too.
void InChannel::post_locked() {
  while (!closed_ && posted_ < kWindow && posted_ < entries_.size()) {
    Entry& entry = entries_[posted_];
    if (!entry.run->recv_order.may_go(entry.op->number)) return;
    if (entry.op->carry >= 0 && !entry.run->carries.may_take(entry.op->carry)) return;
    entry.run->pin();
    std::byte* data = nullptr;
    if (entry.op->carry >= 0) {
      entry.staging = entry.run->carries.take(entry.op->nbytes);
      data = entry.staging.data();
    } else if (entry.op->reduce != ReduceOp::None || !entry.run->direct(entry.op->parts, &data)) {
      if (!pool_.empty()) {
        entry.staging = std::move(pool_.back());
        pool_.pop_back();
      }
      entry.staging.resize(static_cast<size_t>(entry.op->nbytes));
      data = entry.staging.data();
    }
    const int64_t position = first_ + static_cast<int64_t>(posted_);
    entry.request = transport_->recv(peer_, message_tag(entry.run->label(), position), data, entry.op->nbytes);
    ++posted_;
  }
}

void InChannel::resume() {
  const std::lock_guard lock(mutex_);
  post_locked();
  changed_.notify_all();
}

void InChannel::wake() {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void InChannel::drive(const Run& run) noexcept {
  std::unique_lock lock(mutex_);
  while (!taking_ && !failed_ && !closed_ && posted_ > 0 && entries_.front().run.get() == &run) {
    take_front(lock);
  }
  // Nobody was woken for what has been posted meanwhile.
  if (closed_ || posted_ > 0) changed_.notify_all();
}

// Waits for the front message, which is posted, and puts it into place. By one thread at a time, which alone
// pops; a deque keeps references across push_back.
// Phase 1: wait, without the lock. Phase 2: take it off and post the next. Phase 3: put it in place and tell
// those that forward it. `taking_` stays set throughout, so that arrivals are put in place one at a time.
void InChannel::take_front(std::unique_lock<std::mutex>& lock) {
  taking_ = true;
  Entry& front = entries_.front();
  lock.unlock();
  try {
    front.request->wait(front.run->deadline() + kWaitSlack);
  } catch (const TransportError& error) {
    failure_(peer_, error, front.run);
    lock.lock();
    taking_ = false;
    failed_ = true;
    return;
  }
  const bool others_may_go = front.run->recv_order.done(front.op->number);
  lock.lock();
  Entry done = std::move(entries_.front());
  entries_.pop_front();
  ++first_;
  --posted_;
  post_locked();  // the next message travels while this one is unpacked
  lock.unlock();
  if (others_may_go) {
    for (InChannel* channel : done.run->in_channels) {
      if (channel != this) channel->resume();
    }
  }

  done.request.reset();
  if (done.op->reduce != ReduceOp::None) done.run->reduce(*done.op, done.staging.data());
  if (done.op->carry >= 0) done.run->carries.keep(done.op->carry, std::exchange(done.staging, {}));
  const std::byte* packed = done.staging.data();
  if (!done.staging.empty()) {
    for (int32_t i = done.op->parts.begin; i < done.op->parts.end; ++i) {
      const StridedView view = done.run->view(done.run->part(i));
      unpack(packed, view, done.run->write_of(*done.op));
      packed += view.nbytes();
    }
  }
  arrived_(done.run, *done.op);
  done.run->complete_ops(1, done.op->nbytes);
  done.run->unpin();
  done.run.reset();

  lock.lock();
  if (!done.staging.empty() && pool_.size() < kWindow) pool_.push_back(std::move(done.staging));
  taking_ = false;
}

void InChannel::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] { return !taking_ && (closed_ || (posted_ > 0 && !failed_)); });
    if (closed_) break;
    take_front(lock);
  }
  std::deque<Entry> rest = std::move(entries_);
  entries_.clear();
  posted_ = 0;
  lock.unlock();
  drop(std::move(rest));
}

void InChannel::drop(std::deque<Entry> entries) {
  for (Entry& entry : entries) {
    if (!entry.request) continue;
    entry.request.reset();
    entry.run->unpin();
  }
}

// The thread wakes up from the aborted request, or from changed_, and drops the rest itself: the thread that
// closes never waits.
void InChannel::close() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  closed_ = true;
  for (size_t i = 0; i < posted_; ++i) entries_[i].request->abort();
  changed_.notify_all();
}

}  // namespace meshcast
