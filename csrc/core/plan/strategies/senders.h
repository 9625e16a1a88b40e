#pragma once

#include <cstdint>
#include <vector>

#include "plan/network.h"

namespace meshcast {

// Chooses the sender of a box to one receiver: a holder on the receiver's host if there is one, else the holder
// whose NIC has the fewest bytes so far; among equals the rank with the fewest bytes, then the lower rank.
class SenderLoads {
 public:
  explicit SenderLoads(const Network& network)
      : network_(network),
        rank_load_(static_cast<size_t>(network.rank_count()), 0),
        nic_load_(static_cast<size_t>(network.nic_count()), 0) {}

  // `holders` are global ranks, `receiver` and the result dense indices. Adds `nbytes` to the sender's load.
  int32_t choose(const std::vector<int32_t>& holders, int32_t receiver, int64_t nbytes);

 private:
  const Network& network_;
  std::vector<int64_t> rank_load_, nic_load_;
};

}  // namespace meshcast
