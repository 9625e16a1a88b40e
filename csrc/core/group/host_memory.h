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

// One rank's part in the shared memory of its host. All ranks of a host that are in a private group use it, or
// none of them does: they publish their offers, meet, then settle whether all of them have connected. Used by
// one thread at a time.
class HostMemory {
 public:
  using FindLost = std::function<std::optional<LostRank>()>;  // of all ranks of the group

  // ranks: of the private group. off: why this rank is not to use it; "" where it is.
  HostMemory(uint32_t ranks, const std::string& off);

  const std::string& offer() const { return offer_; }
  // Connects with the ranks of this host, given the offers of all of them. Throws PeerLost where one is lost,
  // and what `lost` throws. Every other failure is what settle() is for.
  void meet(Conversation& conversation, const std::vector<int32_t>& group,
            const std::map<int32_t, std::string>& offers, TimePoint deadline, const FindLost& lost);
  // Waits for what the ranks of this host have come to. Throws PeerLost, or DeadlineExceeded where one does not
  // say.
  void settle(Conversation& conversation, TimePoint deadline, const FindLost& lost);
  // Once settled: none where no memory is used.
  LocalRanks take();
  // Why it is not used, although not all ranks have turned it off; "" otherwise.
  const std::string& obstacle() const { return obstacle_; }

 private:
  // Throws where one of these ranks, which are not connected any longer, has not left since it lost another.
  void check_ranks(Conversation& conversation, const std::vector<int32_t>& gone);
  void drop(const std::string& obstacle);

  std::unique_ptr<ShmRendezvous> rendezvous_;
  std::shared_ptr<LocalTransport> transport_;
  std::string offer_;
  std::vector<int32_t> group_;
  std::vector<int32_t> ranks_;  // of this host; empty where no memory is used
  std::string outcome_;         // of this rank; "" where it has connected
  std::string obstacle_;
};

}  // namespace meshcast
