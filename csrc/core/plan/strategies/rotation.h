#pragma once

#include <vector>

#include "plan/draft.h"
#include "plan/strategies/strategies.h"
#include "plan/strategies/turns.h"

namespace meshcast {

// The sends of send_recv in an order by rotation: in turn k the i-th sender sends to the ranks of the (i +
// k)-th host, so that senders do not meet. Those that send to one host in the same turn rotate among its ranks.
// If all send to all, and equally much, every port is busy from the first hop to the last. Ports that no sends
// connect rotate separately. Each port is to take its hops in the order of the draft, see
// BestPlan::offer_in_order.
Draft draft_rotation(const Inputs& in);

// The same, but some receivers of a host get a chunk from another receiver there: as many as the ports inside
// can serve while NICs bring the rest. For many senders to replicas on hosts whose ranks copy more slowly than
// their NICs receive, so that a chunk should enter at most, but not all, ranks of a host.
Draft draft_rotation_with_copies(const Inputs& in);

// A rotation for each layer, one after the other. A layer is the bundles with the same number of receivers, as
// those of tensors with one layout. Each layer may be even if all together are not: a sender then has much for
// some hosts and little for others, and their turns differ in length. Layers that go to several ranks of a host
// may enter it once, while there is time for copies inside. If senders have more to do than receivers, these
// pass on what they got in the first turns. Empty with one layer, or if it cannot be good.
//
// The order of sends is the same for all chunk sizes.
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
