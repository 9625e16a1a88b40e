#include "transport/shm_receiver.h"

#include <algorithm>
#include <string>

#include "common/thread_name.h"

namespace meshcast {

ShmReceiver::ShmReceiver(ShmMembership& membership) : own_(*membership.own) {
  for (size_t i = 0; i < membership.links.size(); ++i) {
    auto peer = std::make_unique<Peer>();
    peer->link = membership.links[i].get();
    peer->mailbox = &peer->link->region().mailbox(membership.mailbox[i]);
    peers_.push_back(std::move(peer));
  }
  thread_ = std::thread([this] {
    name_this_thread("mc-shm-recv");
    loop();
  });
}

ShmReceiver::~ShmReceiver() { shutdown(); }

void ShmReceiver::recv(int peer, uint64_t key, int64_t nbytes, std::unique_ptr<Incoming> payload) {
  const auto it =
      std::find_if(peers_.begin(), peers_.end(), [&](const auto& p) { return p->link->rank() == peer; });
  const std::lock_guard lock(mutex_);
  Peer& from = **it;
  from.ambiguous |= from.posted.count(key) != 0;
  from.posted.emplace(key, Message{nbytes, 0, std::move(payload)});
  if (aborted_ || from.gone || from.broken || from.ambiguous) {
    ring_own();  // the thread tells that it will not come
  } else {
    post_locked(from, {key, nbytes});
  }
}

void ShmReceiver::post_locked(Peer& peer, Post post) {
  peer.unsent.push_back(post);
  peer.has_unsent.store(true);  // before the queue is found full, see has_work()
  bool any = false;
  while (!peer.unsent.empty() && !peer.mailbox->posts.full()) {
    peer.mailbox->posts.push(peer.unsent.front());
    peer.unsent.pop_front();
    any = true;
  }
  if (peer.unsent.empty()) peer.has_unsent.store(false);
  if (any) peer.link->region().header().sender_bell.ring_if_asleep();
}

void ShmReceiver::ring_own() {
  news_.store(true);
  own_.header().receiver_bell.ring_if_asleep();
}

bool ShmReceiver::has_work() {
  if (news_.load()) return true;
  return std::any_of(peers_.begin(), peers_.end(), [](const auto& peer) {
    if (peer->has_unsent.load() && !peer->mailbox->posts.full()) return true;
    return !peer->broken && !peer->mailbox->fragments.empty();
  });
}

void ShmReceiver::loop() {
  for (;;) {
    news_.store(false);
    bool any = false;
    for (const auto& peer : peers_) any |= drain(*peer);
    for (const auto& peer : peers_) end_lost(*peer);
    {
      const std::lock_guard lock(mutex_);
      if (stopping_) return;
      for (const auto& peer : peers_) {
        if (peer->unsent.empty() || peer->mailbox->posts.full()) continue;
        const Post next = peer->unsent.front();
        peer->unsent.pop_front();
        post_locked(*peer, next);
      }
    }
    if (!any) own_.header().receiver_bell.sleep_unless([this] { return has_work(); });
  }
}

// One round: no peer can keep the others waiting.
// As many fragments as a peer has slots.
bool ShmReceiver::drain(Peer& peer) {
  if (peer.broken) return false;
  Fragment fragment;
  bool any = false;
  for (uint32_t i = 0; i < kMaxSlots && peer.mailbox->fragments.pop(&fragment); ++i) {
    any = true;
    if (!take(peer, fragment)) {
      const std::lock_guard lock(mutex_);
      peer.broken = true;
      return false;
    }
  }
  return any;
}

// False: the fragment makes no sense. Shared memory is as trustworthy as the process at its other end, which
// may be failing right now.
bool ShmReceiver::take(Peer& peer, const Fragment& fragment) {
  ShmRegion& region = peer.link->region();
  if (fragment.slot >= region.slots() || fragment.nbytes > region.slot_bytes()) return false;
  std::multimap<uint64_t, Message>::iterator posted;  // only this thread takes it out again
  {
    const std::lock_guard lock(mutex_);
    posted = peer.posted.find(fragment.key);
    // Ended by an abort: what still arrives is dropped.
    if (posted == peer.posted.end()) return aborted_;
  }
  Message& message = posted->second;
  if (fragment.offset < 0 || fragment.offset > message.nbytes - fragment.nbytes) return false;
  message.payload->write(fragment.offset, fragment.nbytes, region.slot(fragment.slot));
  message.received += fragment.nbytes;
  // The last reader frees the slot. A sender without slots announces in wake_at the count at which it wants
  // to be woken, then looks again: one of the two sees the other (see Bell).
  ShmHeader& header = region.header();
  if (header.readers[fragment.slot].left.fetch_sub(1) == 1 &&
      header.freed.fetch_add(1) + 1 >= header.wake_at.load()) {
    header.sender_bell.ring_if_asleep();
  }
  if (message.received < message.nbytes) return true;
  std::unique_ptr<Incoming> done;
  {
    const std::lock_guard lock(mutex_);
    done = std::move(message.payload);
    peer.posted.erase(posted);
  }
  done->finished();
  return true;
}

// Tells the messages that will not come any more. What a peer had published before it went is drained first.
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
        error = {TransportError::Cause::Closed, "what it wrote to shared memory makes no sense"};
      } else if (peer.gone && peer.mailbox->fragments.empty()) {
        error = {TransportError::Cause::Closed, "its process has gone or has closed the group (shared memory)"};
      } else {
        return;
      }
    }
    lost.swap(peer.posted);
    peer.unsent.clear();
    peer.has_unsent.store(false);
  }
  for (auto& [key, message] : lost) message.payload->failed(peer.link->rank(), error);
}

void ShmReceiver::mark_gone(size_t link) {
  const std::lock_guard lock(mutex_);
  if (peers_[link]->gone) return;
  peers_[link]->gone = true;
  ring_own();
}

void ShmReceiver::abort() noexcept {
  const std::lock_guard lock(mutex_);
  aborted_ = true;
  ring_own();
}

void ShmReceiver::shutdown() {
  abort();
  {
    const std::lock_guard lock(mutex_);
    stopping_ = true;
    ring_own();
  }
  if (thread_.joinable()) thread_.join();
}

}  // namespace meshcast
