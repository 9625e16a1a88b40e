#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>

namespace meshcast {

using Clock = std::chrono::steady_clock;
using TimePoint = Clock::time_point;

// Why a message did not arrive. The text is the transport's own; who is to blame is decided further up,
// where the first cause of all ranks is known.
class TransportError : public std::runtime_error {
 public:
  enum class Cause : uint8_t { Timeout, Closed, Aborted };
  TransportError(Cause cause, const std::string& what) : std::runtime_error(what), cause_(cause) {}
  Cause cause() const noexcept { return cause_; }

 private:
  Cause cause_;
};

// A send or receive in flight. Destroying it ends the transport's use of the buffer.
class Request {
 public:
  virtual ~Request() = default;

  // Blocks until the message is through. Throws TransportError. Called by one thread at most.
  virtual void wait(TimePoint deadline) = 0;

  // Makes a wait in another thread return (with Cause::Aborted or Closed) soon. Any thread.
  virtual void abort() noexcept = 0;
};

// The part of a tag that numbers the messages between two ranks through; the rest tells calls apart.
inline constexpr int32_t kTagNumber = 0xFF;

// Moves bytes between the ranks of one private group; knows nothing of tensors. Messages of a pair of
// ranks match by tag. send() and recv() never block; the buffer must outlive the request.
// A send may complete as late as when its receive is posted (rendezvous).
class Transport {
 public:
  virtual ~Transport() = default;
  virtual std::unique_ptr<Request> send(int peer, int32_t tag, const void* data, int64_t nbytes) = 0;
  virtual std::unique_ptr<Request> recv(int peer, int32_t tag, void* data, int64_t nbytes) = 0;
};

}  // namespace meshcast
