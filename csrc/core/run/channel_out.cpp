#include <algorithm>
#include <utility>

#include "common/thread_name.h"
#include "run/channel.h"

namespace meshcast {

OutChannel::OutChannel(std::shared_ptr<Transport> transport, int peer, ChannelFailure failure)
    : transport_(std::move(transport)), peer_(peer), failure_(std::move(failure)) {
  thread_ = std::thread([this] {
    name_this_thread("mc-send");
    loop();
  });
}

OutChannel::~OutChannel() {
  close();
  join();
}

void OutChannel::join() {
  if (thread_.joinable()) thread_.join();
}

int64_t OutChannel::enqueue(const std::shared_ptr<Run>& run, const std::vector<const SendOp*>& ops,
                            bool driven) {
  const std::lock_guard lock(mutex_);
  const int64_t position = first_ + static_cast<int64_t>(entries_.size());
  if (closed_) return position;
  for (const SendOp* op : ops) {
    entries_.push_back({run, op, op->forward ? State::Waiting : State::Ready, nullptr, {}});
  }
  if (!driven) changed_.notify_all();
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

// Any thread may be here, several at a time. Packing is done without the lock; the state Packing reserves the
// entry, and a deque keeps its place while others are pushed and popped. Entries within the window may be
// issued out of order: their positions are in their tags.
void OutChannel::pump(bool driven) {
  std::unique_lock lock(mutex_);
  while (!closed_) {
    size_t at = 0;
    while (at < std::min(kWindow, entries_.size()) && !may_issue(entries_[at])) ++at;
    if (at == std::min(kWindow, entries_.size())) return;
    Entry* next = &entries_[at];
    const int64_t position = first_ + static_cast<int64_t>(at);
    next->state = State::Packing;  // nobody pops or issues it meanwhile
    // The tensors must stay until the request has gone: take_front() or drop() lets go of them.
    next->run->pin();
    if (!pool_.empty()) {
      next->staging = std::move(pool_.back());
      pool_.pop_back();
    }
    lock.unlock();

    std::byte* data = nullptr;
    if (next->op->carry >= 0) {
      data = next->run->carries.data(next->op->carry);
    } else if (!next->run->direct(next->op->parts, &data)) {
      next->staging.resize(static_cast<size_t>(next->op->nbytes));
      data = next->staging.data();
      std::byte* out = data;
      for (int32_t i = next->op->parts.begin; i < next->op->parts.end; ++i) {
        const StridedView view = next->run->view(next->run->part(i));
        pack(view, out);
        out += view.nbytes();
      }
    }
    auto request = transport_->send(peer_, message_tag(next->run->label(), position), data, next->op->nbytes);

    lock.lock();
    next->request = std::move(request);
    next->state = State::Issued;
    if (closed_) next->request->abort();  // close() could not see it
    if (!driven || closed_) changed_.notify_all();
  }
}

bool OutChannel::may_issue(const Entry& entry) {
  return entry.state == State::Ready && entry.run->send_order.may_go(entry.op->number);
}

bool OutChannel::any_ready_locked() const {
  const auto end = entries_.begin() + static_cast<int64_t>(std::min(kWindow, entries_.size()));
  return std::any_of(entries_.begin(), end, may_issue);
}

void OutChannel::wake() {
  const std::lock_guard lock(mutex_);
  changed_.notify_all();
}

void OutChannel::drive(const Run& run) noexcept {
  std::unique_lock lock(mutex_);
  while (!taking_ && !failed_ && !closed_) {
    if (any_ready_locked()) {
      lock.unlock();
      pump(true);
      lock.lock();
    } else if (front_issued_locked() && entries_.front().run.get() == &run) {
      take_front(lock);
    } else {
      break;
    }
  }
  // Nobody was woken for what has been issued meanwhile.
  if (closed_ || !entries_.empty()) changed_.notify_all();
}

// Waits until the front message, which is issued, has been sent. By one thread at a time, which alone pops.
void OutChannel::take_front(std::unique_lock<std::mutex>& lock) {
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
  const bool others_may_go = front.run->send_order.done(front.op->number);
  lock.lock();
  Entry done = std::move(entries_.front());
  entries_.pop_front();
  ++first_;
  if (done.staging.capacity() > 0 && pool_.size() < kWindow) pool_.push_back(std::move(done.staging));
  lock.unlock();
  done.request.reset();
  pump(true);  // this thread looks itself
  if (others_may_go) {
    for (OutChannel* channel : done.run->out_channels) {
      if (channel != this) channel->pump();
    }
  }
  if (done.op->carry >= 0) done.run->carried_sent(done.op->carry);
  done.run->complete_ops(1, 0);
  done.run->unpin();
  done.run.reset();
  lock.lock();
  taking_ = false;
}

void OutChannel::loop() {
  std::unique_lock lock(mutex_);
  for (;;) {
    changed_.wait(lock, [this] {
      if (closed_) return !taking_;
      return !failed_ && (any_ready_locked() || (!taking_ && front_issued_locked()));
    });
    if (closed_) break;
    if (any_ready_locked()) {
      lock.unlock();
      pump();
      lock.lock();
      continue;
    }
    take_front(lock);
  }
  // Closed: a thread that still packs has a pointer to its entry, so entries are dropped when none does.
  changed_.wait(lock, [this] {
    return std::none_of(entries_.begin(), entries_.end(),
                        [](const Entry& e) { return e.state == State::Packing; });
  });
  std::deque<Entry> rest = std::move(entries_);
  entries_.clear();
  lock.unlock();
  drop(std::move(rest));
}

void OutChannel::drop(std::deque<Entry> entries) {
  for (Entry& entry : entries) {
    if (entry.state != State::Issued) continue;
    entry.request.reset();
    entry.run->unpin();
  }
}

void OutChannel::close() {
  const std::lock_guard lock(mutex_);
  if (closed_) return;
  closed_ = true;
  for (Entry& entry : entries_) {
    if (entry.state == State::Issued) entry.request->abort();
  }
  changed_.notify_all();
}

}  // namespace meshcast
