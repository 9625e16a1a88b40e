#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>

#include "transport/message_ends.h"
#include "transport/shm_link.h"
#include "transport/shm_pipe.h"
#include "transport/shm_progress.h"

namespace meshcast {

// Outgoing messages between two ranks of a host. Their first bytes are sent eagerly, as long as little waits at
// the peer; a small message has then been sent as a whole, and has ended. All others are announced, continue
// piece by piece once their receive is posted, and end when the peer has all of them.
class ShmPairSender {
 public:
  ShmPairSender(const ShmProgress::Place& place, ShmPipe& pipe, ShmPeer& peer);

  void send(uint64_t key, int64_t nbytes, std::unique_ptr<Outgoing> payload);
  void mark_gone();
  void abort() noexcept;

  // Copies in a bounded part; one turn at a time. Answers whether another is due. `helped`: called before a
  // large copy; true if another thread will do it.
  bool turn(const std::function<bool()>& helped);
  void finish();  // abort(), and ends all messages; no turn is under way, and none will be

 private:
  enum class Step : uint8_t { Begin, Announce, Waits, Pieces, Written };
  struct Message {
    int64_t nbytes = 0;
    int64_t written = 0;
    Step step = Step::Announce;
    std::optional<TransportError> error;  // with which it ends once it is announced
    std::unique_ptr<Outgoing> payload;
  };

  void read_answers_locked();
  void posted_locked(uint64_t key, int64_t nbytes);
  uint32_t first_bytes(int64_t nbytes) const;
  bool have_room_locked(int64_t count);
  bool write_locked(int64_t most);
  void write_next_locked(uint64_t key, Message& message);
  ShmPipe::Record next_of(uint64_t key, const Message& message) const;
  void end_locked(uint64_t key, std::optional<TransportError> error);
  void lose_locked(const TransportError& error);

  const ShmProgress::Place& place_;
  ShmPipe& pipe_;
  ShmPeer& peer_;

  std::mutex mutex_;
  std::unordered_map<uint64_t, Message> messages_;  // by key
  std::unordered_map<uint64_t, int64_t> posts_;     // bytes of receives that wait for their message, by key
  std::deque<uint64_t> line_;                       // those of which something is to be written
  uint64_t credit_used_ = 0;                        // since the beginning
  std::optional<TransportError> over_;              // why nothing goes any longer
  MessageEnds ends_;
};

}  // namespace meshcast
