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

// The identity of a private group: its global ranks in ascending order, and the rank of this process.
struct GroupIdentity {
  std::vector<int32_t> ranks;
  int32_t rank = -1;
  std::string name;

  size_t place() const {  // of this process among the ranks
    return static_cast<size_t>(std::lower_bound(ranks.begin(), ranks.end(), rank) - ranks.begin());
  }
};

// An error of this rank; sets `where.rank`. Only PeerLost may name this rank as its own peer: all ranks name
// the lost one.
Error group_error(const GroupIdentity& group, ErrorKind kind, const std::string& text, ErrorContext where);

// The lane of commands that are counted in no lane, such as prepare().
constexpr int32_t kNoLane = -1;

// One call as the ranks number it.
struct CallId {
  int32_t lane = 0;
  int64_t ordinal = 0;
};

// The digest of a descriptor, under which the ranks that have posted it are counted.
std::string digest_of(const std::string& descriptor);

// Blocks until every rank of the group has posted the same descriptor for this call, and returns the slot that
// the first rank gave to it. Moves no tensor data. `offered_slot` is used on the first rank only. Throws
// PlanMismatch with both sides if descriptors differ or a rank rejected its arguments, and DeadlineExceeded
// naming the ranks that did not call. `checkpoint` is called every few milliseconds and throws if the group has
// failed meanwhile. `lost` returns why a rank, by its position in the group, is lost, or "" if it is not;
// agree() then throws PeerLost and notifies all ranks.
int32_t agree(Bulletin& bulletin, const GroupIdentity& group, CallId call, const std::string& descriptor,
              int32_t offered_slot, TimePoint deadline, double limit_seconds,
              const std::function<void()>& checkpoint, const std::function<std::string(int)>& lost);

// For a rank that has waited in a call for long: compares with the first rank that has, and throws PlanMismatch
// as above. The others find this when they look for an objection; if one of the two already moves data, the
// group fails too.
void compare_with_first(Bulletin& bulletin, const GroupIdentity& group, CallId call, const Posting& mine);

// Throws PlanMismatch if a rank rejects the call, or called it differently from this one.
void check_objection(Bulletin& bulletin, const GroupIdentity& group, CallId call,
                     const std::string& descriptor);

// The group is broken, and a rank has posted the cause.
struct BrokenError : Error {
  BrokenError(const Error& error, Cause why) : Error(error), cause(std::move(why)) {}
  const Cause cause;
};

// Throws BrokenError, as an error of this call.
[[noreturn]] void raise_cause(const Cause& cause, const GroupIdentity& group, CallId call);

// The same, but returns if the cause is the refusal of a later call: this call continues.
void raise_if_ended(const Cause& cause, const GroupIdentity& group, CallId call);

// "[1, 4, 5]"
std::string format_ranks(const std::vector<int32_t>& ranks);

}  // namespace meshcast
