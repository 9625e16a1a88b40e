#include "group/meeting.h"

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstring>
#include <sstream>
#include <utility>

#include <fmt/format.h>

#include "group/bulletin.h"
#include "group/record.h"
#include "group/refusals.h"
#include "group/roll.h"

namespace meshcast {
namespace {

using std::chrono::duration;
using std::chrono::milliseconds;

constexpr auto kLookAfterPeers = milliseconds(50);  // after which ranks that meet watch each other
constexpr auto kSeenSoon = milliseconds(500);       // in which the death of a peer is noticed
constexpr auto kAskPause = milliseconds(20);        // between two looks for it

constexpr auto kCounted = milliseconds(500);  // in which a rank that has come is counted

constexpr size_t kFew = 16;  // ranks that are asked one by one

constexpr const char* kMember = "member";  // topic of what ranks bring
constexpr const char* kMembers = "members";
constexpr const char* kVerdict = "verdict";

// Verdicts, by their first word.
constexpr const char* kMet = "met";
constexpr const char* kAborted = "aborted";
constexpr const char* kDeadline = "deadline";
constexpr const char* kPeerLost = "lost";
constexpr const char* kShort = "short";      // of a resource of the process
constexpr const char* kRefused = "refused";  // by this rank, what the others meet for

int32_t number_in(const std::string& text) {
  int32_t out = -1;
  std::from_chars(text.data(), text.data() + text.size(), out);
  return out;
}

// What a rank brings: the ordinals of its next calls in a line, then its offer.
std::string encode(const Ordinals& next, const std::string& offer) {
  std::string out;
  for (const auto& [lane, ordinal] : next) out += fmt::format("{} {} ", lane, ordinal);
  return out + "\n" + offer;
}

// The offer in what a rank brought; an offer known from earlier is returned unchanged.
std::string offer_in(const std::string& text) { return text.substr(text.find('\n') + 1); }

void raise_to(Ordinals& first, const std::string& text) {
  std::istringstream head(text.substr(0, text.find('\n')));
  int32_t lane = 0;
  for (int64_t ordinal = 0; head >> lane >> ordinal;) first[lane] = std::max(first[lane], ordinal);
}

// "kind/rank/what text"; rank and what (it refused) may be missing.
struct Verdict {
  std::string kind;
  int32_t rank = -1;
  std::string what;
  std::string text;

  explicit Verdict(const std::string& encoded) {
    const size_t blank = encoded.find(' ');
    const std::string head = encoded.substr(0, blank);
    if (blank != std::string::npos) text = encoded.substr(blank + 1);
    const size_t one = head.find('/');
    kind = head.substr(0, one);
    if (one == std::string::npos) return;
    const size_t other = head.find('/', one + 1);
    rank = number_in(head.substr(one + 1, other == std::string::npos ? other : other - one - 1));
    if (other != std::string::npos) what = head.substr(other + 1);
  }

  // None if what was refused is no call.
  std::optional<RefusedCall> refused() const {
    RefusedCall out{{}, rank, text};
    char point = 0;
    if (kind == kRefused && std::istringstream(what) >> out.call.lane >> point >> out.call.ordinal) return out;
    return std::nullopt;
  }
};

class MeetingCall {
 public:
  MeetingCall(const GroupIdentity& group, Connector& connector, const std::shared_ptr<KnownOffers>& known,
              const MeetingPart& part)
      : group_(group),
        connector_(connector),
        known_(known),
        part_(part),
        watches_(known, [this](const std::string& said) {
          return joining_ ? joining_->watch(offer_in(said)) : Watch();
        }) {}

  Met run() {
    std::map<int32_t, std::string> brought;
    try {
      const GenerationKeys keys = part_.generation();
      store_ = keys.store;
      conversation_.emplace(store_, group_.rank, group_.ranks.size());
      members_.emplace(store_, kMembers, group_.ranks.size());
      join(keys.prefix);
      const auto all = gather();
      if (!all) return {nullptr, {}, refused_};
      brought = *all;
    } catch (const Error&) {
      throw;
    } catch (const std::exception& error) {
      throw failure_of(error);
    }
    return connect(brought);
  }

 private:
  void join(const std::string& prefix) {
    try {
      joining_ = connector_.join(prefix);
      brings_ = encode(part_.next(), joining_->offer());
    } catch (const MeetAgainError& error) {
      if (refuse_meeting(store_, group_.rank, std::string(), error.what()).counts) throw;
      throw Error(error);  // the others got another verdict
    }
  }

  // The texts of all ranks, once all have come.
  std::optional<std::map<int32_t, std::string>> gather() {
    const TimePoint begun = looked_ = Clock::now();
    const bool late = !conversation_->verdict(kVerdict, {}).empty();
    conversation_->say(kMember, brings_);
    // The last rank to come sees that, and posts it. The others look from time to time, since it may die before
    // it does.
    bool complete = members_->answer(group_.place());
    TimePoint asked = begun;
    BackOff pause = conversation_->back_off();
    WaitNotice notice(begun);
    for (;;) {
      const TimePoint now = Clock::now();
      if (!complete && notice.is_due(now))
        notice.post({.rank = group_.rank,
                     .call = fmt::format("a call of {}", group_.name),
                     .state = "its ranks connect",
                     .ranks = missing()});
      if (!complete && now - asked > kLookAfterPeers * conversation_->crowd()) {
        asked = now;
        complete = members_->all_answered();
      }
      std::string verdict = conversation_->verdict(kVerdict, complete ? kMet : std::string());
      if (verdict.empty())
        if (const std::string reason = reason_to_end(now - begun); !reason.empty())
          verdict = conversation_->verdict(kVerdict, reason);
      if (now - begun > kLookAfterPeers && !std::exchange(waits_, true) && part_.waits) part_.waits();
      if (verdict == kMet) return texts();
      if (!verdict.empty()) {
        if (ends_another_call(Verdict(verdict))) return std::nullopt;
        raise(Verdict(verdict), late, duration<double>(now - begun).count());
      }
      pause.sleep(part_.deadline - now);
    }
  }

  // All texts are there, unless the store has lost some.
  std::map<int32_t, std::string> texts() {
    const std::string lost = fmt::format(
        "rank {}: the rendezvous store has lost what ranks {{missing}} said as they met", group_.rank);
    return conversation_->hear(kMember, group_.ranks, std::max(part_.deadline, Clock::now() + kCounted),
                               {lost, "reshard", "connect"});
  }

  std::vector<int32_t> missing() {
    members_->refresh();
    std::vector<int32_t> out;
    for (const size_t at : members_->missing()) out.push_back(group_.ranks[at]);
    return out;
  }

  std::string reason_to_end(Clock::duration waited) {
    const double seconds = duration<double>(waited).count();
    if (const std::string why = part_.closing(); !why.empty())
      return fmt::format("{}/{} rank {}: {}", kAborted, group_.rank, group_.rank, why);
    if (Clock::now() >= part_.deadline) {
      std::vector<int32_t> missing = this->missing();
      // The last ranks have come, and are about to be counted, unless they died before that.
      if (missing.size() <= kFew)
        std::erase_if(missing,
                      [this](int32_t rank) { return conversation_->heard(kMember, rank).has_value(); });
      if (missing.empty() && Clock::now() < part_.deadline + kCounted) return {};
      return fmt::format(
          "{}/{} rank {}: ranks {} did not call within {:.1f} s; the group of ranks {} exists only once each "
          "of "
          "them made its first call. Check that every rank of both meshes makes the same calls in the same "
          "order.",
          kDeadline, missing.empty() ? group_.rank : missing.front(), group_.rank, format_ranks(missing),
          seconds, format_ranks(group_.ranks));
    }
    if (Clock::now() - looked_ <= kLookAfterPeers * conversation_->crowd()) return {};
    looked_ = Clock::now();
    if (group_.ranks.size() > kFew) members_->refresh();
    const auto lost = watches_.lost(*conversation_, kMember, group_.ranks, false,
                                    [this](size_t at) { return members_->has(at); });
    if (!lost) return {};
    return fmt::format(
        "{}/{} rank {} lost rank {} while the group of ranks {} met, after {:.1f} s: {}. Look at that rank's "
        "own output first.",
        kPeerLost, lost->rank, group_.rank, lost->rank, format_ranks(group_.ranks), seconds, lost->why);
  }

  bool ends_another_call(const Verdict& verdict) {
    if (verdict.kind != kRefused || verdict.what == part_.what) return false;
    refused_ = verdict.refused();
    return true;
  }

  // A rank that waited raises the failure itself, whichever rank found it; one that comes later (late) finds a
  // failed group.
  [[noreturn]] void raise(const Verdict& verdict, bool late, double elapsed) {
    if (verdict.kind == kShort) throw MeetAgainError(error(ErrorKind::Generic, verdict.text));
    if (verdict.kind == kRefused)
      throw MeetAgainError(error(
          ErrorKind::PlanMismatch,
          fmt::format("rank {}: rank {} refused its arguments: {}", group_.rank, verdict.rank, verdict.text),
          verdict.rank));
    const bool overdue = verdict.kind == kDeadline;
    auto kind = ErrorKind::Aborted;
    if (overdue && !late) kind = ErrorKind::DeadlineExceeded;
    if (verdict.kind == kPeerLost && !late) kind = ErrorKind::PeerLost;
    throw error(kind, verdict.text, verdict.rank, elapsed, overdue ? elapsed : -1);
  }

  Error error(ErrorKind kind, const std::string& text, int32_t peer = -1, double elapsed = -1,
              double limit = -1) const {
    return group_error(group_, kind, text,
                       {.peer = peer, .op = "connect", .phase = "connect", .elapsed = elapsed, .limit = limit});
  }

  Met connect(const std::map<int32_t, std::string>& brought) {
    Met out;
    std::map<int32_t, std::string> offers;
    for (const auto& [rank, text] : brought) {
      offers[rank] = offer_in(text);
      raise_to(out.first, text);
    }
    try {
      Bulletin board(std::make_shared<PrefixedStore>("control", store_));
      TimePoint looked = Clock::now();
      out.core = joining_->connect(offers, part_.deadline, [&]() -> std::optional<LostRank> {
        if (Clock::now() - looked < kLookAfterPeers * conversation_->crowd()) return std::nullopt;
        looked = Clock::now();
        return lost_by(board);
      });
    } catch (const Error& error) {
      tell(error);
      throw;
    } catch (const std::exception& error) {
      const Error failure = failure_of(error);
      tell(failure);
      throw Error(failure);
    }
    known_->add(offers);
    return out;
  }

  // A rank that this one, or another, reports as lost.
  std::optional<LostRank> lost_by(Bulletin& board) {
    std::optional<Cause> cause;
    try {
      cause = board.read_cause();
    } catch (const std::exception&) {
      // The store has failed: it reports no cause, and the limit holds.
    }
    if (!cause || refused_in(*cause)) {
      return watches_.lost(*conversation_, kMember, group_.ranks, false, [](size_t /*at*/) { return true; });
    }
    if (cause->kind == static_cast<int32_t>(ErrorKind::PeerLost) && cause->peer != group_.rank)
      return LostRank{cause->peer, cause->text};
    throw error(ErrorKind::Aborted, fmt::format("rank {}: {}", group_.rank, cause->text));
  }

  // Notifies the others, which have met this rank and would wait for it.
  void tell(const Error& error) {
    try {
      Bulletin(std::make_shared<PrefixedStore>("control", store_))
          .settle_cause({static_cast<int32_t>(error.kind()), group_.rank, error.context().peer, error.what()});
    } catch (const std::exception&) {
      // The store does not answer: the others wait to their limits.
    }
  }

  // The error for what the store or the system raised. The store may run in the process of a member.
  Error failure_of(const std::exception& failure) {
    if (const auto shortage = connector_.shortage(failure)) return *shortage;
    const std::string what =
        fmt::format("connecting the private group of ranks {}", format_ranks(group_.ranks));
    const std::string said(failure.what(), std::strcspn(failure.what(), "\n"));
    if (const auto lost = watches_.lost_soon(group_.ranks, group_.rank))
      return error(
          ErrorKind::PeerLost,
          fmt::format("rank {} lost rank {} in {}: {} (and the rendezvous store: {}). Look at that rank's own "
                      "output first.",
                      group_.rank, lost->rank, what, lost->why, said),
          lost->rank);
    return error(
        ErrorKind::Generic,
        fmt::format("rank {}: {}: the rendezvous store does not answer ({}). The process that has it is dead "
                    "or cut off: transfers that the ranks have agreed on continue, new ones need it",
                    group_.rank, what, said));
  }

  const GroupIdentity& group_;
  Connector& connector_;
  const std::shared_ptr<KnownOffers> known_;
  const MeetingPart& part_;
  Watches watches_;
  std::shared_ptr<BoardStore> store_;
  std::optional<Conversation> conversation_;
  std::optional<Roll> members_;
  std::unique_ptr<Joining> joining_;
  std::string brings_;
  bool waits_ = false;
  TimePoint looked_{};  // for lost ranks
  std::optional<RefusedCall> refused_;
};

}  // namespace

void KnownOffers::add(const std::map<int32_t, std::string>& offers) {
  const std::lock_guard lock(mutex_);
  for (const auto& [rank, offer] : offers) offers_[rank] = offer;
}

std::optional<std::string> KnownOffers::of(int32_t rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = offers_.find(rank);
  return found == offers_.end() ? std::nullopt : std::optional(found->second);
}

std::optional<LostRank> Watches::lost(Conversation& conversation, const std::string& topic,
                                      const std::vector<int32_t>& ranks, bool each,
                                      const std::function<bool(size_t at)>& has_come) {
  const auto own = std::find(ranks.begin(), ranks.end(), conversation.rank()) - ranks.begin();
  for (size_t i = 1; i <= ranks.size(); ++i) {
    const size_t at = (static_cast<size_t>(own) + i) % ranks.size();
    const int32_t other = ranks[at];
    if (other == conversation.rank()) continue;
    bool here = has_come && has_come(at);
    const bool asks = has_come ? here && !watch_of(other) : !each || !watch_of(other);
    const auto said = asks ? conversation.heard(topic, other) : std::nullopt;
    watch(other, said);
    if (auto found = ask(other)) return found;
    here = here || said;
    if (here && !each) return std::nullopt;
  }
  return std::nullopt;
}

std::optional<LostRank> Watches::lost_soon(const std::vector<int32_t>& ranks, int32_t rank) {
  bool watches = false;
  for (const int32_t other : ranks) {
    if (other == rank) continue;
    watch(other, std::nullopt);
    const auto found = watch_of(other);
    watches = watches || (found && *found);
  }
  for (const TimePoint end = Clock::now() + kSeenSoon; watches && Clock::now() < end; sleep_for(kAskPause))
    for (const int32_t other : ranks)
      if (auto found = ask(other)) return found;
  return std::nullopt;
}

void Watches::watch(int32_t rank, const std::optional<std::string>& said) {
  if (watch_of(rank)) return;
  const auto text = said ? said : known_->of(rank);
  if (!text) return;
  Watch made = watch_(*text);
  const std::lock_guard lock(mutex_);
  watches_.emplace(rank, std::move(made));
}

std::optional<Watch> Watches::watch_of(int32_t rank) const {
  const std::lock_guard lock(mutex_);
  const auto found = watches_.find(rank);
  return found == watches_.end() ? std::nullopt : std::optional(found->second);
}

std::optional<LostRank> Watches::ask(int32_t rank) const {
  const auto watch = watch_of(rank);
  if (!watch || !*watch) return std::nullopt;
  std::string why = (*watch)();
  if (why.empty()) return std::nullopt;
  return LostRank{rank, std::move(why)};
}

Met meet(const GroupIdentity& group, Connector& connector, const std::shared_ptr<KnownOffers>& known,
         const MeetingPart& part) {
  return MeetingCall(group, connector, known, part).run();
}

std::string meeting_for(CallId call) {
  return call.lane == kNoLane ? "prepare" : fmt::format("{}.{}", call.lane, call.ordinal);
}

RefusedMeeting refuse_meeting(const std::shared_ptr<BoardStore>& store, int32_t rank, const std::string& what,
                              const std::string& why) {
  const std::string verdict =
      what.empty() ? fmt::format("{} {}", kShort, why) : fmt::format("{}/{}/{} {}", kRefused, rank, what, why);
  const std::string found = store->compare_set(kVerdict, std::string(), verdict);
  if (found == verdict) return {true, {}};
  const Verdict other(found);
  if (what.empty() || (other.kind == kRefused && other.what != what)) return {false, other.refused()};
  return {true, {}};
}

}  // namespace meshcast
