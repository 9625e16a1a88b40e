#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "transport/transport.h"

namespace meshcast {

// A receiver of a message, and the key by which both ends match it.
struct LocalTarget {
  int peer = -1;  // group-local rank
  uint64_t key = 0;
};

// Moves bytes between the ranks of one host. It differs from Transport in that a message has any number of
// receivers: it is copied in once and all of them read it.
//
// Sends are rendezvous: nothing is copied in before every receiver has posted, and posted messages are drained
// unconditionally. So no message, however late its receiver, can hold up another.
class LocalTransport {
 public:
  virtual ~LocalTransport() = default;

  // Never block, never call failed() before they return. Small messages may be finished() at once.
  virtual void send(std::vector<LocalTarget> targets, int64_t nbytes, std::unique_ptr<Outgoing> message) = 0;
  virtual void recv(int peer, uint64_t key, int64_t nbytes, std::unique_ptr<Incoming> message) = 0;

  // Checks whether peers have exited, and returns those that have. Messages with them fail with Cause::Closed,
  // except those that they had sent before. To be called now and then while messages are in flight: nothing
  // else watches the peers.
  virtual std::vector<int> check_peers() = 0;

  virtual Source* source() noexcept = 0;  // drives its messages, for drive()

  // Ends all messages, now and later, with Cause::Aborted. Any thread, idempotent; does not wait. The peers do
  // not see it: they would count this rank as dead before they could read the first cause.
  virtual void abort() noexcept = 0;

  // abort(), lets the peers see that this rank has left, and waits until no message is left and no end is being
  // reported. Not from a message.
  virtual void shutdown() = 0;
};

}  // namespace meshcast
