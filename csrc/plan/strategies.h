#pragma once

#include <cstdint>
#include <vector>

#include "plan/draft.h"
#include "plan/network.h"
#include "plan/plan.h"

namespace meshcast {

// Everything a strategy chooses routes from.
struct Inputs {
  const std::vector<Problem>& problems;
  const std::vector<Task>& tasks;
  const std::vector<Bundle>& bundles;
  const Network& network;
  int64_t chunk_bytes;
  Balance balance;
  uint64_t seed;

  const Task& lead(const Bundle& bundle) const { return tasks[static_cast<size_t>(bundle.tasks.front())]; }
};

// One unicast per receiver from the least loaded holder; a holder on the receiver's host comes first.
Draft draft_send_recv(const Inputs& in);

// One chunk-pipelined chain per task from one holder through all receivers, host by host.
Draft draft_broadcast(const Inputs& in);

}  // namespace meshcast
