#include "simulation/judge.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <initializer_list>
#include <map>
#include <set>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "simulation/scheduler.h"

namespace meshcast::simulation {
namespace {

using std::chrono::duration_cast;
using std::chrono::microseconds;
using std::chrono::milliseconds;

constexpr std::array<const char*, 6> kKinds{"MeshcastError",         "LayoutError",   "PlanMismatchError",
                                            "DeadlineExceededError", "PeerLostError", "AbortedError"};

// In which those who wait in a call hear that it was refused, where they have come at about the same time.
constexpr auto kSoon = milliseconds(550);
constexpr double kSurelyNoticed = 5;  // seconds: a quarter of the longest limit, a look and what ranks are told

class Judge {
 public:
  Judge(const Program& program, const Findings& found) : program_(program), found_(found) {}

  void judge() const {
    // Who waits asks ever less often, up to some 50 times a second, however many they are. Who refuses a call
    // asks each of the others for a moment.
    const auto ranks = static_cast<double>(program_.ranks);
    const double calls = static_cast<double>(program_.calls.size() + program_.sides.size() + 2) *
                         (has_refusals() ? 60.0 + 30.0 * ranks : 60.0);
    const double most =
        ranks * (calls + 110.0 * duration_cast<std::chrono::duration<double>>(found_.ended).count());
    if (static_cast<double>(found_.requests) > most)
      throw Violation(fmt::format("{} requests to the store, where {:.0f} would do", found_.requests, most));
    // What ranks brought to their meeting, and agreements that nobody has come after to clear away.
    if (program_.faults.empty() && !differs_up_to(program_.calls.size() - 1) &&
        !late_up_to(program_.calls.size() - 1) &&
        found_.keys > (3 * static_cast<size_t>(program_.ranks) + 4) *
                          (1 + program_.sides.size() + program_.again + 2 * program_.wing.is_there))
      throw Violation(fmt::format("{} keys are left in the store", found_.keys));
    if (program_.faults.empty() && found_.meetings > 0)
      throw Violation("the store says that a rank waits for others to meet, and none does");
    const size_t last = program_.calls.size() - 1;
    for (int rank = 0; rank < program_.ranks; ++rank) {
      for (size_t call = 0; call <= last; ++call) {
        const Ending& each = found_.endings[static_cast<size_t>(rank)][call];
        const auto wrong = [&](const std::string& why) {
          throw Violation(fmt::format("rank {}, call {}: {}: {}", rank, call, why, each.text));
        };
        const Act::Kind own = program_.calls[call].acts[static_cast<size_t>(rank)].kind;
        if (program_.faults.empty() && !differs_up_to(call) && !late_up_to(call) && !each.done)
          wrong("a call that nothing kept from being made was not made");
        const bool must_go_on = goes_on() || (call == last && last_goes_on());
        if (must_go_on && (!each.done || (each.error && !differs(call)))) wrong("the group did not go on");
        if (!each.done || is_hurt(rank)) continue;
        if (!each.error) {
          if (own != Act::Kind::Calls) wrong(fmt::format("a call that {} succeeded", name_of(own)));
          continue;
        }
        if (refuses(own)) {
          if (*each.error == ErrorKind::Layout) continue;
        }
        if (const std::string why = unexplained(rank, call, each); !why.empty()) wrong(why);
      }
    }
    judge_culprits();
    judge_interrupt();
    judge_notices();
    judge_meeting();
    judge_news();
    for (int rank = 0; rank < program_.ranks; ++rank)
      for (size_t i = 0; i < found_.beside.front().size(); ++i) judge_beside(rank, i);
  }

 private:
  static bool refuses(Act::Kind kind) {
    return kind == Act::Kind::Refuses || kind == Act::Kind::RefusesToStart || kind == Act::Kind::RefusesUnread;
  }
  bool is_hurt(int rank) const {  // its time stood still, or ended
    return std::any_of(program_.faults.begin(), program_.faults.end(), [&](const Fault& fault) {
      return fault.rank == rank && (fault.kind == Fault::Kind::Kill || fault.kind == Fault::Kind::Freeze);
    });
  }
  bool has(std::initializer_list<Fault::Kind> kinds) const {
    return std::any_of(program_.faults.begin(), program_.faults.end(), [&](const Fault& fault) {
      return std::find(kinds.begin(), kinds.end(), fault.kind) != kinds.end();
    });
  }
  bool store_is_hurt() const {
    return has(
        {Fault::Kind::StoreSlow, Fault::Kind::StoreFrozen, Fault::Kind::StoreDead, Fault::Kind::StoreEmptied});
  }

  // Which ranks of a call do not do what the others do.
  bool differs(size_t call) const {
    const auto& acts = program_.calls[call].acts;
    return std::any_of(acts.begin(), acts.end(), [](const Act& act) { return act.kind != Act::Kind::Calls; });
  }
  bool differs_up_to(size_t call) const {
    for (size_t i = 0; i <= call; ++i)
      if (differs(i)) return true;
    return false;
  }
  bool rank_differs_up_to(size_t call, int32_t rank) const {
    for (size_t i = 0; i <= call; ++i)
      if (program_.calls[i].acts[static_cast<size_t>(rank)].kind != Act::Kind::Calls) return true;
    return false;
  }
  bool late_up_to(size_t call) const {
    const bool patient = std::all_of(program_.calls.begin(), program_.calls.end(),
                                     [](const Call& each) { return each.limit >= kLongLimit; });
    const double some = patient ? 1.0 : 0.2;  // seconds that matter to no limit
    for (size_t i = 0; i <= call; ++i)
      for (const Act& act : program_.calls[i].acts)
        if (act.kind == Act::Kind::NeverComes || 1e-6 * static_cast<double>(act.late) > some) return true;
    return false;
  }

  // A call in another lane, a backward, or that of the second group.
  void judge_beside(int rank, size_t index) const {
    const Ending& each = found_.beside[static_cast<size_t>(rank)][index];
    const size_t last = program_.calls.size() - 1;
    const bool differ = differs_up_to(last);
    const bool calm = program_.faults.empty() && !differ && !late_up_to(last);
    const auto wrong = [&](const std::string& why) {
      throw Violation(fmt::format("rank {}, call {} beside: {}: {}", rank, index, why, each.text));
    };
    const size_t wing_place = program_.sides.size() + program_.calls.size();
    const bool wing = index == wing_place;
    const bool second = index == wing_place + 1;
    bool is_drawn = index < program_.sides.size() || program_.backwards;
    if (wing) is_drawn = program_.wing.is_there && rank < Wing::kRanks;
    if (second) is_drawn = program_.again;
    // What befell the first group is nothing to the second, unless it lasts. The wing comes before all calls.
    const bool must =
        calm || (second && !has_lasting_faults() && !is_hurt_any()) || (wing && program_.faults.empty());
    if (is_drawn && must && (!each.done || each.error)) wrong("nothing kept it from its end");
    if (!each.done || !each.error || is_hurt(rank)) return;
    switch (*each.error) {
      case ErrorKind::PlanMismatch:
        if (!differ || second || wing) wrong("no rank called with other arguments");
        break;
      case ErrorKind::PeerLost:
        if (!may_be_lost(each.peer, each.at)) wrong(fmt::format("rank {} was not lost", each.peer));
        break;
      case ErrorKind::Generic:
        if (!store_is_hurt()) wrong("the store was well");
        break;
      case ErrorKind::Layout: wrong("its arguments were right");
      case ErrorKind::Aborted:
      case ErrorKind::DeadlineExceeded: break;
    }
  }
  bool has_lasting_faults() const {
    return has({Fault::Kind::Kill, Fault::Kind::Cut, Fault::Kind::CutUnseen, Fault::Kind::HalfOpen,
                Fault::Kind::StoreDead, Fault::Kind::StoreFrozen, Fault::Kind::StoreEmptied});
  }
  bool is_hurt_any() const { return has({Fault::Kind::Freeze}); }

  // Where calls are refused, and nothing else happens, those who wait in one hear of that soon.
  void judge_news() const {
    if (!program_.faults.empty() || !program_.sides.empty() || !all_wait() || !program_.joined) return;
    for (size_t call = 0; call < program_.calls.size(); ++call) {
      const auto& acts = program_.calls[call].acts;
      Clock::duration refused = Clock::duration::max();
      for (size_t rank = 0; rank < acts.size(); ++rank) {
        if (1e-6 * static_cast<double>(acts[rank].late) > 0.2) return;
        if (refuses(acts[rank].kind)) refused = std::min(refused, found_.endings[rank][call].begun);
      }
      if (refused == Clock::duration::max()) continue;
      for (size_t rank = 0; rank < acts.size(); ++rank) {
        const Ending& each = found_.endings[rank][call];
        if (!refuses(acts[rank].kind) && each.error && each.at > std::max(each.begun, refused) + kSoon)
          throw Violation("a call that was refused was waited in for long: " + each.text);
      }
    }
  }

  // The ranks come together for the first call, or none of them does.
  void judge_meeting() const {
    if (has_refusals() || has({Fault::Kind::StoreEmptied})) return;
    const Ending* met = nullptr;
    const Ending* failed = nullptr;
    for (const auto& its : found_.endings) {
      const Ending& first = its.front();
      if (!first.done) continue;
      const bool connects = first.text.find("ranks did not connect") != std::string::npos;
      if (!first.error || connects) met = &first;
      if (first.error && is_meeting(first)) failed = &first;
    }
    if (met && failed) throw Violation("one rank has met the others, and one has not: " + failed->text);
  }

  // Why nothing that was drawn explains an error; "" where something does.
  std::string unexplained(int rank, size_t call, const Ending& each) const {
    const size_t last = program_.calls.size() - 1;
    const bool faults = !program_.faults.empty();
    const bool late = late_up_to(last);
    // A command that does not end by itself looks like this to who waits for it.
    if (!store_is_hurt() && !has({Fault::Kind::Freeze}) &&
        each.text.find("could not begin within its limit: the rendezvous store") != std::string::npos)
      return "the store was well";
    switch (*each.error) {
      case ErrorKind::PlanMismatch:
        // Where a later call ends the group, that is what is named.
        if (!differs_up_to(last)) return "no rank called with other arguments";
        if (each.text.find("refused its arguments") != std::string::npos &&
            !refused_up_to(is_own(each, call) ? call : last))
          return "no rank had refused this call or one before it";
        if (!faults && !late && each.ran > 0 && names_later(each, call) && !has_other_arguments())
          return "it was under way, and only a later call was refused";
        // In another call it cannot know which of the two is the one that differs.
        if (each.peer >= 0 && is_own(each, call) && !rank_differs_up_to(last, each.peer) &&
            !rank_differs_up_to(last, rank))
          return fmt::format("neither rank {} nor this one called with other arguments", each.peer);
        return {};
      case ErrorKind::DeadlineExceeded:
        // After a refusal ranks meet again as they come to their next call. One that ended this call before it
        // heard of that may have none left. One that died before it came was never seen.
        if (is_meeting(each) && is_hurt(each.peer)) return {};
        if ((is_meeting(each) || is_queued(each)) && !program_.joined &&
            (anybody_succeeded(call) || has_refusals()))
          return {};
        if (!faults && !late) {
          if (!differs_up_to(call)) return "nothing kept a rank from its limit";
          // A rank to which its kind is known, and that has nothing to move, does not stand still in it. Once a
          // later call is refused, nobody compares any longer.
          if (program_.calls[call].limit > 4 && is_own(each, call) && !anybody_succeeded_unlike(call) &&
              !has_refusals())
            return "all ranks are there, and would have said that they differ";
          const bool only_refusals = !has_act({Act::Kind::OtherArguments, Act::Kind::NeverComes});
          if (only_refusals && program_.calls[call].limit > 3)
            return "all ranks came to it, and one refused it";
        }
        if (seen_dead_during(each)) return "a rank had been lost long before";
        if (waited_too(call, each)) return fmt::format("rank {} waited in it, too", each.peer);
        return {};
      case ErrorKind::PeerLost:
        if (!may_be_lost(each.peer, each.at)) return fmt::format("rank {} was not lost", each.peer);
        if (!faults && !late && !has_other_arguments())
          return "a rank left because of a refusal, and had said so";
        return {};
      case ErrorKind::Aborted: return !faults && !late && !differs_up_to(last) ? "nobody aborted" : "";
      case ErrorKind::Generic: return store_is_hurt() ? "" : "the store was well";
      case ErrorKind::Layout: return "its arguments were right";
    }
    return "it has no kind";
  }

  static bool is_meeting(const Ending& each) {
    return each.text.find("did not call within") != std::string::npos;
  }
  // Whether it tells of the limit of that call, and not of another with which the group failed.
  static bool is_own(const Ending& each, size_t call) {
    return each.text.find(fmt::format("call {} of", call)) != std::string::npos;
  }
  bool names_later(const Ending& each, size_t call) const {
    for (size_t later = call + 1; later < program_.calls.size(); ++later)
      if (is_own(each, later)) return !is_own(each, call);
    return false;
  }
  static bool is_queued(const Ending& each) { return each.text.find("was still queued") != std::string::npos; }
  bool anybody_succeeded(size_t call) const {
    return std::any_of(found_.endings.begin(), found_.endings.end(),
                       [&](const auto& its) { return its[call].done && !its[call].error; });
  }

  // Whether one rank died, which is all that happened, and that was seen well before the call ended.
  bool seen_dead_during(const Ending& each) const {
    if (!program_.tells || program_.faults.size() != 1 || program_.faults[0].kind != Fault::Kind::Kill)
      return false;
    if (differs_up_to(program_.calls.size() - 1) || late_up_to(program_.calls.size() - 1)) return false;
    const Fault& fault = program_.faults[0];
    if (found_.joined.count(fault.rank) == 0) return false;  // it died before it came
    const auto seen = std::max<Clock::duration>(each.begun, microseconds(fault.at + fault.lasts));
    return each.at > seen + milliseconds(1500);
  }

  // Whether an error names a rank as not in the call that had been in it for long, and had told so.
  // The text does not say the lane: where others have calls of that number too, it may be of one of them.
  bool waited_too(size_t call, const Ending& each) const {
    if (call < most_in_a_lane_beside()) return false;
    if (each.text.find(fmt::format("reshard call {} of", call)) == std::string::npos) return false;
    if (each.text.find("do not wait in it") == std::string::npos || store_is_hurt()) return false;
    if (program_.faults.size() > 1 || is_hurt(each.peer)) return false;
    const Ending& its = found_.endings[static_cast<size_t>(each.peer)][call];
    return its.done && its.error && its.ran > 3 && its.at + milliseconds(500) > each.at;
  }

  // Calls, and agreements before them, one for each plan.
  size_t most_in_a_lane_beside() const {
    std::map<int32_t, size_t> counts;
    std::set<std::pair<int32_t, int>> agreed;
    for (const Side& side : program_.sides)
      counts[side.lane] += agreed.emplace(side.lane, side.plan).second ? 2 : 1;
    size_t most = 0;
    for (const auto& [lane, count] : counts) most = std::max(most, count);
    return most;
  }

  bool refused_up_to(size_t call) const {
    for (size_t i = 0; i <= call; ++i)
      for (const Act& act : program_.calls[i].acts)
        if (refuses(act.kind)) return true;
    return false;
  }

  // Whether all that happens is that ranks refuse calls, and wait for each before they make the next: then all
  // other calls succeed, over as many generations as that takes. Ranks that do not need the one that refused a
  // call may be done with the next before they hear of it.
  bool goes_on() const {
    if (!program_.faults.empty() || !all_wait() || late_up_to(program_.calls.size() - 1)) return false;
    if (!program_.sides.empty()) return false;  // calls of other lanes that are in flight end with a generation
    if (has_act({Act::Kind::OtherArguments, Act::Kind::NeverComes})) return false;
    return program_.joined;
  }
  // The same of the last call alone where ranks do not wait: those before it may be in flight when another is
  // refused.
  bool last_goes_on() const {
    return program_.joined && program_.sides.empty() && program_.faults.empty() &&
           !late_up_to(program_.calls.size() - 1);
  }
  // With one fault, and a store that tells all ranks the first cause, they name one culprit.
  void judge_culprits() const {
    if (program_.faults.size() != 1 || store_is_hurt() || has({Fault::Kind::Freeze})) return;
    if (differs_up_to(program_.calls.size() - 1) || late_up_to(program_.calls.size() - 1)) return;
    std::set<int32_t> culprits;
    std::string texts;
    for (int rank = 0; rank < program_.ranks; ++rank) {
      if (is_hurt(rank)) continue;
      for (const Ending& each : found_.endings[static_cast<size_t>(rank)]) {
        if (!each.done || each.error != ErrorKind::PeerLost) continue;
        culprits.insert(each.peer);
        texts += "\n  " + each.text;
        break;  // what comes later is that the group has ended
      }
    }
    if (culprits.size() > 1) throw Violation("ranks name different culprits:" + texts);
  }

  // Where a rank was interrupted, which is all that happened, nobody waits for it any longer.
  void judge_interrupt() const {
    if (program_.faults.size() != 1 || found_.interrupted.empty()) return;
    if (differs_up_to(program_.calls.size() - 1) || late_up_to(program_.calls.size() - 1)) return;
    const auto& [interrupted, when] = *found_.interrupted.begin();
    if (!found_.endings[static_cast<size_t>(interrupted)].front().done) return;  // it has not come to any call
    for (const auto& its : found_.endings)
      for (const Ending& each : its)
        if (each.done && each.error && each.at > std::max(each.begun, when) + milliseconds(1500))
          throw Violation(fmt::format("rank {} was interrupted at {:.3f} s, and others wait for it: {}",
                                      interrupted, duration_cast<std::chrono::duration<double>>(when).count(),
                                      each.text));
  }

  // A rank that waits for long says so, and never names itself. It names the rank that its error names later,
  // unless that one was in the call by then and failed while the ranks waited for others.
  void judge_notices() const {
    for (const Noticed& each : found_.noticed)
      if (std::find(each.wait.ranks.begin(), each.wait.ranks.end(), each.wait.rank) != each.wait.ranks.end() ||
          each.wait.seconds < kLongWait)
        throw Violation(fmt::format("rank {} noticed after {} s that it waits for itself, or too early: {}",
                                    each.wait.rank, each.wait.seconds, each.wait.call));
    // Who knows of a refused call no longer looks who is in the calls before it.
    if (!program_.faults.empty() || !all_wait() || !program_.sides.empty() || has_refusals()) return;
    for (int rank = 0; rank < program_.ranks; ++rank) {
      const auto& its = found_.endings[static_cast<size_t>(rank)];
      for (size_t call = 0; call < its.size(); ++call) {
        const Ending& each = its[call];
        const double took = std::chrono::duration<double>(each.at - each.begun).count();
        if (each.error != ErrorKind::DeadlineExceeded || took < kSurelyNoticed) continue;
        const bool noticed =
            std::any_of(found_.noticed.begin(), found_.noticed.end(), [&](const Noticed& notice) {
              const auto& ranks = notice.wait.ranks;
              return notice.wait.rank == rank && notice.at >= each.begun && notice.at <= each.at &&
                     (each.peer < 0 || was_in(each.peer, call, notice.at) ||
                      std::find(ranks.begin(), ranks.end(), each.peer) != ranks.end());
            });
        if (!noticed)
          throw Violation(fmt::format("rank {} did not notice how long it waits: {}", rank, each.text));
      }
    }
  }

  bool was_in(int rank, size_t call, Clock::duration at) const {
    const auto& its = found_.endings[static_cast<size_t>(rank)];
    return call < its.size() && its[call].begun <= at;
  }

  // In a call in which ranks differ, up to this one.
  bool anybody_succeeded_unlike(size_t call) const {
    for (size_t i = 0; i <= call; ++i)
      for (const auto& its : found_.endings)
        if (differs(i) && its[i].done && !its[i].error) return true;
    return false;
  }
  bool has_act(std::initializer_list<Act::Kind> kinds) const {
    for (const Call& call : program_.calls)
      for (const Act& act : call.acts)
        if (std::find(kinds.begin(), kinds.end(), act.kind) != kinds.end()) return true;
    return false;
  }
  bool all_wait() const {
    return std::all_of(program_.calls.begin(), program_.calls.end(), [](const Call& call) {
      return std::all_of(call.acts.begin(), call.acts.end(), [](const Act& act) { return act.waits; });
    });
  }
  bool has_other_arguments() const { return has_act({Act::Kind::OtherArguments}); }
  bool has_refusals() const {
    return has_act({Act::Kind::Refuses, Act::Kind::RefusesToStart, Act::Kind::RefusesUnread});
  }

  bool may_be_lost(int32_t peer, Clock::duration when) const {
    if (peer < 0) return false;
    // A rank whose call failed may have left its group by then.
    auto its = found_.endings[static_cast<size_t>(peer)];
    const auto& beside = found_.beside[static_cast<size_t>(peer)];
    its.insert(its.end(), beside.begin(), beside.end());
    const auto left = found_.left_at.find(peer);
    const bool has_left = left != found_.left_at.end() && left->second <= when;
    for (const Ending& each : its)
      if (each.error && has_left) return true;
    // Over a network that tells nothing, the end of a rank's group looks like its death to who sees it before
    // the board says why, and without a store to all.
    for (const Ending& each : its)
      if (each.error && !program_.tells && each.at <= when && when < each.at + milliseconds(500)) return true;
    if (store_is_hurt() && !program_.tells) return true;
    return std::any_of(program_.faults.begin(), program_.faults.end(), [&](const Fault& fault) {
      switch (fault.kind) {
        case Fault::Kind::Kill:
        case Fault::Kind::Close:
        case Fault::Kind::Abort:
        case Fault::Kind::Interrupt:
        case Fault::Kind::Freeze: return fault.rank == peer;
        case Fault::Kind::Cut:
        case Fault::Kind::HalfOpen:
        case Fault::Kind::CutUnseen: return fault.rank == peer || fault.other == peer;
        default: return false;
      }
    });
  }

  const Program& program_;
  const Findings& found_;
};

}  // namespace

std::string text_of(const Ending& each) {
  if (!each.done) return "not made";
  return each.error ? kKinds[static_cast<size_t>(*each.error)] : "success";
}

std::string line_of(int rank, size_t call, const Ending& each) {
  if (!each.done) return fmt::format("rank {}, call {}: not made", rank, call);
  const auto seconds = [](Clock::duration time) { return std::chrono::duration<double>(time).count(); };
  return fmt::format("rank {}, call {}: {:.6f} to {:.6f} s: {}{}", rank, call, seconds(each.begun),
                     seconds(each.at), text_of(each), each.error ? ": " + each.text : "");
}

void judge(const Program& program, const Findings& found) { Judge(program, found).judge(); }

}  // namespace meshcast::simulation
