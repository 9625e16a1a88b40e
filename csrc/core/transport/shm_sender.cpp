#include "transport/shm_sender.h"

#include <algorithm>
#include <bit>
#include <string>

#include "common/thread_name.h"

namespace meshcast {
namespace {

// Messages up to this size are copied in by the thread that sends them: waking another costs more.
constexpr int64_t kInlineBytes = 64 * 1024;

// A sender that ran out of slots is woken when this share of them is free again, not for each single one.
constexpr uint64_t kWakeShare = 2;

TransportError aborted_error() { return {TransportError::Cause::Aborted, "the group was aborted"}; }

TransportError duplicate_error() {
  return {TransportError::Cause::Closed, "two messages to it have one key (a fault of meshcast)"};
}

TransportError gone_error() {
  return {TransportError::Cause::Closed, "its process has gone or has closed the group (shared memory)"};
}

}  // namespace

ShmSender::ShmSender(ShmMembership& membership) : own_(*membership.own), gone_(membership.links.size(), false) {
  for (const auto& link : membership.links) links_.push_back(link.get());
  for (uint32_t slot = own_.slots(); slot-- > 0;) free_.push_back(slot);
  thread_ = std::thread([this] {
    name_this_thread("mc-shm-send");
    loop();
  });
}

ShmSender::~ShmSender() { shutdown(); }

void ShmSender::send(std::vector<LocalTarget> targets, int64_t nbytes, std::unique_ptr<Outgoing> payload) {
  auto message = std::make_unique<Message>();
  message->nbytes = nbytes;
  message->payload = std::move(payload);
  for (const LocalTarget& target : targets) {
    const auto it = std::find_if(links_.begin(), links_.end(),
                                 [&](const ShmLink* link) { return link->rank() == target.peer; });
    message->targets.emplace_back(static_cast<uint32_t>(it - links_.begin()), target.key);
  }

  std::unique_lock lock(mutex_);
  drain_posts_locked();
  waiting_.push_back(std::move(message));
  const MessageIt it = std::prev(waiting_.end());
  if (aborted_) return break_locked(it, (*it)->targets.front().first, aborted_error());
  // Phase 1: which receives the message waits for.
  for (const PostKey& target : (*it)->targets) {
    if (gone_[target.first]) return break_locked(it, target.first, gone_error());
    if (!awaited_.emplace(target, it).second) return break_locked(it, target.first, duplicate_error());
    ++(*it)->missing;
  }
  // Phase 2: receives that were posted before.
  // match_locked may move the message out of the list.
  Message& here = **it;
  const auto all = here.targets;
  for (const PostKey& target : all) {
    const auto post = posts_.find(target);
    if (post == posts_.end()) continue;
    const int64_t posted = post->second;
    posts_.erase(post);
    match_locked(target, posted);
  }
  if (ready_.empty()) return;
  // Phase 3: a small message is copied at once, but only where none is before it.
  if (ready_.size() == 1 && ready_.front().get() == &here && copy_small_locked(here)) {
    const std::unique_ptr<Message> done = std::move(ready_.front());
    ready_.pop_front();
    lock.unlock();
    done->payload->finished();
    return;
  }
  news_.store(true);
  own_.header().sender_bell.ring_if_asleep();
}

void ShmSender::drain_posts_locked() {
  for (uint32_t i = 0; i < links_.size(); ++i) {
    auto& posts = own_.mailbox(i).posts;
    bool was_full = false;
    Post post;
    while (posts.pop(&post)) {
      was_full |= posts.was_full();
      match_locked({i, post.key}, post.nbytes);
    }
    // Posts that found no room wait for this.
    if (was_full) links_[i]->region().header().receiver_bell.ring_if_asleep();
  }
}

void ShmSender::match_locked(PostKey key, int64_t posted) {
  const auto found = awaited_.find(key);
  if (found == awaited_.end()) {
    // Keys are the peer's data: one that comes twice is refused by the peer itself, which waits for its
    // messages.
    posts_.emplace(key, posted);
    return;
  }
  const MessageIt it = found->second;
  awaited_.erase(found);
  if (posted != (*it)->nbytes) {
    break_locked(it, key.first,
                 {TransportError::Cause::Closed, "a message of " + std::to_string((*it)->nbytes) +
                                                     " bytes met a receive of " + std::to_string(posted)});
    return;
  }
  if (--(*it)->missing > 0) return;
  ready_.push_back(std::move(*it));
  waiting_.erase(it);
}

void ShmSender::break_locked(MessageIt it, uint32_t link, const TransportError& error) {
  for (const PostKey& target : (*it)->targets) {
    const auto found = awaited_.find(target);
    if (found != awaited_.end() && found->second == it) awaited_.erase(found);
  }
  broken_.push_back({std::move(*it), link, error});
  waiting_.erase(it);
  news_.store(true);
  own_.header().sender_bell.ring_if_asleep();
}

void ShmSender::reclaim_locked() {
  // Each turn clears the lowest bit that is set. The acquire pairs with the reader's decrement: its copy is
  // over.
  for (uint64_t rest = in_use_; rest != 0; rest &= rest - 1) {
    const auto slot = static_cast<uint32_t>(std::countr_zero(rest));
    if (own_.header().readers[slot].left.load(std::memory_order_acquire) != 0) continue;
    in_use_ &= ~(uint64_t{1} << slot);
    free_.push_back(slot);
  }
}

// Small messages fit into one slot (slots are never smaller than a page).
bool ShmSender::copy_small_locked(Message& message) {
  if (message.nbytes > std::min<int64_t>(kInlineBytes, own_.slot_bytes())) return false;
  if (free_.empty()) reclaim_locked();
  if (free_.empty()) return false;
  const uint32_t slot = free_.back();
  free_.pop_back();
  message.payload->read(0, message.nbytes, own_.slot(slot));
  publish_locked(message, 0, slot, static_cast<uint32_t>(message.nbytes));
  return true;
}

void ShmSender::publish_locked(const Message& message, int64_t offset, uint32_t slot, uint32_t nbytes) {
  in_use_ |= uint64_t{1} << slot;
  // Before any receiver is told: the first of them may be done before the second is.
  own_.header().readers[slot].left.store(static_cast<uint32_t>(message.targets.size()));
  for (const auto& [link, key] : message.targets) {
    own_.mailbox(link).fragments.push({key, offset, slot, nbytes});
    links_[link]->region().header().receiver_bell.ring_if_asleep();
  }
}

bool ShmSender::has_work() {
  if (news_.load()) return true;
  const ShmHeader& header = own_.header();
  if (header.freed.load() >= header.wake_at.load()) return true;
  for (uint32_t i = 0; i < links_.size(); ++i) {
    if (!own_.mailbox(i).posts.empty()) return true;
  }
  return false;
}

void ShmSender::loop() {
  ShmHeader& header = own_.header();
  std::unique_lock lock(mutex_);
  while (!stopping_) {
    news_.store(false);
    drain_posts_locked();
    tell_broken(lock);
    if (ready_.empty() || aborted_) {
      lock.unlock();
      header.sender_bell.sleep_unless([this] { return has_work(); });
      lock.lock();
      continue;
    }
    if (free_.empty()) reclaim_locked();
    if (free_.empty()) {
      // Announced first, then looked at again: a slot freed in between is seen by one side or the other.
      const uint64_t freed = header.freed.load();
      header.wake_at.store(freed + std::max<uint64_t>(1, own_.slots() / kWakeShare));
      reclaim_locked();
      if (free_.empty()) {
        lock.unlock();
        header.sender_bell.sleep_unless([this] { return has_work(); });
        lock.lock();
      }
      header.wake_at.store(UINT64_MAX);
      continue;
    }
    // Off the queue while it is being copied, so that nobody else ends it meanwhile.
    std::unique_ptr<Message> message = std::move(ready_.front());
    ready_.pop_front();
    const uint32_t slot = free_.back();
    free_.pop_back();
    const auto nbytes =
        static_cast<uint32_t>(std::min<int64_t>(own_.slot_bytes(), message->nbytes - message->copied));
    lock.unlock();
    message->payload->read(message->copied, nbytes, own_.slot(slot));
    lock.lock();
    publish_locked(*message, message->copied, slot, nbytes);
    message->copied += nbytes;
    if (message->copied < message->nbytes) {
      ready_.push_front(std::move(message));
    } else {
      lock.unlock();
      message->payload->finished();
      message.reset();
      lock.lock();
    }
  }
  tell_broken(lock);
}

// failed() is called without the lock, since it may call back into this object. Everything that is told has
// been taken off all lists first, so each message hears of its end once.
void ShmSender::tell_broken(std::unique_lock<std::mutex>& lock) {
  if (aborted_) {
    for (auto& message : ready_) broken_.push_back({std::move(message), 0, aborted_error()});
    for (auto& message : waiting_) broken_.push_back({std::move(message), 0, aborted_error()});
    ready_.clear();
    waiting_.clear();
    awaited_.clear();
  } else {
    for (auto it = ready_.begin(); it != ready_.end();) {
      const auto& targets = (*it)->targets;
      const auto lost =
          std::find_if(targets.begin(), targets.end(), [&](const auto& t) { return gone_[t.first]; });
      if (lost == targets.end()) {
        ++it;
        continue;
      }
      broken_.push_back({std::move(*it), lost->first, gone_error()});
      it = ready_.erase(it);
    }
  }
  if (broken_.empty()) return;
  std::vector<Broken> broken;
  broken.swap(broken_);
  lock.unlock();
  for (const Broken& b : broken) b.message->payload->failed(links_[b.link]->rank(), b.error);
  broken.clear();
  lock.lock();
}

void ShmSender::mark_gone(size_t link) {
  const std::lock_guard lock(mutex_);
  if (gone_[link]) return;
  gone_[link] = true;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    const auto current = it++;
    const auto& targets = (*current)->targets;
    if (std::any_of(targets.begin(), targets.end(), [&](const auto& t) { return t.first == link; })) {
      break_locked(current, static_cast<uint32_t>(link), gone_error());
    }
  }
  news_.store(true);
  own_.header().sender_bell.ring_if_asleep();
}

void ShmSender::abort() noexcept {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  news_.store(true);
  own_.header().sender_bell.ring_if_asleep();
}

void ShmSender::shutdown() {
  abort();
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    news_.store(true);
    own_.header().sender_bell.ring_if_asleep();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace meshcast
