#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>
#include <vector>

#include "transport/local_transport.h"
#include "transport/shm_link.h"

namespace meshcast {

// The sending half of one rank: matches messages with the receives that its peers have posted, copies them
// piece by piece into the slots of its own memory and notifies every receiver of each piece.
class ShmSender {
 public:
  explicit ShmSender(ShmMembership& membership);

  void send(std::vector<LocalTarget> targets, int64_t nbytes, std::unique_ptr<Outgoing> message);
  void mark_gone(size_t link);
  void abort() noexcept;

  // Copies about a slot's worth; one turn at a time. Answers whether another is due. `helped`: called before a
  // large copy; true if another thread will do it.
  bool turn(const std::function<bool()>& helped);
  void finish();  // abort(), and ends all messages; no turn is under way, and none will be

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
  // A message that has failed, and why; reported in a turn, without the lock.
  struct Broken {
    std::unique_ptr<Message> message;
    uint32_t link = 0;
    TransportError error;
  };

  void drain_posts_locked();
  void lose_locked(uint32_t link, const char* why);
  TransportError lost_error(uint32_t link) const;
  void settle_wanted_locked(uint32_t link);
  void match_locked(PostKey key, int64_t posted);
  void break_locked(MessageIt it, uint32_t link, const TransportError& error);
  void reclaim_locked();
  bool have_slot_locked();
  bool copy_small_locked(Message& message);
  void publish_locked(const Message& message, int64_t offset, uint32_t slot, uint32_t nbytes);
  void tell_broken(std::unique_lock<std::mutex>& lock);

  const ShmProgress::Place& place_;
  ShmRegion& own_;
  std::vector<ShmLink*> links_;

  std::mutex mutex_;
  std::map<PostKey, int64_t> posts_;             // bytes of receives that wait for their message
  std::list<std::unique_ptr<Message>> waiting_;  // messages that wait for posts ...
  std::map<PostKey, MessageIt> awaited_;         // ... and for which,
  std::vector<size_t> awaited_from_;             // and for how many of each link
  std::deque<std::unique_ptr<Message>> ready_;   // to be copied in, in turns
  std::vector<Broken> broken_;
  std::vector<uint32_t> free_;     // slots; the one freed last is used first, since it is still in the cache
  uint64_t in_use_ = 0;            // the others, as bits
  uint64_t wake_at_ = 0;           // slots freed at which this rank is called, if there were none
  std::vector<const char*> lost_;  // by link, why nothing goes there any longer; null while it does
  // A link that has ended without reading what was sent there, which keeps slots for good: messages to others
  // might then wait for ever.
  std::optional<uint32_t> left_unread_;
  bool aborted_ = false;
};

}  // namespace meshcast
