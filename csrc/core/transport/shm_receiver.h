#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "transport/local_transport.h"
#include "transport/shm_link.h"

namespace meshcast {

// The receiving half of one rank: notifies senders of its receives and copies the announced fragments out of
// their slots. A turn drains every sender without waiting for anything else, so no slot stays occupied for
// ever.
class ShmReceiver {
 public:
  explicit ShmReceiver(ShmMembership& membership);

  void recv(int peer, uint64_t key, int64_t nbytes, std::unique_ptr<Incoming> message);
  void mark_gone(size_t link);
  void abort() noexcept;
  bool turn();    // one at a time; answers whether another is due
  bool waits();   // whether anything is posted
  void finish();  // abort(), and ends all messages; no turn is under way, and none will be

 private:
  struct Message {
    int64_t nbytes = 0;
    int64_t received = 0;
    std::unique_ptr<Incoming> payload;
  };
  // A sender as this rank sees it.
  struct Peer {
    ShmLink* link = nullptr;
    ShmHeader::Mailbox* mailbox = nullptr;
    // Guarded by mutex_; messages are written in turns alone. Two under one key break the group.
    std::multimap<uint64_t, Message> posted;
    std::deque<Post> unsent;  // posts that found the sender's queue full
    bool gone = false;
    bool ambiguous = false;  // two messages are posted under one key
    bool broken = false;     // it sent invalid data: nothing more is taken from it; written in turns
  };

  void post_locked(Peer& peer, Post post);
  bool drain(Peer& peer);
  bool take(Peer& peer, const Fragment& fragment);
  void end_lost(Peer& peer);

  const ShmProgress::Place& place_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Peer>> peers_;
  bool aborted_ = false;
};

}  // namespace meshcast
