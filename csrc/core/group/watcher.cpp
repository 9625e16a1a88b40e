#include "group/watcher.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

#include "common/descriptors.h"
#include "common/sync.h"
#include "group/record.h"

namespace meshcast {
namespace {

using std::chrono::milliseconds;
using Seconds = std::chrono::duration<double>;

// Between looks at the bulletin; longer for many ranks, since they share the store. So one store answers up to
// some 700 looks a second, and one rank asks at most twice a second for a call that takes long.
constexpr auto kLook = milliseconds(200);
constexpr auto kLongestLook = milliseconds(800);
constexpr auto kLookOfRank = std::chrono::microseconds(1600);
constexpr auto kStall = milliseconds(2000);        // a call this old, or a quarter of its limit, posts itself
constexpr auto kRefusalTold = milliseconds(1000);  // by then all ranks know the decision on a refusal
// Calls of other lanes have no order with a refused one. A rank that has finished them may have left.
constexpr auto kOtherLanes = milliseconds(500);
constexpr auto kBackwards = milliseconds(5000);  // the same for backwards, if the refused call is a forward
constexpr auto kLeavePause = milliseconds(1);
constexpr auto kStoreGrace = Reporters::kStoreGrace;  // after it, ticks decide alone
constexpr auto kPostingGeneration = std::chrono::seconds(60);
constexpr auto kPinGrace = milliseconds(2000);  // within which an aborted request frees its memory

double limit_of(const RunState& run) { return Seconds(run.deadline() - run.started()).count(); }

TimePoint stall_time(const RunState& run) {
  const auto quarter = (run.deadline() - run.started()) / 4;
  return run.started() + std::min<Clock::duration>(kStall, quarter);
}

// gloo always names a peer as "[127.0.0.1]:4711".
std::string address_in(const std::string& text) {
  const size_t begin = text.find('[');
  const size_t close = text.find("]:", begin == std::string::npos ? 0 : begin);
  if (begin == std::string::npos || close == std::string::npos) return "";
  const size_t end = text.find_first_not_of("0123456789", close + 2);
  return text.substr(begin, end == std::string::npos ? end : end - begin);
}

}  // namespace

Watcher::Watcher(Watched& engine, GroupIdentity group, const std::shared_ptr<Store>& store)
    : engine_(engine),
      group_(std::move(group)),
      bulletin_(store),
      connection_(bulletin_.connection()),
      pause_(std::clamp<Clock::duration>(kLookOfRank * static_cast<int64_t>(group_.ranks.size()), kLook,
                                         kLongestLook)),
      work_(WorkThread::of_process()),
      reporters_(Reporters::of_process()) {
  work_->add(*this);
}

Watcher::~Watcher() { stop(); }

Watcher::Local::Local() = default;

Watcher::Local::Local(const RunState& run)
    : elapsed(run.seconds()),
      limit(limit_of(run)),
      bytes_done(run.received_bytes()),
      bytes_expected(run.expected_bytes()),
      op(run.label().op()),
      ordinal(run.label().ordinal) {}

void Watcher::stop() {
  if (!std::exchange(watched_, false) || work_->forked()) return;
  work_->remove(*this);
  // Posted before this rank's connections close: else the others would find them broken and name this rank.
  const TimePoint limit = Clock::now() + kStoreGrace;
  std::unique_lock lock(mutex_);
  unheard_ = false;
  if (local_ && !published_ && !reporters_->held_up(connection_) && want_report())
    told_.wait_until(lock, limit, [this] { return published_ || unheard_; });
  lock.unlock();
  reporters_->drop(*this);
  engine_use_.close();
}

bool Watcher::want_report() {
  Reporting* const self = this;
  return reporters_->want({shared_from_this(), self});
}

bool Watcher::store_failed() {
  const std::lock_guard lock(mutex_);
  return unheard_;
}

void Watcher::wake() { work_->wake(false); }

Cause Watcher::describe_overdue(const RunState& run, const std::string& more) const {
  const RunLabel& label = run.label();
  return {static_cast<int32_t>(ErrorKind::DeadlineExceeded), group_.rank, -1,
          fmt::format(
              "{} call {} of {} exceeded its limit of {:.1f} s in phase transfer, {} of {} bytes received{}",
              label.op(), label.ordinal, group_.name, limit_of(run), run.received_bytes(), run.expected_bytes(),
              more)};
}

Cause Watcher::describe_transport_error(int32_t peer, const TransportError& error, const RunState& run) const {
  const int32_t peer_rank = group_.ranks[static_cast<size_t>(peer)];
  const RunLabel& label = run.label();
  if (error.cause() == TransportError::Cause::Memory) {  // the peer has done nothing
    return {static_cast<int32_t>(ErrorKind::Generic), group_.rank, -1,
            fmt::format("{} call {} of {}: rank {} has {} with rank {}. Move less at a time, or give its "
                        "process more",
                        label.op(), label.ordinal, group_.name, group_.rank, error.what(), peer_rank)};
  }
  if (out_of_descriptors()) {  // the peer has done nothing
    return {static_cast<int32_t>(ErrorKind::Generic), group_.rank, -1,
            fmt::format("{} call {} of {}: no connection with rank {}: {} ({})", label.op(), label.ordinal,
                        group_.name, peer_rank, kOutOfDescriptors, error.what())};
  }
  const auto kind =
      error.cause() == TransportError::Cause::Timeout ? ErrorKind::DeadlineExceeded : ErrorKind::PeerLost;
  return {static_cast<int32_t>(kind), group_.rank, peer_rank,
          fmt::format(
              "{} call {} of {}: rank {} lost rank {} in phase transfer after {:.2f} s of {:.1f} s, {} of {} "
              "bytes received there: {}. Look at that rank's own output first.",
              label.op(), label.ordinal, group_.name, group_.rank, peer_rank, run.seconds(), limit_of(run),
              run.received_bytes(), run.expected_bytes(), error.what())};
}

void Watcher::note_local(Cause cause, const RunState* run, bool known) {
  {
    const std::lock_guard lock(mutex_);
    if (local_) return;
    local_.emplace();
    if (run) *local_ = Local(*run);
    local_->cause = std::move(cause);
    local_->seen = Clock::now();
    published_ = known;
  }
  // If no thread is available, ticks end the runs.
  if (!known) want_report();
  work_->wake(true);
}

void Watcher::transport_failed(int32_t peer, const TransportError& error, const RunState& run) {
  if (failed()) return;  // an echo of our own abort
  if (knows_refusal_) {
    {
      const std::lock_guard lock(mutex_);
      hopeless_ = true;
    }
    return end_if_refused();
  }
  {
    const std::lock_guard lock(mutex_);
    if (!broken_) broken_ = CallId{run.label().lane, run.label().ordinal};
  }
  note_local(error.told().empty() ? describe_transport_error(peer, error, run) : decode_cause(error.told()),
             &run);
}

void Watcher::run_failed(const Error& error, const RunState& run) {
  if (failed()) return;
  std::string text = error.what();
  const std::string me = fmt::format("rank {}: ", group_.rank);  // which give_up() adds
  if (text.starts_with(me)) text.erase(0, me.size());
  note_local({static_cast<int32_t>(error.kind()), group_.rank, error.context().peer, std::move(text)}, &run);
}

void Watcher::abort(const std::string& reason) {
  const Cause cause{static_cast<int32_t>(ErrorKind::Aborted), group_.rank, -1, reason};
  note_local(cause, nullptr);
  give_up(cause);
}

void Watcher::adopt(const Cause& cause) {
  if (failed()) return;
  note_local(cause, nullptr);
  give_up(cause);
}

// Numbers (elapsed, bytes) come from what this rank saw; kind and text from the first cause, perhaps another
// rank's.
void Watcher::give_up(const Cause& given) {
  Local local;
  Cause cause;
  {
    const std::lock_guard lock(mutex_);
    if (local_) local = *local_;
    if (!first_ || (knows_refusal_ && !refused_in(given))) first_ = given;
    cause = *first_;
    const auto refused = refused_in(cause);
    if (refused && !knows_refusal_) refusal_seen_ = Clock::now();
    if (refused && broken_ && meshcast::goes_before(*broken_, refused->call)) hopeless_ = true;
    knows_refusal_ = refused.has_value();
  }
  if (knows_refusal_) return end_if_refused();
  end_with(cause, error_of_cause(cause, local));
}

// For two ranks that called differently: the one that differs from this rank. If this rank is in another call,
// it cannot know, and names the one that came later, from which most others differ.
int32_t Watcher::peer_of(const Cause& cause) {
  const int32_t told = peer_in(cause, group_.rank);
  const std::string reported = fmt::format("\n  rank {}: ", cause.reporter);
  if (cause.kind != static_cast<int32_t>(ErrorKind::PlanMismatch) || cause.reporter == group_.rank) return told;
  if (cause.text.find(reported) == std::string::npos) return told;
  const Entered inside(engine_use_);
  const Runs runs = inside ? engine_.in_flight() : Runs();
  const bool called_alike =
      runs.empty() || std::any_of(runs.begin(), runs.end(), [&](const auto& run) {
        return cause.text.find(reported + run->label().descriptor() + "\n") != std::string::npos;
      });
  return called_alike ? told : cause.reporter;
}

Error Watcher::error_of_cause(const Cause& cause, const Local& local) {
  const bool known = cause.kind >= 0 && cause.kind <= static_cast<int32_t>(ErrorKind::Aborted);
  const auto kind =
      known ? static_cast<ErrorKind>(cause.kind) : ErrorKind::Aborted;  // the text came from the store
  const std::string text =
      cause.reporter == group_.rank || cause.reporter < 0
          ? fmt::format("rank {}: {}", group_.rank, cause.text)
          : fmt::format("rank {}: {} (first seen by rank {})", group_.rank, cause.text, cause.reporter);
  ErrorContext context;
  context.rank = group_.rank;
  context.peer = peer_of(cause);
  context.op = local.op;
  context.sequence = local.ordinal;
  context.phase = "transfer";
  context.elapsed = local.elapsed;
  context.limit = local.limit;
  if (kind == ErrorKind::PeerLost) {
    context.bytes_done = local.bytes_done;
    context.bytes_expected = local.bytes_expected;
    context.address = address_in(cause.text);
  }
  return {kind, text, context};
}

void Watcher::end_with(const Cause& cause, const Error& error) {
  const Entered inside(engine_use_);
  if (!inside) return;
  engine_.leave_because(cause);
  engine_.fail(std::make_exception_ptr(error));
}

bool Watcher::goes_before(CallId call) {
  const std::lock_guard lock(mutex_);
  const auto refused = first_ ? refused_in(*first_) : std::nullopt;
  return !refused || meshcast::goes_before(call, refused->call);
}

bool Watcher::leave(TimePoint limit) {
  {
    const std::lock_guard lock(mutex_);
    leaves_ = true;
  }
  for (;; sleep_for(kLeavePause)) {
    end_if_refused();
    if (failed() || !knows_refusal_) return true;
    if (Clock::now() >= limit) return false;
  }
}

void Watcher::leave_with(CallId call, TimePoint deadline, double limit) {
  if (leave(deadline)) return;
  const auto refused = this->refused();
  const std::string why =
      refused ? fmt::format("rank {} refused call {}, and calls before that one have not ended yet",
                            refused->rank, refused->call.ordinal)
              : "the group has not ended yet";
  throw group_error(group_, ErrorKind::DeadlineExceeded,
                    fmt::format("rank {}: call {} of {} could not begin within its limit of {:.1f} s: {}",
                                group_.rank, call.ordinal, group_.name, limit, why),
                    {.op = "reshard", .sequence = call.ordinal, .phase = "start", .limit = limit});
}

// The error of a call that came before a refused one and still ends with it.
Error Watcher::error_before(const RunState& run, const RefusedCall& refused) {
  const Local local(run);
  if (Clock::now() >= run.deadline()) return error_of_cause(describe_overdue(run, ""), local);
  const Cause cause{
      static_cast<int32_t>(ErrorKind::Aborted), group_.rank, refused.rank,
      fmt::format("{} call {} of {} had not ended when the group did: rank {} refused call {}: {}", local.op,
                  local.ordinal, group_.name, refused.rank, refused.call.ordinal, refused.text)};
  return error_of_cause(cause, local);
}

void Watcher::end_if_refused() {
  bool ends = false;
  bool hopeless = false;
  bool waits = false;  // for an earlier call
  bool late = false;   // a call has reached its limit, which none may exceed
  Runs before;
  TimePoint seen;
  Cause cause;
  std::optional<RefusedCall> earlier;
  {
    const std::lock_guard lock(mutex_);
    if (!first_ || !knows_refusal_) return;
    cause = *first_;
    earlier = earlier_;
    hopeless = hopeless_;
    ends = leaves_ || hopeless;
    seen = refusal_seen_;
  }
  const auto refused = refused_in(cause);
  if (!refused) return;
  {
    const Entered inside(engine_use_);
    if (!inside || failed()) return;
    const TimePoint now = Clock::now();
    for (const auto& run : engine_.in_flight()) {
      const CallId call{run->label().lane, run->label().ordinal};
      const bool is_before = meshcast::goes_before(call, refused->call);
      late = late || now >= run->deadline();
      if (!is_before && call.lane == refused->call.lane) {
        ends = true;
        continue;
      }
      if (is_before) before.push_back(run);
      if (is_before && earlier && call.lane == earlier->call.lane && call.ordinal >= earlier->call.ordinal) {
        ends = true;
        continue;
      }
      const TimePoint limit = call.lane == refused->call.lane ? run->deadline()
                              : is_before                     ? seen + kBackwards
                                                              : seen + kOtherLanes;
      if (now >= std::min(run->deadline(), limit)) {
        ends = true;
      } else {
        waits = true;
      }
    }
  }
  if (!late && (!ends || (waits && !hopeless))) return;
  for (const auto& run : before) {
    const bool is_earlier =
        earlier && run->label().lane == earlier->call.lane && run->label().ordinal == earlier->call.ordinal;
    run->fail(std::make_exception_ptr(is_earlier ? error_of(*earlier, group_)
                                                 : error_before(*run, earlier ? *earlier : *refused)));
  }
  end_with(cause, error_of(*refused, group_));
}

std::optional<RefusedCall> Watcher::refused() {
  const std::lock_guard lock(mutex_);
  return first_ ? refused_in(*first_) : std::nullopt;
}

void Watcher::report() {
  std::optional<Local> local;
  {
    const std::lock_guard lock(mutex_);
    if (published_ && !knows_refusal_) return;
    if (!published_) local = local_;
  }
  reporting_ = true;
  try {
    if (local)
      publish(*local);
    else if (knows_refusal_)
      look_for_earlier_refusals();
    else
      look();
  } catch (const Error& error) {
    // A mismatch of descriptors; every rank that compares them finds the same.
    const Cause cause{static_cast<int32_t>(error.kind()), group_.rank, error.context().peer, error.what()};
    note_local(cause, nullptr);
    give_up(cause);
  } catch (const std::exception&) {
    // The store has failed. Ticks end the runs at once, or at their deadline, with what this rank knows.
    {
      const std::lock_guard lock(mutex_);
      unheard_ = true;
      told_.notify_all();
    }
    if (local) work_->wake(true);
  }
  reporting_ = false;
}

// A lost connection may be the echo of another rank's abort: the first posted cause is right.
void Watcher::publish(const Local& local) {
  const Cause first = bulletin_.settle_cause(local.cause);
  {
    const std::lock_guard lock(mutex_);
    published_ = true;
    told_.notify_all();
  }
  give_up(first);
}

Watcher::Runs Watcher::old_runs() {
  const Entered inside(engine_use_);
  if (!inside || failed()) return {};
  const TimePoint now = Clock::now();
  Runs runs = engine_.in_flight();
  std::erase_if(runs, [&](const auto& run) { return now - run->started() < pause_ && now < run->deadline(); });
  return runs;
}

void Watcher::look() {
  const Runs runs = old_runs();
  if (runs.empty()) return;
  if (const auto cause = bulletin_.read_cause()) {
    note_local(*cause, runs.front().get(), true);
    give_up(*cause);
    return;
  }
  const TimePoint now = Clock::now();
  tell_where_it_waits(runs);
  erase_old_postings(now);
  for (const auto& run : runs) look_for_stalls(run, now);
}

// Two ranks may refuse one call each, and the refusal of the later call may be the first on the board. The rank
// that refused the earlier call takes no part in calls between the two, where others would wait for it.
void Watcher::look_for_earlier_refusals() {
  const auto known = refused();
  const auto before = [&](const std::shared_ptr<RunState>& run) {
    const RunLabel& label = run->label();
    return known && label.lane == known->call.lane &&
           meshcast::goes_before({label.lane, label.ordinal}, known->call);
  };
  const Runs runs = old_runs();
  if (std::any_of(runs.begin(), runs.end(), before)) {
    const auto left = bulletin_.left_at(known->call.lane);
    if (left && left->rank != group_.rank && left->ordinal < known->call.ordinal) {
      const std::lock_guard lock(mutex_);
      earlier_ = RefusedCall{{known->call.lane, left->ordinal}, left->rank, left->why};
    }
  }
  end_if_refused();
}

// For a rank that refuses a call whose arguments do not show which ranks wait for it.
void Watcher::tell_where_it_waits(const Runs& runs) {
  std::map<int32_t, int64_t> oldest;
  for (const auto& run : runs) {
    const RunLabel& label = run->label();
    const auto [it, fresh] = oldest.try_emplace(label.lane, label.ordinal);
    if (!fresh) it->second = std::min(it->second, label.ordinal);
  }
  for (const auto& [lane, ordinal] : oldest) {
    const auto [it, fresh] = told_waits_.try_emplace(lane, -1);
    if (std::exchange(it->second, ordinal) != ordinal) bulletin_.wait_in(lane, ordinal, group_.rank);
  }
}

// Others may still be in a call that this rank has left, so a posting stays for a while.
void Watcher::erase_old_postings(TimePoint now) {
  for (auto it = posted_.begin(); it != posted_.end();) {
    const auto run = it->second.run.lock();
    if ((!run || run->ended()) && now - it->second.when > kPostingGeneration) {
      const auto& [lane, ordinal] = it->first;
      bulletin_.standing(lane, ordinal, group_.ranks.size()).unsign(group_.place());
      bulletin_.erase_said(lane, ordinal);
      it = posted_.erase(it);
    } else {
      ++it;
    }
  }
}

std::vector<int32_t> Watcher::silent_in(Roll& standing) const {
  standing.refresh();
  std::vector<int32_t> out;
  for (const size_t at : standing.missing()) out.push_back(group_.ranks[at]);
  return out;
}

// One notice, for the oldest of the waiting runs: those behind it mostly wait for the same ranks. By then other
// ranks have had the time to post that they wait, too.
void Watcher::notify_of_wait(const std::shared_ptr<RunState>& run, Roll& standing, TimePoint now) {
  const auto since = run->awaited_since(now);
  if (!since || now < stall_time(*run) + kRefusalTold) return;
  WaitNotice notice(*since);
  if (!notice.is_due(now)) return;
  if (const auto noticed = long_wait_.lock(); noticed && !noticed->ended()) return;
  long_wait_ = run;
  const RunLabel& label = run->label();
  notice.post({.rank = group_.rank,
               .call = fmt::format("{} call {} of {}", label.op(), label.ordinal, group_.name),
               .state = fmt::format("{} of {} bytes received", run->received_bytes(), run->expected_bytes()),
               .ranks = silent_in(standing)});
}

// Phase 1: a call that makes no progress posts its descriptor, once, and compares with the first that was
// posted; a mismatch throws. Phase 2: it looks for an objection, less and less often. A rank that refuses a
// call in flight posts a cause, but that takes a moment. Phase 3: past the deadline, the error names the ranks
// that are not in the call, since it waits for those.
void Watcher::look_for_stalls(const std::shared_ptr<RunState>& run, TimePoint now) {
  const TimePoint since = stall_time(*run);
  if (now < since) return;
  const RunLabel& label = run->label();
  const CallId call{label.lane, label.ordinal};
  const auto [it, fresh] =
      posted_.try_emplace({call.lane, call.ordinal}, Posted{now, since + kRefusalTold, run});
  Roll standing = bulletin_.standing(call.lane, call.ordinal, group_.ranks.size());
  if (fresh) {
    standing.sign(group_.place());
    compare_with_first(bulletin_, group_, call, {false, -1, label.descriptor(), group_.rank, true});
  }
  const bool late = now >= run->deadline();
  if (late || now >= it->second.asks) {
    it->second.asks = now + (now - run->started());
    check_objection(bulletin_, group_, call, label.descriptor());
  }
  if (!late) return notify_of_wait(run, standing, now);
  const std::vector<int32_t> silent = silent_in(standing);
  const std::string who =
      silent.empty() ? "every rank is in this call, so the network is too slow or the limit too short"
                     : fmt::format(
                           "ranks {} do not wait in it (never called, blocked elsewhere, frozen, dead, "
                           "or done with their part)",
                           format_ranks(silent));
  Cause cause = describe_overdue(*run, "; " + who);
  if (!silent.empty()) cause.peer = silent.front();
  note_local(std::move(cause), run.get());
}

bool Watcher::tick() {
  const Runs runs = engine_.in_flight();
  std::optional<Local> local;
  bool published = false;
  {
    const std::lock_guard lock(mutex_);
    local = local_;
    published = published_;
  }
  if (runs.empty() && (!local || failed() || knows_refusal_)) return false;
  const TimePoint now = Clock::now();
  // Also at the deadline of a run, so that it ends then.
  const bool look_is_due =
      !reporting_ && !failed() && std::any_of(runs.begin(), runs.end(), [&](const auto& run) {
        return (now >= run->deadline() && last_look_ < run->deadline()) ||
               (now - last_look_ >= pause_ && now - run->started() >= pause_);
      });
  // note_local() has already requested a report. A failed store must not be flooded.
  const bool publishes_again = local && !knows_refusal_ && !published && now - last_look_ >= pause_;
  if (publishes_again || ((!local || knows_refusal_) && look_is_due)) {
    last_look_ = now;
    want_report();
  }
  // The death of a peer on this host breaks no network connection that a run waits on.
  if (!failed()) engine_.check_peers();
  end_in_time(runs, local, now);
  return true;
}

// The order of the grace periods lets errors name the right rank: a report acts at the deadline, a tick
// kStoreGrace later, or at once if the store has not answered for that long already.
void Watcher::end_in_time(const Runs& runs, const std::optional<Local>& local, TimePoint now) {
  if (failed()) {
    if (failed_at_ == TimePoint{}) failed_at_ = now;
    if (now - failed_at_ > kPinGrace) {
      for (const auto& run : runs) run->force_end();
    }
    return;
  }
  if (knows_refusal_) return end_if_refused();
  const bool unanswered = reporters_->held_up(connection_) || store_failed();
  if (local) {
    if (!unanswered && now - local->seen <= kStoreGrace) return;
    Cause cause = local->cause;
    cause.text += " (the rendezvous store did not answer)";
    give_up(cause);
    return;
  }
  for (const auto& run : runs) {
    if (now < run->deadline() + (unanswered ? milliseconds(0) : kStoreGrace)) continue;
    note_local(describe_overdue(*run, ""), run.get());
    return;
  }
}

}  // namespace meshcast
