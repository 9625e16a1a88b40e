#pragma once

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "transport/transport.h"

namespace meshcast {

// The error of both ends if a message has another size than its receive; none if it has the same.
inline std::optional<TransportError> size_mismatch(int64_t nbytes, int64_t expected) {
  if (nbytes == expected) return std::nullopt;
  return TransportError(
      TransportError::Cause::Mismatch,
      "a message of " + std::to_string(nbytes) + " bytes met a receive of " + std::to_string(expected));
}

// Messages that have ended, collected with a lock held and reported without it, since they may call back.
// Guarded by that lock.
class MessageEnds {
 public:
  explicit MessageEnds(int peer) : peer_(peer) {}

  void add(std::unique_ptr<Message> message, std::optional<TransportError> error) {
    ended_.push_back({std::move(message), std::move(error)});
  }

  // Once this was called, the caller of add() has to call tell() at once.
  void close() { closed_ = true; }
  bool closed() const { return closed_; }

  bool any_failed() const {
    for (const End& end : ended_) {
      if (end.error) return true;
    }
    return false;
  }

  // Reports them without the lock, which is held again afterwards.
  void tell(std::unique_lock<std::mutex>& lock, bool failed) {
    std::vector<End> told;
    std::vector<End> kept;
    for (End& end : ended_) (end.error && !failed ? kept : told).push_back(std::move(end));
    ended_ = std::move(kept);
    if (told.empty()) return;
    lock.unlock();
    for (End& end : told) {
      if (end.error) {
        end.message->failed(peer_, *end.error);
      } else {
        end.message->finished();
      }
    }
    told.clear();
    lock.lock();
  }

 private:
  struct End {
    std::unique_ptr<Message> message;
    std::optional<TransportError> error;
  };

  const int peer_;
  std::vector<End> ended_;
  bool closed_ = false;
};

}  // namespace meshcast
