#include "transport/shm_receiver.h"

#include <algorithm>
#include <new>
#include <string>

namespace meshcast {

ShmReceiver::ShmReceiver(ShmMembership& membership) : place_(*membership.place) {
  for (size_t i = 0; i < membership.links.size(); ++i) {
    auto peer = std::make_unique<Peer>();
    peer->link = membership.links[i].get();
    peer->mailbox = &peer->link->region().mailbox(membership.mailbox[i]);
    peers_.push_back(std::move(peer));
  }
}

void ShmReceiver::recv(int peer, uint64_t key, int64_t nbytes, std::unique_ptr<Incoming> payload) {
  const auto it =
      std::find_if(peers_.begin(), peers_.end(), [&](const auto& p) { return p->link->rank() == peer; });
  const std::lock_guard lock(mutex_);
  Peer& from = **it;
  from.ambiguous |= from.posted.count(key) != 0;
  from.posted.emplace(key, Message{nbytes, 0, std::move(payload)});
  if (aborted_ || from.gone || from.broken || from.ambiguous) {
    place_.call(ShmHalf::Receiving);  // a turn reports that it will not come
  } else {
    post_locked(from, {key, nbytes});
  }
}

void ShmReceiver::post_locked(Peer& peer, Post post) {
  peer.unsent.push_back(post);
  bool any = false;
  auto& posts = peer.mailbox->posts;
  while (!peer.unsent.empty() && !posts.full()) {
    posts.push(peer.unsent.front());
    peer.unsent.pop_front();
    any = true;
  }
  // A sender that does not wait for a post finds it when it has a message. It is notified of new room in any
  // case.
  if (any && (peer.mailbox->wanted.load() != 0 || posts.full())) peer.link->call(ShmHalf::Sending);
}

bool ShmReceiver::turn() {
  bool more = false;
  for (const auto& peer : peers_) more |= drain(*peer);
  for (const auto& peer : peers_) end_lost(*peer);
  const std::lock_guard lock(mutex_);
  for (const auto& peer : peers_) {
    if (peer->unsent.empty() || peer->mailbox->posts.full()) continue;
    const Post next = peer->unsent.front();
    peer->unsent.pop_front();
    post_locked(*peer, next);
  }
  return more;
}

// Takes at most as many fragments as a peer has slots, so that no peer can keep the others waiting. True if
// there may be more of which this rank was notified before; later fragments call again.
bool ShmReceiver::drain(Peer& peer) {
  if (peer.broken) return false;
  Fragment fragment;
  for (uint32_t i = 0; i < kMaxSlots; ++i) {
    const bool broken = peer.mailbox->fragments.broken();
    if (!broken && !peer.mailbox->fragments.pop(&fragment)) return false;
    if (broken || !take(peer, fragment)) {
      const std::lock_guard lock(mutex_);
      peer.broken = true;
      return false;
    }
  }
  return true;
}

// False: the fragment is invalid. Shared memory is as trustworthy as the process at its other end, which may be
// failing right now.
bool ShmReceiver::take(Peer& peer, const Fragment& fragment) {
  ShmRegion& region = peer.link->region();
  if (fragment.slot >= region.slots() || fragment.nbytes > region.slot_bytes()) return false;
  std::multimap<uint64_t, Message>::iterator posted;  // only a turn takes it out again
  {
    const std::lock_guard lock(mutex_);
    posted = peer.posted.find(fragment.key);
    // Ended by an abort: later fragments are dropped.
    if (posted == peer.posted.end()) return aborted_;
  }
  Message& message = posted->second;
  if (fragment.offset < 0 || fragment.offset > message.nbytes - fragment.nbytes) return false;
  bool has_memory = true;
  try {
    message.payload->write(fragment.offset, fragment.nbytes, region.slot(fragment.slot));
  } catch (const std::bad_alloc&) {  // for values that are buffered before they are combined
    has_memory = false;
  }
  message.received += fragment.nbytes;
  // The last reader frees the slot. A sender without slots announces in wake_at the count at which it wants
  // to be woken, then looks again: one of the two sees the other (see Doorbell).
  ShmHeader& header = region.header();
  if (header.readers[fragment.slot].left.fetch_sub(1) == 1 &&
      header.freed.fetch_add(1) + 1 >= header.wake_at.load()) {
    peer.link->call(ShmHalf::Sending);
  }
  if (has_memory && message.received < message.nbytes) return true;
  std::unique_ptr<Incoming> done;
  {
    const std::lock_guard lock(mutex_);
    done = std::move(message.payload);
    peer.posted.erase(posted);
  }
  if (has_memory) {
    done->finished();
  } else {
    done->failed(peer.link->rank(), {TransportError::Cause::Memory, "no memory for a message"});
  }
  return true;
}

// Ends the messages that will not come any longer. Fragments that a peer had published before it ended are
// drained first.
void ShmReceiver::end_lost(Peer& peer) {
  std::multimap<uint64_t, Message> lost;
  TransportError error(TransportError::Cause::Aborted, "the group was aborted");
  {
    const std::lock_guard lock(mutex_);
    if (peer.posted.empty()) return;
    if (!aborted_) {
      if (peer.ambiguous) {
        error = {TransportError::Cause::Closed, "two messages from it have one key (a fault of meshcast)"};
      } else if (peer.broken) {
        error = {TransportError::Cause::Closed, kShmNonsense};
      } else if (peer.gone && peer.mailbox->fragments.empty()) {
        error = {TransportError::Cause::Closed, kShmGone};
      } else {
        return;
      }
    }
    lost.swap(peer.posted);
    peer.unsent.clear();
  }
  for (auto& [key, message] : lost) message.payload->failed(peer.link->rank(), error);
}

void ShmReceiver::mark_gone(size_t link) {
  const std::lock_guard lock(mutex_);
  if (peers_[link]->gone) return;
  peers_[link]->gone = true;
  place_.call(ShmHalf::Receiving);
}

void ShmReceiver::abort() noexcept {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  place_.call(ShmHalf::Receiving);
}

bool ShmReceiver::waits() {
  const std::lock_guard lock(mutex_);
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) { return !peer->posted.empty(); });
}

void ShmReceiver::finish() {
  abort();
  for (const auto& peer : peers_) end_lost(*peer);
}

}  // namespace meshcast
