#pragma once

#include <cstdint>
#include <vector>

#include "plan/bound/parties.h"
#include "plan/bound/port_items.h"
#include "plan/bound/reduce_mix.h"
#include "plan/draft.h"
#include "plan/network.h"
#include "plan/plan.h"

namespace meshcast {

// The bytes that the ports have to carry on any routes, and the least time for that.
struct PortDemand {
  std::vector<Parties> parties;            // by bundle; empty for bundles to be reduced
  std::vector<std::vector<WayPart>> ways;  // by bundle; only for those to be reduced: see find_reduce_mix
  std::vector<char> hot_hosts;             // hosts whose internal ports might limit the plan
  std::vector<PortItem> items;             // balanced: between all hosts, and inside the hot ones
  int64_t bound_ns = 0;                    // for all plans in which only holders and receivers carry a box
};

// The bound is the latency of one hop and the largest of
//   - for the NICs that send: each box leaves a host that holds it once, and is sent once per remote host;
//   - for the NICs that receive, host by host: each box that the host needs and does not hold enters it once;
//   - for the ranks of a host: each receives what it needs, over its NIC or from another rank of the host,
//     and only from there if no other host has a part in the box;
//   - for all ranks together: the copies in addition to the one that a remote host must get come from ranks
//     of the host, or leave NICs of others.
// A box to be reduced counts as reduced first and then sent on: with at least Q hosts to visit for all partial
// values and R hosts that need the result and cannot make it alone, Q - 1 + R hops between hosts (one less if a
// host is both), to be shared by all NICs involved, and one into each of the R; if all of it is on one host,
// the same for ranks. In the same way for all ranks together, whose hops take NICs or local ports. Each is the
// least T for which a flow exists (a port carries rate * T), found by Newton's method on its minimum cut. All
// are relaxations: they do not include the time to fill a chain.
PortDemand find_port_demand(const std::vector<Task>& tasks, const std::vector<Bundle>& bundles,
                            const Network& network);

}  // namespace meshcast
