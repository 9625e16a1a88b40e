#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "ipc/ipc_driver.h"
#include "transport/local_meeting.h"
#include "transport/transport.h"
#include "transport/unix_socket.h"

namespace meshcast {

// The notes that ranks send each other about one lane; GPUs copy the bytes.
//   Memory   `memory` names the allocation of `handle`, of `nbytes`, from now on
//   Message  bytes [offset, offset + nbytes) of `memory` are the next message, once the sender's event `ready`
//            is reached; `last` of this group
//   Copied   the group's messages have been copied once the receiver's event `copied` is reached
//   Forget   `memory` will not be named again
//   Closed   `memory`, which is forgotten, is not mapped any longer
//   Bye      the sender has closed its group: its GPU is done with all of it, it has nothing of the
//            receiver's mapped any longer, and its events may be destroyed
struct IpcNote {
  enum class Kind : uint32_t { Memory, Message, Copied, Forget, Closed, Bye };

  Kind kind = Kind::Bye;
  uint32_t last = 0;
  uint64_t group = 0;  // groups in which this pair has exchanged something, before this one
  uint64_t memory = 0;
  int64_t offset = 0;
  int64_t nbytes = 0;
  IpcHandle handle{};
};

// The events of one rank that a peer waits for.
struct IpcCard {
  IpcHandle ready{};
  IpcHandle copied{};
};

// Connection to one peer. It closes with the peer's process, so that its end shows.
class IpcLink {
 public:
  enum class Got : uint8_t { Note, Nothing, End };

  IpcLink(int32_t peer, Descriptor socket);

  int32_t peer() const { return peer_; }
  bool send(const IpcNote& note);  // false: no room at present. Notes to a peer that has exited are lost.
  Got receive(IpcNote* note);
  void hang_up() const;       // the peer gets End
  void stop_sending() const;  // the same, and its own notes still arrive

 private:
  int32_t peer_;
  Descriptor socket_;
  Descriptor process_;
  uint32_t looks_ = 0;
};

struct IpcPeer {
  IpcLink link;
  IpcCard card;
};

// Connects the ranks of a host for one lane. The constructor throws Error.
class IpcMeeting {
 public:
  const std::string& address() const { return meeting_.address(); }

  // Connects this rank with all others; `addresses` by group-local rank. `card`: of this rank's events for a
  // peer. Calls `checkpoint` every few milliseconds, which may throw. Throws Error, and no later than
  // `deadline`. To be called once.
  std::vector<IpcPeer> meet(const std::vector<std::string>& addresses, int32_t rank,
                            const std::function<IpcCard(int32_t)>& card, TimePoint deadline,
                            const std::function<void()>& checkpoint);

 private:
  LocalMeeting meeting_;
};

}  // namespace meshcast
