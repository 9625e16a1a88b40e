#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "group/agreement.h"
#include "group/bulletin.h"
#include "transport/transport.h"

namespace meshcast {

// A call that a rank refused while others were in it, with bytes in flight that no rank will receive. Once each
// rank has ended the calls before it, the connections end, and the ranks meet again for those that follow.
struct RefusedCall {
  CallId call;
  int32_t rank = -1;  // the rank that refused it
  std::string text;   // why
};

// The cause that ends a generation of a group, and back: none if a cause is of another kind.
Cause as_cause(const RefusedCall& refused);
std::optional<RefusedCall> refused_in(const Cause& cause);

// Whether a call continues to its end although `refused` was refused: ranks that refuse a call may have
// finished those before it. Backwards have the numbers of their forwards, which do not give their order.
bool goes_before(CallId call, CallId refused);

// The error of a rank that was in one of the calls.
Error error_of(const RefusedCall& refused, const GroupIdentity& group);

// Whether a generation of a group continues after a refused call. The first rank that decides does so for all:
// for those that refused the call, and those that waited for an agreement on it.
enum class Generation : uint8_t { GoesOn, Over };
Generation decide(Bulletin& bulletin, CallId call, Generation mine, bool refuses = false);

// The cause that follows Generation::Over; throws Error if none comes.
Cause await_cause(Bulletin& bulletin, TimePoint limit);

// What the other ranks of a refused call do, as far as this rank sees.
enum class Others : uint8_t {
  Unseen,    // none of them has asked for an agreement: they may have one already
  Agree,     // one at least waits for an agreement, and so has sent nothing
  AllRefuse  // no rank waits for another
};

// Returns what they do by `limit`, or as soon as it is clear. over(): looking has become useless.
Others look_for_others(Bulletin& bulletin, const GroupIdentity& group, CallId call, TimePoint limit,
                       const std::function<bool()>& over);

}  // namespace meshcast
