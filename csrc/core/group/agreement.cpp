#include "group/agreement.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "common/error.h"
#include "common/fault_point.h"
#include "common/sync.h"
#include "group/refusals.h"
#include "plan/hash.h"

namespace meshcast {
namespace {

using Board = Bulletin::Board;

constexpr auto kLookForCause = std::chrono::milliseconds(100);
// Ranks that come together have agreed by then, and so have not connected for the sake of looking alone.
constexpr auto kLookForPeers = std::chrono::milliseconds(50);
constexpr size_t kFewRanks = 16;  // as many do not crowd a store

Error agree_error(const GroupIdentity& group, ErrorKind kind, const std::string& text, CallId call,
                  int32_t peer) {
  return group_error(group, kind, text,
                     {.peer = peer, .op = "reshard", .sequence = call.ordinal, .phase = "agree"});
}

// A rank may have given up on the group before it came to this call.
void raise_if_broken(Bulletin& bulletin, const GroupIdentity& group, CallId call) {
  if (const auto cause = bulletin.read_cause()) raise_if_ended(*cause, group, call);
}

// Every rank that waits for others looks after those that follow it in the group, up to the first that waits
// too, which `came` tells. So each rank is looked after, by one other, and has one connection more for it.
void raise_if_lost(Bulletin& bulletin, const GroupIdentity& group, CallId call, double waited,
                   const std::function<bool(int32_t)>& came, const std::function<std::string(int)>& lost) {
  const size_t count = group.ranks.size();
  const auto mine = std::find(group.ranks.begin(), group.ranks.end(), group.rank) - group.ranks.begin();
  for (size_t step = 1; step < count; ++step) {
    const size_t at = (static_cast<size_t>(mine) + step) % count;
    const int32_t other = group.ranks[at];
    const std::string why = lost(static_cast<int>(at));
    if (!why.empty()) {
      const Cause cause{static_cast<int32_t>(ErrorKind::PeerLost), group.rank, other,
                        fmt::format("call {} of {}: rank {} lost rank {} in phase agree after {:.2f} s: {}. "
                                    "Look at that rank's own output first.",
                                    call.ordinal, group.name, group.rank, other, waited, why)};
      raise_if_ended(bulletin.settle_cause(cause), group, call);
    }
    if (came(other)) return;
  }
}

[[noreturn]] void raise_mismatch(const GroupIdentity& group, CallId call, const std::string& descriptor,
                                 int32_t other, const Posting& posting) {
  const std::string text =
      posting.rejected
          ? fmt::format("rank {}: call {} of {}: rank {} refused its arguments: {}", group.rank, call.ordinal,
                        group.name, other, posting.text)
          : fmt::format(
                "rank {}: call {} of {}: the ranks called with different arguments; nothing was moved by this "
                "call.\n  rank {}: {}\n  rank {}: {}\nMake the arguments equal on every rank of both meshes.",
                group.rank, call.ordinal, group.name, group.rank, descriptor, other, posting.text);
  throw agree_error(group, ErrorKind::PlanMismatch, text, call, other);
}

void check_posting(const GroupIdentity& group, CallId call, const std::string& descriptor, int32_t other,
                   const Posting& posting) {
  if (posting.rejected || posting.text != descriptor) raise_mismatch(group, call, descriptor, other, posting);
}

}  // namespace

std::string digest_of(const std::string& descriptor) {
  Hasher hasher;
  hasher.add(std::vector<char>(descriptor.begin(), descriptor.end()));
  return hasher.hex();
}

void raise_cause(const Cause& cause, const GroupIdentity& group, CallId call) {
  if (const auto refused = refused_in(cause)) throw BrokenError(error_of(*refused, group), cause);
  if (cause.kind == static_cast<int32_t>(ErrorKind::PeerLost)) {
    const std::string seen =
        cause.reporter == group.rank ? "" : fmt::format(" (first seen by rank {})", cause.reporter);
    throw BrokenError(agree_error(group, ErrorKind::PeerLost,
                                  fmt::format("rank {}: {}{}", group.rank, cause.text, seen), call, cause.peer),
                      cause);
  }
  throw BrokenError(agree_error(group, ErrorKind::Aborted,
                                fmt::format("rank {}: call {} of {}: the group was aborted by rank {}: {}",
                                            group.rank, call.ordinal, group.name, cause.reporter, cause.text),
                                call, peer_in(cause, group.rank)),
                    cause);
}

void raise_if_ended(const Cause& cause, const GroupIdentity& group, CallId call) {
  const auto refused = refused_in(cause);
  if (!refused || !goes_before(call, refused->call)) raise_cause(cause, group, call);
}

Error group_error(const GroupIdentity& group, ErrorKind kind, const std::string& text, ErrorContext where) {
  where.rank = group.rank;
  if (where.peer == where.rank && kind != ErrorKind::PeerLost) where.peer = -1;
  return {kind, text, std::move(where)};
}

std::string format_ranks(const std::vector<int32_t>& ranks) {
  return fmt::format("[{}]", fmt::join(ranks, ", "));
}

std::vector<int32_t> compare_postings(Bulletin& bulletin, const GroupIdentity& group, CallId call,
                                      const std::string& descriptor, bool rejections) {
  std::vector<int32_t> silent;
  // Both boards: a rank to which the call is not new has posted on the board of stalls alone.
  for (const int32_t other : group.ranks) {
    if (other == group.rank) continue;
    const auto stalled = bulletin.read(Board::Stall, call.lane, call.ordinal, other);
    // A rank to which the call is new waits in agree() and has no other notice.
    const auto agreeing = bulletin.read(Board::Agreement, call.lane, call.ordinal, other);
    if (stalled) check_posting(group, call, descriptor, other, *stalled);
    if (agreeing && (rejections || !agreeing->rejected))
      check_posting(group, call, descriptor, other, *agreeing);
    if (!stalled) silent.push_back(other);
  }
  return silent;
}

int32_t agree(Bulletin& bulletin, const GroupIdentity& group, CallId call, const std::string& descriptor,
              int32_t offered_slot, TimePoint deadline, double limit_seconds,
              const std::function<void()>& checkpoint, const std::function<std::string(int)>& lost) {
  const int32_t first = group.ranks.front();
  const bool leads = group.rank == first;
  MC_FAULT_POINT("agree");
  bulletin.post(Board::Agreement, call.lane, call.ordinal, group.rank,
                {false, leads ? offered_slot : -1, descriptor});
  MC_FAULT_POINT("agree");
  // Who posts something else, or a rejection, is not counted: then the others look at what each one posted.
  const std::string digest = digest_of(descriptor);
  int64_t alike = bulletin.count(call.lane, call.ordinal, digest);
  MC_FAULT_POINT("agree");

  std::vector<int32_t> missing;
  std::copy_if(group.ranks.begin(), group.ranks.end(), std::back_inserter(missing),
               [&](int32_t r) { return r != group.rank; });
  int32_t slot = leads ? offered_slot : -1;
  const auto take = [&](int32_t other, const Posting& posting) {
    if (posting.rejected && decide(bulletin, call, Life::GoesOn) == Life::Over)
      raise_cause(await_cause(bulletin, deadline), group, call);
    check_posting(group, call, descriptor, other, posting);
    if (other == first) slot = posting.slot;
  };
  const auto came = [&](int32_t other) {
    const auto at = std::find(missing.begin(), missing.end(), other);
    if (at == missing.end()) return true;
    const auto posting = bulletin.read(Board::Agreement, call.lane, call.ordinal, other);
    if (!posting) return false;
    take(other, *posting);
    missing.erase(at);
    return true;
  };
  // All ranks share the store, which answers one question at a time. So many ranks ask less often.
  const auto crowd = static_cast<int>(std::max<size_t>(1, group.ranks.size() / kFewRanks));
  const TimePoint started = Clock::now();
  TimePoint last_look = started;
  auto pause = std::chrono::microseconds(100);
  for (;;) {
    if (missing.empty()) return slot;
    if (alike == static_cast<int64_t>(group.ranks.size()) && (slot >= 0 || came(first))) return slot;
    const TimePoint now = Clock::now();
    const bool late = now >= deadline;
    if (!late) checkpoint();
    if (late || now - last_look > crowd * kLookForCause) {
      last_look = now;
      for (const int32_t other : std::vector<int32_t>(missing)) came(other);
      if (late) break;
      raise_if_broken(bulletin, group, call);
      // A rank that knew its plan agreed on nothing: it stands still in a transfer and says so on the other
      // board.
      for (const int32_t other : missing) {
        const auto stalled = bulletin.read(Board::Stall, call.lane, call.ordinal, other);
        if (stalled) check_posting(group, call, descriptor, other, *stalled);
        if (bulletin.passed(call.lane, other) >= call.ordinal)
          raise_mismatch(group, call, descriptor, other,
                         {true, -1, "the call failed there, too long ago for more to be known"});
      }
    }
    if (now - started > kLookForPeers) {
      raise_if_lost(bulletin, group, call, std::chrono::duration<double>(now - started).count(), came, lost);
    }
    // 100 us, doubled up to 20 ms: ranks mostly come together, and a store must not be flooded by those that
    // wait long.
    sleep_for(pause);
    pause = std::min(pause * 2, crowd * std::chrono::microseconds(20000));
    alike = bulletin.counted(call.lane, call.ordinal, digest);
  }
  if (missing.empty()) return slot;
  throw group_error(
      group, ErrorKind::DeadlineExceeded,
      fmt::format("rank {}: call {} of {}: ranks {} did not make this call within {:.1f} s (never called, "
                  "stuck elsewhere, or dead). This rank called: {}",
                  group.rank, call.ordinal, group.name, format_ranks(missing), limit_seconds, descriptor),
      {.peer = missing.front(),
       .op = "reshard",
       .sequence = call.ordinal,
       .phase = "agree",
       .elapsed = std::chrono::duration<double>(Clock::now() - started).count(),
       .limit = limit_seconds});
}

}  // namespace meshcast
