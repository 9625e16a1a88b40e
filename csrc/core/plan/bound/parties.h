#pragma once

#include <cstdint>
#include <vector>

#include "plan/draft.h"
#include "plan/network.h"
#include "plan/plan.h"

namespace meshcast {

// The ranks of one host that hold, or need, the box of a bundle. Dense rank indices, ascending.
struct Party {
  int32_t host = -1;
  std::vector<int32_t> ranks;
};

// The ranks that take part in a bundle, by host. A host that needs the box and has no holder is remote: the box
// has to enter it over a NIC once; all other traffic can stay inside hosts.
struct Parties {
  std::vector<Party> holders;         // hosts ascending
  std::vector<Party> receivers;       // hosts ascending, remote ones and those with holders
  std::vector<int32_t> holder_party;  // parallel to receivers: index into holders, or -1 for a remote host
  int64_t remote_hosts = 0;
  bool one_host = false;  // no other host has a part in it: all traffic is local

  bool remote(size_t receiver) const { return holder_party[receiver] < 0; }
};

Parties find_parties(const Task& task, const Network& network);

}  // namespace meshcast
