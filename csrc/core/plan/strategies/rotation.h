#pragma once

#include <vector>

#include "plan/draft.h"
#include "plan/strategies/strategies.h"
#include "plan/strategies/turns.h"

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

// A rotation for each layer, one after the other: a layer is the bundles with as many receivers each, as those
// of tensors with one layout. Each layer may be even where all together are not: a sender then has much for
// some hosts and little for others, and what is a turn for one is none for the other. Layers that go to several
// ranks of a host may enter it once, while there is time for copies inside. Where senders have more to do than
// receivers, these pass on what came in the first turns. Empty with one layer, or where it cannot be good.
//
// Who sends when is the same for all sizes of chunks.
class Layers {
 public:
  explicit Layers(const Inputs& in);

  Draft draft(const Inputs& in) const;

 private:
  std::vector<std::vector<Send>> layers_;
};

// With the chunks of `in`.
Draft draft_layers(const Inputs& in);

}  // namespace meshcast
