#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "common/sync.h"

namespace meshcast {

// The reason why a message did not arrive. The text is the transport's own; which rank is at fault is decided
// further up, where the first cause of all ranks is known.
class TransportError : public std::runtime_error {
 public:
  // Mismatch: the message has another size than its receive; the connection stays usable. Memory: this rank has
  // none left for it; the peer is not the cause.
  enum class Cause : uint8_t { Timeout, Closed, Aborted, Mismatch, Memory };
  TransportError(Cause cause, const std::string& what, std::string told = {})
      : std::runtime_error(what), cause_(cause), told_(std::move(told)) {}
  Cause cause() const noexcept { return cause_; }
  const std::string& told() const noexcept { return told_; }  // see Transport::told()

 private:
  Cause cause_;
  std::string told_;
};

// One end of a message in flight. One of the two functions is called, once, when it ends. Afterwards the
// transport does not touch its memory. Neither may block, throw, or wait for another message.
class Message {
 public:
  virtual ~Message() = default;
  virtual void finished() = 0;
  virtual void failed(int peer, const TransportError& error) = 0;
};

// A message to be sent, read where it lies. Offsets count in its packed form. It is read until it has ended, by
// any thread, at times under a lock of the transport: so reading takes no lock and does not call back.
class Outgoing : public Message {
 public:
  virtual const std::byte* packed() { return nullptr; }  // where it lies as one piece in memory
  virtual void read(int64_t offset, int64_t nbytes, std::byte* out) = 0;
};

// A message to be received, written where it belongs, each byte once; otherwise as Outgoing. Pieces may be
// written in any order, but one at a time.
class Incoming : public Message {
 public:
  virtual std::byte* packed() { return nullptr; }
  virtual void write(int64_t offset, int64_t nbytes, const std::byte* in) = 0;
};

// The values by which both ends match a message.
struct Envelope {
  int peer = -1;     // the other end: its rank in the group
  int32_t lane = 0;  // lanes never wait for each other
  uint64_t key = 0;  // see message_key; no two messages of a pair that are in flight have the same
  // Where ranks pass messages on, only small messages leave before their receive is posted: else others would
  // share the network with messages that are due before them. The same at both ends.
  bool in_turn = false;
};

class Source;

// Moves bytes between the ranks of one private group, over the network; knows nothing of tensors. Memory must
// stay until the message has ended. A send may end as late as when its receive has all of it (rendezvous).
class Transport {
 public:
  virtual ~Transport() = default;

  // Never block, never call failed() before they return; messages may be finished() at once.
  virtual void send(const Envelope& to, int64_t nbytes, std::unique_ptr<Outgoing> message) = 0;
  virtual void recv(const Envelope& from, int64_t nbytes, std::unique_ptr<Incoming> message) = 0;

  // The source of its messages, for drive(); null if a thread that waits cannot help.
  virtual Source* source() noexcept { return nullptr; }

  // The reason why nothing comes from a peer any longer, for a rank that waits for it by other means than
  // messages; "" if it is not known. A call connects with the peer if it is not connected, so the reason may
  // come with a later call. A transport that only learns from its messages knows nothing.
  virtual std::string lost(int /*peer*/) { return {}; }

  // The reason that peers receive when this rank aborts, a text of the layer above. Before abort(). With a
  // transport that cannot send it, they find out by themselves.
  virtual void leave_because(const std::string& /*why*/) noexcept {}

  // The reason that a peer sent when it left; "" if it sent none.
  virtual std::string told(int /*peer*/) { return {}; }

  // True if any peer sent a reason. Costs next to nothing.
  virtual bool anybody_told() const noexcept { return false; }

  // Ends all messages, now and later, with Cause::Aborted. Any thread, idempotent; does not wait.
  virtual void abort() noexcept = 0;

  // abort(), and waits until no message is left and no end is being reported. Not from a message.
  virtual void shutdown() = 0;
};

// A transport over which a rank can learn of a message before it has memory for it.
class ProbingTransport : public Transport {
 public:
  // Calls finished() once a message of that name is here; it stays until recv() asks for it, which must not
  // come before. As recv() otherwise.
  virtual void probe(const Envelope& from, std::unique_ptr<Message> message) = 0;
};

}  // namespace meshcast
