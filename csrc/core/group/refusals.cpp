#include "group/refusals.h"

#include <algorithm>
#include <sstream>

#include <fmt/format.h>

#include "common/sync.h"
#include "group/agreed_plan.h"

namespace meshcast {
namespace {

constexpr int32_t kRefusedCall = 64;  // the kind of such a cause; not an ErrorKind
constexpr auto kPause = std::chrono::milliseconds(5);
constexpr const char* kOver = "over";
constexpr const char* kGoesOn = "goes on";

}  // namespace

Cause as_cause(const RefusedCall& refused) {
  return {kRefusedCall, refused.rank, -1,
          fmt::format("{} {} {}", refused.call.lane, refused.call.ordinal, refused.text)};
}

std::optional<RefusedCall> refused_in(const Cause& cause) {
  if (cause.kind != kRefusedCall) return std::nullopt;
  std::istringstream head(cause.text);
  RefusedCall out;
  out.rank = cause.reporter;
  if (!(head >> out.call.lane >> out.call.ordinal)) return std::nullopt;
  head.get();
  std::getline(head, out.text, '\0');
  return out;
}

bool goes_before(CallId call, CallId refused) {
  const bool backward = call.lane == AgreedPlan::kReverseLane;
  if (call.lane != refused.lane) return backward;
  return !backward && call.ordinal < refused.ordinal;
}

Error error_of(const RefusedCall& refused, const GroupIdentity& group) {
  return group_error(
      group, ErrorKind::PlanMismatch,
      fmt::format("rank {}: call {} of {}: rank {} refused its arguments: {}. Calls before it continue to "
                  "their end; the group can be used for the next",
                  group.rank, refused.call.ordinal, group.name, refused.rank, refused.text),
      {.peer = refused.rank, .op = "reshard", .sequence = refused.call.ordinal, .phase = "agree"});
}

Generation decide(Bulletin& bulletin, CallId call, Generation mine, bool refuses) {
  const char* const word = mine == Generation::Over ? kOver : kGoesOn;
  return bulletin.decide(call.lane, call.ordinal, word, refuses) == kOver ? Generation::Over
                                                                          : Generation::GoesOn;
}

Cause await_cause(Bulletin& bulletin, TimePoint limit) {
  for (;;) {
    if (const auto cause = bulletin.read_cause()) return *cause;
    if (Clock::now() >= limit)
      throw Error(ErrorKind::DeadlineExceeded, "a rank that ended its group did not say why in time");
    sleep_for(kPause);
  }
}

Others look_for_others(Bulletin& bulletin, const GroupIdentity& group, CallId call, TimePoint limit,
                       const std::function<bool()>& over) {
  for (;;) {
    size_t refusing = 1;
    for (const int32_t other : group.ranks) {
      if (other == group.rank) continue;
      const auto posting = bulletin.read(call.lane, call.ordinal, other);
      if (posting && !posting->rejected) return Others::Agree;
      if (posting) ++refusing;
    }
    if (refusing == group.ranks.size()) return Others::AllRefuse;
    if (Clock::now() >= limit || over()) return Others::Unseen;
    sleep_for(kPause);
  }
}

}  // namespace meshcast
