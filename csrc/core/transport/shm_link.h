#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "common/forks.h"
#include "transport/doorbell.h"
#include "transport/local_meeting.h"
#include "transport/shm_progress.h"
#include "transport/shm_region.h"
#include "transport/transport.h"

namespace meshcast {

// A rank of this host: its number in the group and where its ShmRendezvous listens.
struct ShmMember {
  int rank = -1;
  std::string address;
};

// The reason why messages with a peer fail.
inline constexpr const char* kShmGone = "its process has exited or has closed the group (shared memory)";
inline constexpr const char* kShmNonsense = "what it wrote to shared memory makes no sense";

// A peer on this host: its doorbell, and two descriptors that show when it has ended: a socket, for a peer that
// closes its group, and a process descriptor, since a process forked by the peer may hold the socket open after
// the peer has died.
class ShmPeer {
 public:
  // `group`: its number on the peer's doorbell.
  ShmPeer(int rank, int socket, std::shared_ptr<Doorbell> doorbell, uint32_t group);
  ~ShmPeer();
  ShmPeer(const ShmPeer&) = delete;
  ShmPeer& operator=(const ShmPeer&) = delete;

  int rank() const { return rank_; }
  void call(ShmHalf half) { doorbell_->call(group_, half); }  // there is something for this half of the peer
  bool gone() const;                                          // does not block
  void hang_up() const;                                       // the peer sees gone(); any thread
  std::vector<int> fds() const;                               // readable once it has ended

 private:
  Origin origin_;
  int rank_;
  int socket_;
  int process_;                               // -1 where the peer's process is not visible from here
  const std::shared_ptr<Doorbell> doorbell_;  // of the peer's process
  uint32_t group_;
};

// Connection to a peer of a private group, with its memory.
class ShmLink : public ShmPeer {
 public:
  ShmLink(int rank, int socket, std::unique_ptr<ShmRegion> region, std::shared_ptr<Doorbell> doorbell,
          uint32_t group)
      : ShmPeer(rank, socket, std::move(doorbell), group), region_(std::move(region)) {}

  ShmRegion& region() { return *region_; }

 private:
  std::unique_ptr<ShmRegion> region_;
};

// A rank's own memory and links. `own` has a mailbox for each link, by index.
struct ShmMembership {
  int rank = -1;
  std::unique_ptr<ShmProgress::Place> place;
  std::unique_ptr<ShmRegion> own;
  std::vector<std::unique_ptr<ShmLink>> links;  // in ascending order of rank
  std::vector<uint32_t> mailbox;                // of this rank in links[i]->region()
};

// Exchanges the memory of the ranks of a host.
class ShmRendezvous {
 public:
  // Makes this rank's own memory, for at most `ranks` ranks: it refuses before other ranks are asked to
  // connect. Throws std::runtime_error.
  explicit ShmRendezvous(uint32_t ranks, std::shared_ptr<ShmProgress> progress = ShmProgress::of_process());

  const std::string& address() const { return meeting_.address(); }

  // Connects this rank with all others of `members` (which holds this rank too and ascends); every member must
  // call. Throws std::runtime_error with the reason, and no later than `deadline`. To be called once. Calls
  // check() every few milliseconds, which may throw.
  ShmMembership meet(
      const std::vector<ShmMember>& members, int rank, TimePoint deadline,
      const std::function<void()>& check = [] {});

 private:
  std::unique_ptr<ShmProgress::Place> place_;
  std::unique_ptr<ShmRegion> own_;
  LocalMeeting meeting_;
};

}  // namespace meshcast
