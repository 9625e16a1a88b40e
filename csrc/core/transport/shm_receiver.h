#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "transport/local_transport.h"
#include "transport/shm_link.h"

namespace meshcast {

// The receiving half of one rank: tells senders what it has posted and copies out of their slots what they
// announce. Its one thread drains every sender without waiting for anything else, which is what keeps slots
// from being occupied for ever.
class ShmReceiver {
 public:
  explicit ShmReceiver(ShmMembership& membership);
  ~ShmReceiver();

  void recv(int peer, uint64_t key, int64_t nbytes, std::unique_ptr<Incoming> message);
  void mark_gone(size_t link);
  void abort() noexcept;
  void shutdown();

 private:
  struct Message {
    int64_t nbytes = 0;
    int64_t received = 0;
    std::unique_ptr<Incoming> payload;
  };
  // A sender, seen from here.
  struct Peer {
    ShmLink* link = nullptr;
    ShmHeader::Mailbox* mailbox = nullptr;
    // Guarded by mutex_; messages are written by the thread alone. Two under one key break the group.
    std::multimap<uint64_t, Message> posted;
    std::deque<Post> unsent;              // posts that found the sender's queue full
    std::atomic<bool> has_unsent{false};  // the same for has_work(), which takes no lock
    bool gone = false;
    bool ambiguous = false;  // two messages are posted under one key
    bool broken = false;     // it sent what cannot be: nothing more is taken from it; written by the thread
  };

  void loop();
  bool has_work();
  void post_locked(Peer& peer, Post post);
  bool drain(Peer& peer);
  bool take(Peer& peer, const Fragment& fragment);
  void end_lost(Peer& peer);
  void ring_own();

  ShmRegion& own_;
  std::mutex mutex_;
  std::vector<std::unique_ptr<Peer>> peers_;
  std::atomic<bool> news_{false};
  bool aborted_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace meshcast
