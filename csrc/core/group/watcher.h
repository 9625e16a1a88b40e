#pragma once

#include <atomic>
#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "common/error.h"
#include "common/sync.h"
#include "group/agreement.h"
#include "group/bulletin.h"
#include "group/refusals.h"
#include "run/admission.h"
#include "run/reporters.h"
#include "run/run_state.h"
#include "run/work_thread.h"

namespace meshcast {

// What a watcher watches: the runs of a group, on CPUs or GPUs. Thread-safe.
class Watched {
 public:
  virtual ~Watched() = default;
  virtual std::vector<std::shared_ptr<RunState>> in_flight() = 0;
  virtual std::exception_ptr error() const = 0;
  virtual void fail(std::exception_ptr error) = 0;       // the first call counts
  virtual void leave_because(const Cause& /*cause*/) {}  // the cause that peers are notified of; before fail()
  virtual void check_peers() {}                          // from time to time, while runs are in flight
};

// Decides when a group has failed and with which error, so that no call blocks for ever and every rank names
// the same peer. Over gloo one failure also closes connections between other ranks; so a rank that sees an
// error reads the first cause from the bulletin before it names a rank.
//
// It runs on two threads. Ticks, on the work thread, never use the store. The store may block a report, on a
// reporter, for ever. So ticks end the runs with what this rank knows if the store does not answer in time, and
// a report may use the engine only until stop(); the watcher lives until its report is over.
class Watcher final : public std::enable_shared_from_this<Watcher>, private Ticking, private Reporting {
 public:
  // Made as a shared_ptr. Throws Error if no thread is available.
  Watcher(Watched& engine, GroupIdentity group, const std::shared_ptr<Store>& store);
  ~Watcher() override;

  void wake();  // a run was started
  void transport_failed(int32_t peer, const TransportError& error, const RunState& run);
  void run_failed(const Error& error, const RunState& run);  // with a complete text
  void abort(const std::string& reason);
  void adopt(const Cause& cause);  // found by other means than a run's failure
  // Before a start. If this call, or one before it, is known to be refused: leave(). Throws DeadlineExceeded if
  // the group has not ended by the limit of the call, in seconds.
  void come_to(CallId call, double limit) {
    if (knows_refusal_.load(std::memory_order_relaxed) && !goes_before(call))
      leave_with(call, deadline_after(limit), limit);
  }
  void leave_with(CallId call, TimePoint deadline, double limit);
  // If the cause is a refused call: this rank has come to it. Returns true once the calls before it have ended,
  // and the group with them; false at `limit`, and they end later.
  bool leave(TimePoint limit);
  int32_t rank() const { return group_.rank; }
  const std::shared_ptr<BoardStore>& board() const { return bulletin_.store(); }
  std::optional<RefusedCall> refused();  // if that is why the group has failed

  // Posts what only this rank knows, if the store takes it soon. Afterwards the engine is not used any longer.
  // Must not be called from a tick or a report.
  void stop();

 private:
  struct Local {  // what this rank saw, before it asked the others
    Cause cause;
    TimePoint seen;
    double elapsed = -1;
    double limit = -1;
    int64_t bytes_done = -1;
    int64_t bytes_expected = -1;
    std::string op;
    int64_t ordinal = -1;

    Local();
    explicit Local(const RunState& run);
  };

  using Runs = std::vector<std::shared_ptr<RunState>>;

  bool tick() override;
  void end_in_time(const Runs& runs, const std::optional<Local>& local, TimePoint now);

  void report() override;
  TimePoint waits_since() const override { return bulletin_.waits_since(); }
  const void* connection() const override { return connection_; }
  bool want_report();
  bool store_failed();
  void publish(const Local& local);
  void look();
  Runs old_runs();
  void tell_where_it_waits(const Runs& runs);
  void erase_old_postings(TimePoint now);
  void look_for_earlier_refusals();
  void look_for_stalls(const std::shared_ptr<RunState>& run, TimePoint now);
  std::vector<int32_t> silent_in(Roll& standing) const;
  void notify_of_wait(const std::shared_ptr<RunState>& run, Roll& standing, TimePoint now);

  Cause describe_overdue(const RunState& run, const std::string& more) const;
  int32_t peer_of(const Cause& cause);
  Error error_of_cause(const Cause& cause, const Local& local);
  Error error_before(const RunState& run, const RefusedCall& refused);
  Cause describe_transport_error(int32_t peer, const TransportError& error, const RunState& run) const;
  // known: the bulletin has it.
  void note_local(Cause cause, const RunState* run, bool known = false);
  void give_up(const Cause& given);  // fails the engine, under the first cause
  void end_with(const Cause& cause, const Error& error);
  void end_if_refused();          // unless earlier calls are in flight, or this rank has yet to come to it
  bool goes_before(CallId call);  // a refused one
  bool failed() const { return engine_.error() != nullptr; }

  Watched& engine_;
  const GroupIdentity group_;
  Bulletin bulletin_;
  const void* const connection_;
  Admission engine_use_;  // of reports

  Mutex mutex_;
  Condition told_;  // published_, unheard_
  std::optional<Local> local_;
  std::optional<Cause> first_;  // why the engine has failed, or will when it is left
  // If that is a refused call: since when this rank knows, whether it has come to it (leaves_), and whether a
  // call before it cannot succeed any longer (hopeless_).
  TimePoint refusal_seen_{};
  std::optional<RefusedCall> earlier_;  // that another rank refused before it knew of first_
  std::optional<CallId> broken_;        // that lost a peer before this rank knew of first_
  bool leaves_ = false;
  bool hopeless_ = false;
  std::atomic<bool> knows_refusal_{false};
  bool published_ = false;  // the bulletin knows a cause; from then on nothing is left to report
  bool unheard_ = false;    // the store failed at the last try
  std::atomic<bool> reporting_{false};

  // The reports' own notes; one report runs at a time.
  struct Posted {
    TimePoint when;
    TimePoint asks;  // for an objection, the next time
    std::weak_ptr<RunState> run;
  };
  std::map<std::pair<int32_t, int64_t>, Posted> posted_;  // calls (lane, ordinal) that are on the bulletin
  std::weak_ptr<RunState> long_wait_;                     // the last run whose wait was worth a notice
  std::map<int32_t, int64_t> told_waits_;  // by lane, the call that this rank has posted as its oldest

  const Clock::duration pause_;  // between looks
  // The ticks' own notes.
  TimePoint last_look_{};  // when a look at the bulletin was wanted
  TimePoint failed_at_{};

  const std::shared_ptr<WorkThread> work_;
  const std::shared_ptr<Reporters> reporters_;
  bool watched_ = true;  // until stop(), which one thread calls
};

}  // namespace meshcast
