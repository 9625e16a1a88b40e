#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "group/agreement.h"
#include "group/bulletin.h"
#include "transport/transport.h"

namespace meshcast {

// A call that a rank refused while others were in it, with bytes under way that nobody will receive. Once
// each rank has ended the calls before it, the connections end, and the ranks meet again for those that follow.
struct RefusedCall {
  CallId call;
  int32_t rank = -1;  // that refused it
  std::string text;   // why
};

// As the cause that ends a generation of a group, and back: none where a cause is of another kind.
Cause as_cause(const RefusedCall& refused);
std::optional<RefusedCall> refused_in(const Cause& cause);

// Whether a call goes on to its end although the other was refused: ranks that refuse one may be done with
// those before it. Backwards have the numbers of their forwards, which say nothing of their order.
bool goes_before(CallId call, CallId refused);

// What a rank that was in one of the calls raises; `group` is as it sees it.
Error error_of(const RefusedCall& refused, const GroupIdentity& group);

// Whether a generation of a group goes on after a refused call. The first rank that decides does so for all:
// those that refused the call, and those that waited for an agreement on it.
enum class Generation : uint8_t { GoesOn, Over };
Generation decide(Bulletin& bulletin, CallId call, Generation mine, bool refuses = false);

// The cause that follows Generation::Over; throws Error where none comes.
Cause await_cause(Bulletin& bulletin, TimePoint limit);

// What the other ranks of a refused call are seen to do.
enum class Others : uint8_t {
  Unseen,    // none of them has asked for an agreement: what they know needs none
  Agree,     // one at least waits for an agreement, and so has sent nothing
  AllRefuse  // nobody waits for anybody
};

// What they do by `limit`, or as soon as it is clear. over(): there is no use in looking any longer.
Others look_for_others(Bulletin& bulletin, const GroupIdentity& group, CallId call, TimePoint limit,
                       const std::function<bool()>& over);

}  // namespace meshcast
