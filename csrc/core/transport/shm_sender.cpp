#include "transport/shm_sender.h"

#include <algorithm>
#include <bit>
#include <string>

#include "common/fault_point.h"

namespace meshcast {
namespace {

// Messages up to this size are copied in by the thread that sends them, or that drives: waking another costs
// more.
constexpr int64_t kInlineBytes = 64 * 1024;

// A sender that ran out of slots is woken when this share of them is free again, not for each single one.
constexpr uint64_t kWakeShare = 2;

TransportError aborted_error() { return {TransportError::Cause::Aborted, "the group was aborted"}; }

TransportError duplicate_error() {
  return {TransportError::Cause::Closed, "two messages to it have one key (a fault of meshcast)"};
}

}  // namespace

ShmSender::ShmSender(ShmMembership& membership)
    : place_(*membership.place),
      own_(*membership.own),
      awaited_from_(membership.links.size(), 0),
      lost_(membership.links.size(), nullptr) {
  for (const auto& link : membership.links) links_.push_back(link.get());
  for (uint32_t slot = own_.slots(); slot-- > 0;) free_.push_back(slot);
}

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
  // Announced before the look, so that a post that comes now is seen by one side or the other.
  for (const auto& [link, key] : message->targets) own_.mailbox(link).wanted.store(1);
  drain_posts_locked();
  waiting_.push_back(std::move(message));
  const MessageIt it = std::prev(waiting_.end());
  if (aborted_) return break_locked(it, (*it)->targets.front().first, aborted_error());
  // Phase 1: the receives that the message waits for.
  for (const PostKey& target : (*it)->targets) {
    if (lost_[target.first]) return break_locked(it, target.first, lost_error(target.first));
    if (!awaited_.emplace(target, it).second) return break_locked(it, target.first, duplicate_error());
    ++awaited_from_[target.first];
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
  for (const PostKey& target : all) settle_wanted_locked(target.first);
  if (ready_.empty()) return;
  // Phase 3: a small message is copied at once, but only if none is before it.
  if (ready_.size() == 1 && ready_.front().get() == &here && copy_small_locked(here)) {
    const std::unique_ptr<Message> done = std::move(ready_.front());
    ready_.pop_front();
    lock.unlock();
    done->payload->finished();
    return;
  }
  place_.call(ShmHalf::Sending);
}

void ShmSender::settle_wanted_locked(uint32_t link) {
  if (awaited_from_[link] == 0) own_.mailbox(link).wanted.store(0, std::memory_order_relaxed);
}

void ShmSender::drain_posts_locked() {
  for (uint32_t i = 0; i < links_.size(); ++i) {
    if (lost_[i]) continue;
    auto& posts = own_.mailbox(i).posts;
    bool was_full = false;
    Post post;
    // Reads at most as many as a peer may have posted, so that no peer can keep the others waiting.
    uint32_t left = kMaxPosts;
    for (; left > 0 && !posts.broken() && posts.pop(&post); --left) {
      was_full |= posts.was_full();
      match_locked({i, post.key}, post.nbytes);
    }
    if (posts.broken()) {
      lose_locked(i, kShmNonsense);
      continue;
    }
    if (left == 0) place_.call(ShmHalf::Sending);  // there may be more
    // Posts that found no room wait for this.
    if (was_full) links_[i]->call(ShmHalf::Receiving);
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
  --awaited_from_[key.first];
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
    if (found == awaited_.end() || found->second != it) continue;
    awaited_.erase(found);
    --awaited_from_[target.first];
  }
  broken_.push_back({std::move(*it), link, error});
  waiting_.erase(it);
  place_.call(ShmHalf::Sending);
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
  if (!have_slot_locked()) return false;
  const uint32_t slot = free_.back();
  free_.pop_back();
  message.payload->read(0, message.nbytes, own_.slot(slot));
  publish_locked(message, 0, slot, static_cast<uint32_t>(message.nbytes));
  return true;
}

void ShmSender::publish_locked(const Message& message, int64_t offset, uint32_t slot, uint32_t nbytes) {
  MC_FAULT_POINT("fragment");
  in_use_ |= uint64_t{1} << slot;
  // Before any receiver is notified: the first of them may be done before the second is.
  own_.header().readers[slot].left.store(static_cast<uint32_t>(message.targets.size()));
  for (const auto& [link, key] : message.targets) {
    own_.mailbox(link).fragments.push({key, offset, slot, nbytes});
    links_[link]->call(ShmHalf::Receiving);
  }
}

// If there is none, this rank is called once enough of them are free.
bool ShmSender::have_slot_locked() {
  if (!free_.empty()) return true;
  ShmHeader& header = own_.header();
  if (header.freed.load() < wake_at_) return false;  // announced before
  reclaim_locked();
  if (free_.empty()) {
    // Announced first, then looked at again: a slot freed in between is seen by one side or the other.
    wake_at_ = header.freed.load() + std::max<uint64_t>(1, own_.slots() / kWakeShare);
    header.wake_at.store(wake_at_);
    reclaim_locked();
    if (free_.empty()) return false;
  }
  wake_at_ = 0;
  header.wake_at.store(UINT64_MAX);
  return true;
}

bool ShmSender::turn(const std::function<bool()>& helped) {
  std::unique_lock lock(mutex_);
  drain_posts_locked();
  for (uint32_t i = 0; i < links_.size(); ++i) settle_wanted_locked(i);
  tell_broken(lock);
  int64_t copied = 0;
  while (!ready_.empty() && !aborted_ && copied < own_.slot_bytes()) {
    if (ready_.front()->nbytes > kInlineBytes && helped()) return true;
    if (!have_slot_locked()) return false;
    // Off the queue while it is being copied, so that no other thread ends it meanwhile.
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
    copied += nbytes;
    if (message->copied < message->nbytes) {
      ready_.push_front(std::move(message));
    } else {
      lock.unlock();
      message->payload->finished();
      message.reset();
      lock.lock();
    }
  }
  return !ready_.empty();
}

// failed() is called without the lock, since it may call back into this object. Every message that is reported
// has been taken off all lists first, so it ends once.
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
          std::find_if(targets.begin(), targets.end(), [&](const auto& t) { return lost_[t.first]; });
      if (lost == targets.end() && !left_unread_) {
        ++it;
        continue;
      }
      const uint32_t link = lost == targets.end() ? *left_unread_ : lost->first;
      broken_.push_back({std::move(*it), link, lost_error(link)});
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
  if (!lost_[link]) lose_locked(static_cast<uint32_t>(link), kShmGone);
}

TransportError ShmSender::lost_error(uint32_t link) const {
  return {TransportError::Cause::Closed, lost_[link]};
}

void ShmSender::lose_locked(uint32_t link, const char* why) {
  lost_[link] = why;
  if (!own_.mailbox(link).fragments.empty()) left_unread_ = link;
  for (auto it = waiting_.begin(); it != waiting_.end();) {
    const auto current = it++;
    const auto& targets = (*current)->targets;
    if (std::any_of(targets.begin(), targets.end(), [&](const auto& t) { return t.first == link; })) {
      break_locked(current, link, lost_error(link));
    }
  }
  place_.call(ShmHalf::Sending);
}

void ShmSender::abort() noexcept {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  place_.call(ShmHalf::Sending);
}

void ShmSender::finish() {
  abort();
  std::unique_lock lock(mutex_);
  tell_broken(lock);
}

}  // namespace meshcast
