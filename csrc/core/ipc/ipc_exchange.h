#pragma once

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "ipc/ipc_driver.h"
#include "ipc/ipc_link.h"
#include "ipc/ipc_memory.h"

namespace meshcast {

// Groups of messages between ranks of one host, carried out by copies that each receiver makes out of the
// sender's memory: the group functions of a RoundDevice, over CUDA IPC. As with NCCL, messages of a pair match
// in the order in which both ends enqueue them, and all of a group is under way at once.
//
// The sender records its event `ready` on its stream and names the messages to the receiver. The receiver has
// its stream wait for that event, copies, records its event `copied` and says so; the sender then has its
// stream wait for that. So a stream only ever waits for what has been enqueued before, in whatever process, and
// nothing that CUDA puts into one queue can come to wait for itself. The price is that a group stays in
// progress until the hosts of its peers are in it: progress() has to be called until then.
//
// An event is recorded again only in a later group, which begins when the peers have enqueued their waits for
// it. Memory that cannot be exported is first copied into memory that can.
//
// Calls of CUDA that fail throw Error. No two threads are inside at a time.
class IpcExchange {
 public:
  using Stream = RoundDevice::Stream;
  using Event = RoundDevice::Event;

  // Connects this rank with all others, as IpcMeeting::meet. All copies will be on the device's transfer
  // stream. `driver` and `device` outlive this.
  static std::unique_ptr<IpcExchange> connect(IpcDriver& driver, RoundDevice& device, IpcMeeting& meeting,
                                              const std::vector<std::string>& addresses, int32_t rank,
                                              TimePoint deadline, const std::function<void()>& checkpoint);
  ~IpcExchange();
  IpcExchange(const IpcExchange&) = delete;
  IpcExchange& operator=(const IpcExchange&) = delete;

  void start();
  GroupOutcome send(const std::byte* data, int64_t nbytes, int32_t peer);
  GroupOutcome recv(std::byte* data, int64_t nbytes, int32_t peer);
  GroupOutcome end();       // names the messages, and progresses
  GroupOutcome progress();  // Success when all of the group is enqueued; also looks for peers that have exited

  // To be called while no group is under way, as the next three. Has the peers close what begins at `base`,
  // and gives back the buffers of earlier groups: the GPU is past all of them.
  void retire(const std::byte* base);
  // Reads and answers what peers say about memory. Returns whether one has yet to close what it was asked to.
  bool rest();
  // Notifies the peers, which may continue without this rank.
  void close() noexcept;
  // The peers see that this rank has ended. Work on the GPU ends by itself.
  void abort() noexcept;

 private:
  struct Incoming {
    std::byte* data = nullptr;
    int64_t nbytes = 0;
  };
  struct Outgoing {
    const std::byte* data = nullptr;
    int64_t nbytes = 0;
  };
  struct Peer {
    Peer(IpcPeer introduced, IpcDriver& driver, RoundDevice& device);

    IpcLink link;
    IpcImports imports;
    Event ready = 0;                               // the peer's
    Event copied = 0;                              // the peer's: it has copied from here
    Event own_copied = 0;                          // this rank's: it has copied from the peer
    std::deque<IpcNote> outbox;                    // for which the socket had no room
    std::deque<IpcNote> inbox;                     // messages of a group that this rank is not in yet
    std::map<uint64_t, const std::byte*> told;     // memory of this rank that the peer knows; null: no staging
    std::map<uint64_t, const std::byte*> leaving;  // that it is to forget, and may have mapped
    uint64_t groups_sent = 0;                      // groups that were not empty
    uint64_t groups_received = 0;
    bool closed = false;  // it has sent Bye
    bool gone = false;    // without Bye

    // These are of the present group.
    std::deque<Outgoing> sends;
    std::deque<Incoming> receives;
    bool awaited = false;  // the stream waits for `ready`
    bool waits_for_copied = false;
    bool has_copied = false;  // it said so, and the stream does not wait for `copied` yet
  };

  IpcExchange(IpcDriver& driver, RoundDevice& device);
  Peer& peer(int32_t number);
  void free_event(Event event) noexcept;
  void name_messages();
  void bounce(int64_t nbytes);
  IpcExports::Place place_of(const Outgoing& message, int64_t* bounced);
  void tell(Peer& to, const IpcNote& note);
  void flush(Peer& to);
  void listen(Peer& from);
  void hear(Peer& from, const IpcNote& note);
  void await_copied(Peer& by);
  void tell_forgotten();
  void answer(Peer& to);
  void close_for(Peer& who);
  void part_from(Peer& from) noexcept;
  void copy_messages(Peer& from);
  GroupOutcome failed(const Peer& who, bool remote, const std::string& text);

  IpcDriver& driver_;
  RoundDevice& device_;
  const Stream stream_;
  IpcExports exports_;
  std::deque<Peer> peers_;  // ascending
  Event ready_ = 0;
  Event over_ = 0;  // of an abort: everything of the groups before
  uint64_t now_ = 0;
  bool in_progress_ = false;  // a group is
  bool over_recorded_ = false;
  GroupOutcome failure_;
  bool closed_ = false;
  bool aborted_ = false;

  // Buffers for memory that cannot be exported. Smaller ones are kept, since the GPU may still read them.
  std::vector<std::shared_ptr<std::byte>> bounces_;
  int64_t bounce_bytes_ = 0;
};

}  // namespace meshcast
