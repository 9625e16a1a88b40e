#include "group/agreement.h"

#include <algorithm>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "common/error.h"
#include "common/fault_point.h"
#include "common/sync.h"
#include "group/record.h"
#include "group/refusals.h"
#include "plan/hash.h"

namespace meshcast {
namespace {

constexpr auto kLookForCause = std::chrono::milliseconds(100);
constexpr auto kLongestAsk = std::chrono::milliseconds(800);  // for many ranks
// Ranks that arrive together have agreed by then, and so open no connections only to watch each other. It is
// longer for many ranks, which take longer to arrive.
constexpr auto kLookForPeers = std::chrono::milliseconds(50);
constexpr size_t kFewRanks = 16;  // up to so many do not crowd a store

Error agree_error(const GroupIdentity& group, ErrorKind kind, const std::string& text, CallId call,
                  int32_t peer) {
  return group_error(group, kind, text,
                     {.peer = peer, .op = "reshard", .sequence = call.ordinal, .phase = "agree"});
}

// A rank may have given up on the group before it came to this call.
void raise_if_broken(Bulletin& bulletin, const GroupIdentity& group, CallId call) {
  if (const auto cause = bulletin.read_cause()) raise_if_ended(*cause, group, call);
}

// Every waiting rank watches the ranks that follow it in the group, up to the first that waits too, and at most
// `reach` of them. So each rank is watched by one other, which costs it one more connection.
void raise_if_lost(Bulletin& bulletin, const GroupIdentity& group, CallId call, double waited, const Roll& come,
                   size_t reach, const std::function<std::string(int)>& lost) {
  const size_t count = group.ranks.size();
  for (size_t step = 1; step <= std::min(reach, count - 1); ++step) {
    const size_t at = (group.place() + step) % count;
    const int32_t other = group.ranks[at];
    const std::string why = lost(static_cast<int>(at));
    if (!why.empty()) {
      const Cause cause{static_cast<int32_t>(ErrorKind::PeerLost), group.rank, other,
                        fmt::format("call {} of {}: rank {} lost rank {} in phase agree after {:.2f} s: {}. "
                                    "Look at that rank's own output first.",
                                    call.ordinal, group.name, group.rank, other, waited, why)};
      raise_if_ended(bulletin.settle_cause(cause), group, call);
    }
    if (come.has(at)) return;
  }
}

Error mismatch(const GroupIdentity& group, CallId call, const std::string& descriptor, const Posting& other) {
  const std::string text =
      other.rejected
          ? fmt::format("rank {}: call {} of {}: rank {} refused its arguments: {}", group.rank, call.ordinal,
                        group.name, other.rank, other.text)
          : fmt::format(
                "rank {}: call {} of {}: the ranks called with different arguments; nothing was moved by this "
                "call.\n  rank {}: {}\n  rank {}: {}\nMake the arguments equal on every rank of both meshes.",
                group.rank, call.ordinal, group.name, group.rank, descriptor, other.rank, other.text);
  return agree_error(group, ErrorKind::PlanMismatch, text, call, other.rank);
}

void check_posting(const GroupIdentity& group, CallId call, const std::string& descriptor,
                   const Posting& other) {
  if (other.rejected || other.text != descriptor) throw Error(mismatch(group, call, descriptor, other));
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

void compare_with_first(Bulletin& bulletin, const GroupIdentity& group, CallId call, const Posting& mine) {
  const Posting first = bulletin.first(call.lane, call.ordinal, mine);
  if (first.text == mine.text) return;
  bulletin.object(call.lane, call.ordinal, mine);
  const Error error = mismatch(group, call, mine.text, first);
  if (mine.moves || !first.moves) throw Error(error);
  const Cause cause{static_cast<int32_t>(error.kind()), group.rank, first.rank, error.what()};
  const Cause settled = bulletin.settle_cause(cause);
  if (settled.reporter == group.rank) throw BrokenError(error, settled);
  raise_cause(settled, group, call);
}

void check_objection(Bulletin& bulletin, const GroupIdentity& group, CallId call,
                     const std::string& descriptor) {
  if (const auto objection = bulletin.objection(call.lane, call.ordinal))
    check_posting(group, call, descriptor, *objection);
}

int32_t agree(Bulletin& bulletin, const GroupIdentity& group, CallId call, const std::string& descriptor,
              int32_t offered_slot, TimePoint deadline, double limit_seconds,
              const std::function<void()>& checkpoint, const std::function<std::string(int)>& lost) {
  const int32_t first = group.ranks.front();
  int32_t slot = group.rank == first ? offered_slot : -1;
  MC_FAULT_POINT("agree");
  const Posting mine{false, slot, descriptor, group.rank};
  bulletin.post(call.lane, call.ordinal, mine);
  MC_FAULT_POINT("agree");
  // A rank that posts another text, or a rejection, is not in this roll.
  Roll alike = bulletin.agreeing(call.lane, call.ordinal, digest_of(descriptor), group.ranks.size());
  bool all = alike.answer(group.place());
  MC_FAULT_POINT("agree");

  const auto take = [&](const Posting& posting) {
    if (posting.rejected && decide(bulletin, call, Generation::GoesOn) == Generation::Over)
      raise_cause(await_cause(bulletin, deadline), group, call);
    check_posting(group, call, descriptor, posting);
    if (posting.rank == first) slot = posting.slot;
  };
  const auto has_posted = [&](int32_t other) {
    const auto posting = bulletin.read(call.lane, call.ordinal, other);
    if (posting) take(*posting);
    return posting.has_value();
  };
  // If this generation of the group ends, a rank that refused this call in it does not make it in the next.
  const auto go_on = [&](const std::function<void()>& check) {
    try {
      check();
    } catch (const Error&) {
      std::optional<Posting> objection;
      try {
        objection = bulletin.objection(call.lane, call.ordinal);
      } catch (const std::exception&) {
        // The store has failed, and cannot have an objection.
      }
      if (objection) take(*objection);
      throw;
    }
  };
  // All ranks share the store, which answers one request at a time. So many ranks ask less often.
  const auto crowd = static_cast<int>(std::max<size_t>(1, group.ranks.size() / kFewRanks));
  const auto look = std::min<Clock::duration>(crowd * kLookForCause, kLongestAsk);
  const TimePoint started = Clock::now();
  TimePoint last_look = started;
  WaitNotice notice(started);
  const auto ranks_missing = [&] {
    std::vector<int32_t> out;
    for (const size_t at : alike.missing()) out.push_back(group.ranks[at]);
    return out;
  };
  // The number of ranks watched at a time, doubled with each look: most missing ranks are only late, and a
  // first look at each of them would connect this rank with all.
  size_t reach = 1;
  auto pause = std::chrono::microseconds(100);
  for (;;) {
    if (all && (slot >= 0 || has_posted(first))) return slot;
    const TimePoint now = Clock::now();
    const bool late = now >= deadline;
    if (!late) go_on(checkpoint);
    if (late || now - last_look > look) {
      last_look = now;
      if (const auto objection = bulletin.objection(call.lane, call.ordinal)) take(*objection);
      compare_with_first(bulletin, group, call, mine);
      alike.refresh();
      if (late) break;
      if (notice.is_due(now))
        notice.post({.rank = group.rank,
                     .call = fmt::format("call {} of {}", call.ordinal, group.name),
                     .state = "its ranks agree",
                     .ranks = ranks_missing()});
      go_on([&] { raise_if_broken(bulletin, group, call); });
      const auto passed = bulletin.passed(call.lane);
      if (passed && passed->first >= call.ordinal)
        throw Error(
            mismatch(group, call, descriptor,
                     {true, -1, "the call failed there, too long ago for more to be known", passed->second}));
    }
    const bool knows_who_came = alike.is_one_question() || last_look == now;
    if (now - started > crowd * kLookForPeers && knows_who_came) {
      const double waited = std::chrono::duration<double>(now - started).count();
      raise_if_lost(bulletin, group, call, waited, alike, reach, lost);
      reach = std::min(2 * reach, group.ranks.size());
    }
    // 100 us, doubled up to 20 ms: ranks mostly arrive together, and those that wait long must not flood the
    // store.
    sleep_for(pause);
    pause = std::min(pause * 2, crowd * std::chrono::microseconds(20000));
    all = alike.all_answered();
  }
  std::vector<int32_t> missing = ranks_missing();
  // A rank may be about to sign, or have posted another text a moment ago.
  if (missing.size() <= kFewRanks) std::erase_if(missing, has_posted);
  if (missing.empty() && (slot >= 0 || has_posted(first))) return slot;
  throw group_error(
      group, ErrorKind::DeadlineExceeded,
      fmt::format("rank {}: call {} of {}: ranks {} did not make this call within {:.1f} s (never called, "
                  "blocked elsewhere, or dead). This rank called: {}",
                  group.rank, call.ordinal, group.name, format_ranks(missing), limit_seconds, descriptor),
      {.peer = missing.empty() ? first : missing.front(),
       .op = "reshard",
       .sequence = call.ordinal,
       .phase = "agree",
       .elapsed = std::chrono::duration<double>(Clock::now() - started).count(),
       .limit = limit_seconds});
}

}  // namespace meshcast
