#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
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
  // Mismatch: the message has another size than its receive; the connection goes on.
  enum class Cause : uint8_t { Timeout, Closed, Aborted, Mismatch };
  TransportError(Cause cause, const std::string& what) : std::runtime_error(what), cause_(cause) {}
  Cause cause() const noexcept { return cause_; }

 private:
  Cause cause_;
};

// One end of a message in flight, to be told how it ended: one of the two, once. Afterwards the transport does
// not touch its memory. Neither may block, throw, or wait for another message.
class Message {
 public:
  virtual ~Message() = default;
  virtual void finished() = 0;
  virtual void failed(int peer, const TransportError& error) = 0;
};

// What the two ends of a message match it by.
struct Envelope {
  int peer = -1;     // the other end: its rank in the group
  int32_t lane = 0;  // lanes never wait for each other
  uint64_t key = 0;  // see message_key; no two messages of a pair that are in flight have the same
};

// Moves bytes between the ranks of one private group, over the network; knows nothing of tensors. The memory
// must stay until the message has ended. A send may end as late as when its receive is posted (rendezvous).
class Transport {
 public:
  virtual ~Transport() = default;

  // Never block, never call failed() before they return; what can be done at once may be finished() at once.
  virtual void send(const Envelope& to, const void* data, int64_t nbytes, std::unique_ptr<Message> message) = 0;
  virtual void recv(const Envelope& from, void* data, int64_t nbytes, std::unique_ptr<Message> message) = 0;

  // For a thread that is about to wait until `done`: makes messages go on meanwhile, if that spares waking
  // another thread. May return at any time. wake(): `done` may have become true by something else.
  virtual void drive(const std::function<bool()>& done, TimePoint limit) = 0;
  virtual void wake() noexcept = 0;

  // Ends all messages, now and later, with Cause::Aborted. Any thread, idempotent; does not wait.
  virtual void abort() noexcept = 0;

  // abort(), and waits until no message is left and none is being told. Not from a message.
  virtual void shutdown() = 0;
};

// A transport over which a rank can learn of a message before it has memory for it.
class ProbingTransport : public Transport {
 public:
  // Told as finished once a message of that name is here; it stays until recv() asks for it, which must not
  // come before. As recv() otherwise.
  virtual void probe(const Envelope& from, std::unique_ptr<Message> message) = 0;
};

}  // namespace meshcast
