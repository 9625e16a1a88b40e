#pragma once

#include "plan/draft.h"
#include "plan/strategies/strategies.h"

namespace meshcast {

// The sends of send_recv in an order by rotation: in turn k the i-th sender sends to the ranks of the (i +
// k)-th host, so that senders do not meet. Those that send to one host in the same turn rotate among its ranks.
// Where all send to all, and equally much, every port is busy from the first hop to the last. Ports that have
// nothing to do with each other rotate apart. Each port is meant to take its hops in the order of the draft,
// see BestPlan::offer_in_order.
Draft draft_rotation(const Inputs& in);

// The same, but some receivers of a host get a chunk from another one there, which passes it on: as many as the
// ports inside can serve while NICs bring the rest. For many senders to replicas on hosts whose ranks copy more
// slowly than their NICs take in, so that a chunk should enter at most ranks of a host and not at all.
Draft draft_rotation_with_copies(const Inputs& in);

}  // namespace meshcast
