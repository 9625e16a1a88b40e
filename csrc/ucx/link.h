#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "transport/transport.h"
#include "ucx/worker.h"

namespace meshcast::ucx {

class GroupTransport;

// What travels in front of the bytes of a message.
struct DataHeader {
  uint64_t group = 0;
  uint64_t key = 0;
  int32_t sender = -1;  // rank in the group
  int32_t unused = 0;
};

// A receiver has matched so many small messages, whose buffers are free again.
struct CreditHeader {
  uint64_t group = 0;
  int32_t sender = -1;
  int32_t count = 0;
};

// A rank uses the group no more, by its own end or because the group failed there. It says so on each rail that
// it has, behind all messages that it sent there.
struct LeaveHeader {
  uint64_t group = 0;
  int32_t sender = -1;
  int32_t rails = 0;
};

// The connection to a process on one rail.
struct Link {
  Worker* worker = nullptr;
  uint64_t process = 0;
  ucp_ep_h endpoint = nullptr;           // null once it is closed
  std::string failure;                   // why it has ended; empty while it is whole
  std::vector<Link*>* broken = nullptr;  // where UCX's word of that goes
};

// What UCX is busy with. Its header stays where it is until it has ended.
struct Flight {
  GroupTransport* group = nullptr;  // which waits for its flights before it goes
  std::shared_ptr<Link> link;
  int peer = -1;
  bool sends = false;
  std::unique_ptr<Message> message;  // null where the header is all there is
  std::variant<DataHeader, CreditHeader, LeaveHeader> header;
};

// How a message ended, to be told once the lock is released.
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

}  // namespace meshcast::ucx
