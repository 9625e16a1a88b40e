#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "group/conversation.h"
#include "group/group_core.h"
#include "group/meeting.h"
#include "transport/shm_link.h"

namespace meshcast {

// One rank's part in the shared memory of its host. Either all ranks of a private group on this host use it, or
// none does: they publish their offers, meet, then settle whether all of them have connected. Used by one
// thread at a time.
class HostMemory {
 public:
  using FindLost = std::function<std::optional<LostRank>()>;  // among all ranks of the group

  // ranks: of the private group. off: why this rank is not to use shared memory; "" if it is.
  HostMemory(uint32_t ranks, const std::string& off);

  const std::string& offer() const { return offer_; }
  // Connects with the ranks of this host, given the offers of all of them. Throws PeerLost if one is lost, and
  // what `lost` throws. settle() handles every other failure.
  void meet(Conversation& conversation, const std::vector<int32_t>& group,
            const std::map<int32_t, std::string>& offers, TimePoint deadline, const FindLost& lost);
  // Waits for the outcomes of all ranks of this host. Throws PeerLost, or DeadlineExceeded if one reports none.
  void settle(Conversation& conversation, TimePoint deadline, const FindLost& lost);
  // Once settled; empty if no memory is used.
  LocalRanks take();
  // Why it is not used, although not all ranks have turned it off; "" otherwise.
  const std::string& obstacle() const { return obstacle_; }

 private:
  // Throws PeerLost if one of these ranks, whose connections are closed, is lost: itself, unless it left
  // because it lost another, which is then named.
  void check_ranks(Conversation& conversation, const std::vector<int32_t>& gone);
  void drop(const std::string& obstacle);

  std::unique_ptr<ShmRendezvous> rendezvous_;
  std::shared_ptr<LocalTransport> transport_;
  std::string offer_;
  std::vector<int32_t> group_;
  std::vector<int32_t> ranks_;  // of this host; empty if no memory is used
  std::string outcome_;         // of this rank; "" if it has connected
  std::string obstacle_;
};

}  // namespace meshcast
