#include "c10d/watcher.h"

#include <algorithm>
#include <vector>

#include <fmt/format.h>

namespace meshcast {
namespace {

using std::chrono::milliseconds;
using Seconds = std::chrono::duration<double>;

constexpr auto kLook = milliseconds(200);         // between looks at the bulletin
constexpr auto kStall = milliseconds(2000);       // a call this old says what it is (or a quarter of its limit)
constexpr auto kStoreGrace = milliseconds(1000);  // the store may take this long before the timer decides alone
constexpr auto kPostingLife = std::chrono::seconds(60);
constexpr auto kPinGrace = milliseconds(2000);  // an aborted request may take this long to let go

double limit_of(const RunState& run) { return Seconds(run.deadline() - run.started()).count(); }

TimePoint stall_time(const RunState& run) {
  const auto quarter = (run.deadline() - run.started()) / 4;
  return run.started() + std::min<Clock::duration>(kStall, quarter);
}

// gloo names a peer as "[127.0.0.1]:4711" and in no other way.
std::string address_in(const std::string& text) {
  const size_t begin = text.find('[');
  const size_t close = text.find("]:", begin == std::string::npos ? 0 : begin);
  if (begin == std::string::npos || close == std::string::npos) return "";
  const size_t end = text.find_first_not_of("0123456789", close + 2);
  return text.substr(begin, end == std::string::npos ? end : end - begin);
}

}  // namespace

Watcher::Watcher(Watched& engine, GroupIdentity group, const c10::intrusive_ptr<c10d::Store>& store)
    : engine_(engine), group_(std::move(group)), bulletin_(store), threads_(WatchThreads::of_process()) {
  threads_->add(*this);
}

Watcher::~Watcher() { stop(); }

void Watcher::stop() {
  if (!std::exchange(watched_, false)) return;
  threads_->remove(*this);
  if (!local_ || published_) return;
  // Told before this rank's connections go: else the others would find them broken and blame this rank.
  try {
    bulletin_.settle_cause(local_->cause);
  } catch (const std::exception&) {
    // The store does not answer any more; nobody is left who would look there.
  }
}

void Watcher::wake() { threads_->wake(false); }

Cause Watcher::describe_transport_error(int32_t peer, const TransportError& error, const RunState& run) const {
  const int32_t peer_rank = group_.ranks[static_cast<size_t>(peer)];
  const RunLabel& label = run.label();
  const auto kind =
      error.cause() == TransportError::Cause::Timeout ? ErrorKind::DeadlineExceeded : ErrorKind::PeerLost;
  return {static_cast<int32_t>(kind), group_.rank, peer_rank,
          fmt::format(
              "{} call {} of {}: rank {} lost rank {} in phase transfer after {:.2f} s of {:.1f} s, {} of {} "
              "bytes received there: {}. Look at that rank's own output first.",
              label.op(), label.ordinal, group_.name, group_.rank, peer_rank, run.seconds(), limit_of(run),
              run.received_bytes(), run.expected_bytes(), error.what())};
}

void Watcher::note_local(Cause cause, const RunState* run) {
  {
    const std::lock_guard lock(mutex_);
    if (local_) return;
    local_.emplace();
    local_->cause = std::move(cause);
    local_->seen = Clock::now();
    if (run) {
      local_->elapsed = run->seconds();
      local_->limit = limit_of(*run);
      local_->bytes_done = run->received_bytes();
      local_->bytes_expected = run->expected_bytes();
      local_->op = run->label().op();
      local_->ordinal = run->label().ordinal;
    }
  }
  threads_->wake(true);
}

void Watcher::transport_failed(int32_t peer, const TransportError& error, const RunState& run) {
  if (failed()) return;  // an echo of our own abort
  note_local(describe_transport_error(peer, error, run), &run);
}

void Watcher::run_failed(const Error& error, const RunState& run) {
  if (failed()) return;
  std::string text = error.what();
  const std::string me = fmt::format("rank {}: ", group_.rank);  // which give_up() puts there
  if (text.starts_with(me)) text.erase(0, me.size());
  note_local({static_cast<int32_t>(error.kind()), group_.rank, error.context().peer, std::move(text)}, &run);
}

void Watcher::abort(const std::string& reason) {
  const Cause cause{static_cast<int32_t>(ErrorKind::Aborted), group_.rank, -1, reason};
  note_local(cause, nullptr);
  give_up(cause);
}

// What this rank saw gives the numbers (elapsed, bytes); the first cause, perhaps another rank's, gives kind
// and text.
void Watcher::give_up(const Cause& cause) {
  Local local;
  {
    const std::lock_guard lock(mutex_);
    if (local_) local = *local_;
  }
  const bool known = cause.kind >= 0 && cause.kind <= static_cast<int32_t>(ErrorKind::Aborted);
  const auto kind =
      known ? static_cast<ErrorKind>(cause.kind) : ErrorKind::Aborted;  // the text came from the store
  const std::string text =
      cause.reporter == group_.rank || cause.reporter < 0
          ? fmt::format("rank {}: {}", group_.rank, cause.text)
          : fmt::format("rank {}: {} (first seen by rank {})", group_.rank, cause.text, cause.reporter);
  ErrorContext context;
  context.rank = group_.rank;
  context.peer = cause.peer;
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
  engine_.fail(std::make_exception_ptr(Error(kind, text, context)));
}

bool Watcher::report() {
  {
    const std::lock_guard lock(mutex_);
    if (local_ ? published_ : failed()) return false;
    if (!local_ && engine_.in_flight().empty()) return false;
  }
  try {
    report_once();
  } catch (const Error& error) {
    // A mismatch found by comparing descriptors; every rank that compares finds the same.
    const Cause cause{static_cast<int32_t>(error.kind()), group_.rank, error.context().peer, error.what()};
    note_local(cause, nullptr);
    give_up(cause);
  } catch (const std::exception&) {
    // The store does not answer. The timer ends the runs at their deadline with what this rank knows.
  }
  return true;
}

void Watcher::report_once() {
  std::optional<Local> local;
  {
    const std::lock_guard lock(mutex_);
    local = local_;
  }
  if (local) {
    // A lost connection may be the echo of somebody's abort: whoever wrote first is right.
    const Cause first = bulletin_.settle_cause(local->cause);
    {
      const std::lock_guard lock(mutex_);
      published_ = true;
    }
    give_up(first);
    return;
  }
  const TimePoint now = Clock::now();
  auto runs = engine_.in_flight();
  runs.erase(
      std::remove_if(runs.begin(), runs.end(), [&](const auto& r) { return now - r->started() < kLook; }),
      runs.end());
  if (runs.empty() || now - last_look_ < kLook) return;
  last_look_ = now;
  if (const auto cause = bulletin_.read_cause()) {
    note_local(*cause, runs.front().get());
    give_up(*cause);
    return;
  }
  erase_old_postings(now);
  for (const auto& run : runs) look_for_stalls(run, now);
}

// Others may still be in a call that this rank has left, so a posting stays for a while.
void Watcher::erase_old_postings(TimePoint now) {
  for (auto it = posted_.begin(); it != posted_.end();) {
    const auto run = it->second.run.lock();
    if ((!run || run->ended()) && now - it->second.when > kPostingLife) {
      bulletin_.erase(Bulletin::Board::Stall, it->first.first, it->first.second, group_.rank);
      it = posted_.erase(it);
    } else {
      ++it;
    }
  }
}

// Phase 1: a call that stands still says what it is, once. Phase 2: it compares what others said; a mismatch
// throws. Phase 3: past the deadline those that are not in the call are named, since they are the ones it
// waits for.
void Watcher::look_for_stalls(const std::shared_ptr<RunState>& run, TimePoint now) {
  if (now < stall_time(*run)) return;
  const RunLabel& label = run->label();
  const CallId call{label.lane, label.ordinal};
  const auto [it, fresh] = posted_.try_emplace({call.lane, call.ordinal}, Posted{now, run});
  if (fresh) {
    bulletin_.post(Bulletin::Board::Stall, call.lane, call.ordinal, group_.rank,
                   {false, -1, label.descriptor()});
  }
  const std::vector<int32_t> silent = compare_postings(bulletin_, group_, call, label.descriptor());
  if (now < run->deadline()) return;
  const std::string who = silent.empty()
                              ? "every rank is in this call, so the network is too slow or the limit too short"
                              : fmt::format(
                                    "ranks {} do not wait in it (never called, stuck elsewhere, frozen, dead, "
                                    "or through with their part)",
                                    format_ranks(silent));
  note_local(
      {static_cast<int32_t>(ErrorKind::DeadlineExceeded), group_.rank, silent.empty() ? -1 : silent.front(),
       fmt::format(
           "{} call {} of {} exceeded its limit of {:.1f} s in phase transfer, {} of {} bytes received; {}",
           label.op(), label.ordinal, group_.name, limit_of(*run), run->received_bytes(), run->expected_bytes(),
           who)},
      run.get());
}

// The order of the grace periods is what keeps names right: the reporter acts at the deadline, this thread
// kStoreGrace later.
bool Watcher::tick() {
  const auto runs = engine_.in_flight();
  std::optional<Local> local;
  {
    const std::lock_guard lock(mutex_);
    local = local_;
  }
  if (runs.empty() && (!local || failed())) return false;
  const TimePoint now = Clock::now();
  // The death of a peer on this host breaks no network connection that anybody waits on.
  if (!failed()) engine_.check_peers();
  if (failed()) {
    if (failed_at_ == TimePoint{}) failed_at_ = now;
    if (now - failed_at_ > kPinGrace) {
      for (const auto& run : runs) run->force_end();
    }
  } else if (local && now - local->seen > kStoreGrace) {
    Cause cause = local->cause;
    cause.text += " (the rendezvous store did not answer)";
    give_up(cause);
  } else if (!local) {
    for (const auto& run : runs) {
      if (now < run->deadline() + kStoreGrace) continue;
      note_local({static_cast<int32_t>(ErrorKind::DeadlineExceeded), group_.rank, -1,
                  fmt::format("{} call {} of {} exceeded its limit of {:.1f} s, {} of {} bytes received",
                              run->label().op(), run->label().ordinal, group_.name, limit_of(*run),
                              run->received_bytes(), run->expected_bytes())},
                 run.get());
      break;
    }
  }
  return true;
}

}  // namespace meshcast
