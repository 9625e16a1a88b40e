#pragma once

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "transport/transport.h"
#include "ucx/worker.h"

namespace meshcast::ucx {

class GroupTransport;

// The messages between ranks of a group.
enum class Kind : uint8_t {
  Data,      // bytes of a message
  Announce,  // a message waits for its receive
  Post,      // a receive waits for its message
  Taken,     // a message that waited for its receive has been received as a whole
  Credit,    // so many bytes of eager messages have been received
  Leave,     // a rank leaves the group, at its own end or because the group failed there, of which it sends
             // the cause; sent on each rail that it has, behind all that it sent there
};
inline constexpr int kKinds = 6;

// The version of these messages, to be raised with each change of Kind, Header, or their meaning. Ranks compare
// it when they meet, see Address.
inline constexpr uint32_t kWireVersion = 2;
inline constexpr uint32_t kWireMagic = 0x6d637500 + kWireVersion;  // "mcu"

// Goes in front of each of these.
struct Header {
  uint64_t group = 0;
  uint64_t key = 0;     // of the message: Data, Announce, Post, Taken
  int32_t sender = -1;  // rank in the group
  int32_t count = 0;    // Data: 1 if it is eager. Credit: of bytes. Leave: of rails
  int64_t offset = 0;   // Data: of these bytes in the message
  int64_t nbytes = 0;   // Data, Announce: of the message. Post: of the receive
  uint32_t magic = kWireMagic;
  uint32_t unused = 0;  // no byte is sent uninitialized
};

// None where the bytes are no header of this wire version.
inline std::optional<Header> read_header(const void* bytes, size_t length) {
  Header header;
  if (length != sizeof(header)) return std::nullopt;
  std::memcpy(&header, bytes, sizeof(header));
  return header.magic == kWireMagic ? std::optional(header) : std::nullopt;
}

// The errors of messages that the transport itself ends.
inline const TransportError kAborted(TransportError::Cause::Aborted, "the transport was aborted");
inline const TransportError kForked(TransportError::Cause::Closed,
                                    "this process was forked from the one that made the connections");

// A buffer of kFragmentBytes.
using Fragment = std::unique_ptr<std::byte[]>;

// The connection to a process on one rail.
struct Link {
  Worker* worker = nullptr;
  uint64_t process = 0;
  ucp_ep_h endpoint = nullptr;           // null once it is closed
  std::string failure;                   // why it has ended; empty while it is whole
  std::vector<Link*>* broken = nullptr;  // where a failure that UCX reports is added
};

struct Sending;

// Messages of a group to one peer on one rail whose receives are posted, in the order in which they go: all of
// one before the next, so that a rank that forwards the first need not wait for the others.
struct Line {
  std::deque<std::shared_ptr<Sending>> waiting;
  int in_flight = 0;    // fragments
  bool pumped = false;  // a thread pumps it, and checks again before it leaves
  bool queued = false;  // to be pumped
};

// A message that waits for its receive, or is in flight in fragments. It has ended when the receiver has taken
// all of it: that UCX has sent the bytes says nothing of a receiver that has died since.
struct Sending {
  int peer = -1;
  uint64_t key = 0;
  std::shared_ptr<Link> link;
  std::shared_ptr<Line> line;  // null until it is posted
  int64_t nbytes = 0;
  const std::byte* packed = nullptr;  // see Outgoing
  std::unique_ptr<Outgoing> message;  // null once its end has been queued
  int64_t issued = 0;                 // bytes
  bool all_issued = false;            // a message without bytes is one fragment, too
  int in_flight = 0;                  // fragments
  bool announced = false;
  bool taken = false;
  bool reading = false;  // a thread packs a fragment, without the lock
  std::optional<TransportError> error;
};

// A send of UCX. Its header stays in place until it has ended.
struct Flight {
  GroupTransport* group =
      nullptr;  // which waits for its flights before it goes; null: it has ended all the same
  std::shared_ptr<Link> link;
  int peer = -1;
  Kind kind = Kind::Data;
  Header header;
  std::string text;                   // of a Leave
  Fragment buffer;                    // what is sent, where that had to be packed
  std::unique_ptr<Outgoing> message;  // that ends with it: an eager one
  std::shared_ptr<Sending> sending;   // of which it is a fragment
  std::shared_ptr<Line> line;         // in which it counts; none for the beginning of a message
};

// The end of a message, to be reported once the lock is released.
struct End {
  GroupTransport* group = nullptr;  // which waits for its ends before it goes
  std::unique_ptr<Message> message;
  int peer = -1;
  std::optional<TransportError> error;

  void tell() {
    if (error) {
      message->failed(peer, *error);
    } else {
      message->finished();
    }
  }
};

// Messages of which more can be sent, to be packed once the lock is released.
struct Pump {
  GroupTransport* group = nullptr;
  std::shared_ptr<Line> line;
};

}  // namespace meshcast::ucx
