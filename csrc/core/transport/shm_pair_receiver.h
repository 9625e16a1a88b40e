#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "transport/message_ends.h"
#include "transport/shm_link.h"
#include "transport/shm_pipe.h"
#include "transport/shm_progress.h"

namespace meshcast {

// Incoming messages between two ranks of a host, matched with receives by key. A message without a receive
// waits here with the bytes that were sent eagerly, so that no message holds up another.
class ShmPairReceiver {
 public:
  ShmPairReceiver(const ShmProgress::Place& place, ShmPipe& pipe, ShmPeer& peer);

  void recv(uint64_t key, int64_t nbytes, std::unique_ptr<Incoming> payload);
  void probe(uint64_t key, std::unique_ptr<Message> message);
  void mark_gone();
  void abort() noexcept;
  bool turn();    // one at a time; answers whether another is due
  bool waits();   // whether anything is posted
  void finish();  // abort(), and ends all messages; no turn is under way, and none will be

 private:
  struct Posted {
    int64_t nbytes = 0;
    int64_t received = 0;
    bool told = false;  // its sender has been notified
    std::unique_ptr<Incoming> payload;
  };
  struct Arrival {  // a message without a receive
    int64_t nbytes = 0;
    bool begun = false;           // else it was announced alone
    std::vector<std::byte> data;  // its first bytes
    bool whole() const { return begun && static_cast<int64_t>(data.size()) == nbytes; }
  };
  using PostedIt = std::unordered_map<uint64_t, Posted>::iterator;

  template <typename End>
  bool refuse(std::unique_lock<std::mutex>& lock, std::unique_ptr<End>& message);
  bool read_locked(int64_t most);
  bool take_locked(const ShmPipe::Record& record);
  void take_first_locked(const ShmPipe::Record& record);
  template <typename Copy>
  void begin_locked(PostedIt it, int64_t nbytes, int64_t count, bool begun, const Copy& copy);
  bool take_piece_locked(const ShmPipe::Record& record);
  void post_locked(uint64_t key, Posted& posted);
  void answer_locked(ShmPipe::Answer answer);
  void say_locked();
  void end_locked(PostedIt it, std::optional<TransportError> error);
  void lose_locked(const TransportError& error);
  void settle_awaited_locked();

  const ShmProgress::Place& place_;
  ShmPipe& pipe_;
  ShmPeer& peer_;

  std::mutex mutex_;
  std::unordered_map<uint64_t, Posted> posted_;  // all by key
  std::unordered_map<uint64_t, Arrival> arrivals_;
  std::unordered_map<uint64_t, std::unique_ptr<Message>> probes_;
  std::deque<ShmPipe::Answer> unsaid_;  // that found the queue full
  bool gone_ = false;                   // the peer; its earlier records still come
  std::optional<TransportError> over_;  // why nothing comes any longer except what is here
  MessageEnds ends_;
};

}  // namespace meshcast
