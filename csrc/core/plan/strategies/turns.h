#pragma once

#include <cstdint>
#include <tuple>
#include <vector>

#include "plan/draft.h"
#include "plan/strategies/strategies.h"

namespace meshcast {

// All chunks of a bundle from one rank to one other.
struct Send {
  int32_t src = -1;  // dense rank indices
  int32_t dst = -1;
  int32_t out = -1;  // ports
  int32_t in = -1;
  Drafter::Range chunks;
  int32_t bundle = -1;
  int32_t copy_to = -1;     // another rank of that host, to which the receiver passes them on
  int32_t turn = 0;         // of the receiver's host
  int32_t turn_inside = 0;  // of the receiver among those of its host
  int32_t after = -1;       // index of the send that brings the bundle to src; -1 if src holds it
};

// The order of a rotation; sends of equal turns keep their order.
inline bool earlier(const Send& a, const Send& b) {
  return std::tie(a.turn, a.turn_inside) < std::tie(b.turn, b.turn_inside);
}

// The sends of send_recv, bundle by bundle. Cuts the chunks, unless `drafter` is null.
std::vector<Send> choose_sends(const Inputs& in, Drafter* drafter);

// Numbers the turns of a rotation among these sends.
//
// Example. Senders 0 to 5 send to all ranks of hosts 0 and 1 with 3 NICs each. In turn 0 the senders 0, 2 and 4
// send to host 0 and the others to host 1; in turn 1 the other way round. Within a turn, sender 2 is the second
// of those that send to its host: it begins with the second NIC there, and continues with the third and the
// first.
void set_turns(const Network& network, std::vector<Send>* sends);

}  // namespace meshcast
