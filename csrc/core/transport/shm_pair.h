#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <string>

#include "common/sync.h"
#include "transport/local_meeting.h"
#include "transport/shm_link.h"
#include "transport/shm_pipe.h"
#include "transport/transport.h"

namespace meshcast {

// Connects two ranks of a host for messages through shared memory: a pipe in either direction. A rank refuses
// before the other is asked to connect.
class ShmPairRendezvous {
 public:
  // Throws std::runtime_error with the reason.
  explicit ShmPairRendezvous(std::shared_ptr<ShmProgress> progress = ShmProgress::of_process());

  const std::string& address() const { return meeting_.address(); }

  // Connects this rank with `peer`, which makes the same call; both by their numbers in their group. The lower
  // of them is rank 0 of the transport, the other rank 1. Throws as LocalMeeting::meet, and where one of the
  // two cannot map what the other offers: then on both. To be called once.
  std::shared_ptr<ProbingTransport> meet(
      int32_t rank, int32_t peer, const std::string& address, TimePoint deadline,
      const std::function<void()>& checkpoint = [] {});

 private:
  std::unique_ptr<ShmProgress::Place> place_;
  std::unique_ptr<ShmPipe> pipe_;
  LocalMeeting meeting_;
};

}  // namespace meshcast
