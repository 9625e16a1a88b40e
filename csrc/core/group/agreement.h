#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "group/bulletin.h"
#include "transport/transport.h"

namespace meshcast {

// Who a private group is: its global ranks in ascending order and which of them this process is.
struct GroupIdentity {
  std::vector<int32_t> ranks;
  int32_t rank = -1;
  std::string name;

  size_t place() const {  // of this process among the ranks
    return static_cast<size_t>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
  }
};

// The error of a rank of a group, which `where` names none of. Only who is lost is its own peer: all ranks name
// that.
Error group_error(const GroupIdentity& group, ErrorKind kind, const std::string& text, ErrorContext where);

// Of what is counted in no lane, as prepare().
constexpr int32_t kNoLane = -1;

// One call as the ranks number it.
struct CallId {
  int32_t lane = 0;
  int64_t ordinal = 0;
};

// By which ranks count what was posted, of a descriptor.
std::string digest_of(const std::string& descriptor);

// Blocks until every rank of the group has posted the same descriptor for this call, and returns the slot
// that the first rank gave to it. Moves no tensor data. `offered_slot` counts on the first rank only.
// Throws PlanMismatch with both sides where descriptors differ or a rank rejected its arguments, and
// DeadlineExceeded naming the ranks that did not call. `checkpoint` is called every few milliseconds and
// throws where the group has been given up meanwhile. `lost` says why a rank, by its position in the group, has
// gone, or "": then PeerLost is thrown, which all ranks are told of.
int32_t agree(Bulletin& bulletin, const GroupIdentity& group, CallId call, const std::string& descriptor,
              int32_t offered_slot, TimePoint deadline, double limit_seconds,
              const std::function<void()>& checkpoint, const std::function<std::string(int)>& lost);

// For a rank that has waited in a call for long: compares with the first that has, and throws PlanMismatch as
// above. The others hear of that as they look for an objection; where one of the two moves data already, the
// group has failed as well.
void compare_with_first(Bulletin& bulletin, const GroupIdentity& group, CallId call, const Posting& mine);

// Throws it where a rank rejects the call, or called it differently from this one.
void check_objection(Bulletin& bulletin, const GroupIdentity& group, CallId call,
                     const std::string& descriptor);

// The group is broken, and a rank has said why.
struct BrokenError : Error {
  BrokenError(const Error& error, Cause why) : Error(error), cause(std::move(why)) {}
  const Cause cause;
};

// Throws BrokenError, as an error of this call.
[[noreturn]] void raise_cause(const Cause& cause, const GroupIdentity& group, CallId call);

// The same, but returns where the cause is a refusal of a later call: this one goes on.
void raise_if_ended(const Cause& cause, const GroupIdentity& group, CallId call);

// "[1, 4, 5]"
std::string format_ranks(const std::vector<int32_t>& ranks);

}  // namespace meshcast
