#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <thread>
#include <utility>
#include <vector>

#include "transport/local_transport.h"
#include "transport/shm_link.h"

namespace meshcast {

// The sending half of one rank: matches messages with the receives that its peers have posted, copies them
// piece by piece into the slots of its own memory and tells every receiver of each piece.
class ShmSender {
 public:
  explicit ShmSender(ShmMembership& membership);
  ~ShmSender();

  void send(std::vector<LocalTarget> targets, int64_t nbytes, std::unique_ptr<Outgoing> message);
  void mark_gone(size_t link);
  void abort() noexcept;
  void shutdown();

 private:
  struct Message {
    std::vector<std::pair<uint32_t, uint64_t>> targets;  // link, key
    int64_t nbytes = 0;
    int64_t copied = 0;
    size_t missing = 0;  // targets that have not posted yet
    std::unique_ptr<Outgoing> payload;
  };
  using MessageIt = std::list<std::unique_ptr<Message>>::iterator;
  using PostKey = std::pair<uint32_t, uint64_t>;  // link, key
  // A message that has ended badly, and why; told by the thread without the lock.
  struct Broken {
    std::unique_ptr<Message> message;
    uint32_t link = 0;
    TransportError error;
  };

  void loop();
  bool has_work();
  void drain_posts_locked();
  void match_locked(PostKey key, int64_t posted);
  void break_locked(MessageIt it, uint32_t link, const TransportError& error);
  void reclaim_locked();
  bool copy_small_locked(Message& message);
  void publish_locked(const Message& message, int64_t offset, uint32_t slot, uint32_t nbytes);
  void tell_broken(std::unique_lock<std::mutex>& lock);

  ShmRegion& own_;
  std::vector<ShmLink*> links_;

  std::mutex mutex_;
  std::map<PostKey, int64_t> posts_;             // bytes of receives that wait for their message
  std::list<std::unique_ptr<Message>> waiting_;  // messages that wait for posts ...
  std::map<PostKey, MessageIt> awaited_;         // ... and for which
  std::deque<std::unique_ptr<Message>> ready_;   // to be copied in, by the thread
  std::vector<Broken> broken_;
  std::vector<uint32_t> free_;     // slots; the one freed last is used first, since it is still in the cache
  uint64_t in_use_ = 0;            // the others, as bits
  std::vector<bool> gone_;         // by link
  std::atomic<bool> news_{false};  // something was queued for the thread
  bool aborted_ = false;
  bool stopping_ = false;
  std::thread thread_;
};

}  // namespace meshcast
