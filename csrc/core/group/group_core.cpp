#include "group/group_core.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include <fmt/format.h>

#include "common/fault_point.h"
#include "common/sync.h"
#include "group/refusals.h"

namespace meshcast {
namespace {

constexpr size_t kMostPosted = 64;                        // calls
constexpr auto kSeenIn = std::chrono::milliseconds(500);  // in which the death of a rank is noticed
// Ranks to which a call is new ask for an agreement as they come to it. Those that come later than this after a
// refusal meet again needlessly.
constexpr auto kOthersCome = std::chrono::milliseconds(150);
constexpr auto kCauseComes = std::chrono::seconds(2);      // after a rank has decided to post one
constexpr auto kTold = std::chrono::milliseconds(20);      // in which peers learn why this rank has left
constexpr auto kOwnRuns = std::chrono::milliseconds(500);  // the wait of a refusing rank for its earlier calls

}  // namespace

class GroupCore::WatchedEngine final : public Watched {
 public:
  WatchedEngine(const std::unique_ptr<Engine>& engine, Transport& network)
      : engine_(engine), network_(network) {}

  std::vector<std::shared_ptr<RunState>> in_flight() override {
    const auto runs = engine_->in_flight();
    return {runs.begin(), runs.end()};
  }
  std::exception_ptr error() const override { return engine_->error(); }
  void fail(std::exception_ptr error) override { engine_->fail(std::move(error)); }
  void leave_because(const Cause& cause) override { network_.leave_because(encode(cause)); }
  void check_peers() override { engine_->check_local_peers(); }

 private:
  const std::unique_ptr<Engine>& engine_;
  Transport& network_;
};

GroupCore::GroupCore(std::shared_ptr<Transport> network, const std::shared_ptr<Store>& store,
                     GroupIdentity identity, LocalRanks local)
    : GroupBase(std::move(identity)),
      network_(network),
      local_ranks_(std::move(local.ranks)),
      agreement_bulletin_(store),
      watched_(std::make_unique<WatchedEngine>(engine_, *network_)),
      slots_(std::make_shared<SlotPool>(kSlots)) {
  try {
    engine_ = std::make_unique<Engine>(
        std::move(network),
        [this](int peer, const TransportError& error, const std::shared_ptr<Run>& run) {
          watcher_->transport_failed(peer, error, *run);
        },
        std::move(local.transport));
    watcher_ = std::make_shared<Watcher>(*watched_, identity_, store);
  } catch (const Error& error) {
    // The others have met this rank and would wait for it.
    const std::string text =
        fmt::format("rank {}: group {} could not come up: {}", identity_.rank, identity_.name, error.what());
    try {
      agreement_bulletin_.settle_cause({static_cast<int32_t>(error.kind()), identity_.rank, -1, text});
    } catch (const std::exception&) {
      // The store does not answer: the others cannot be notified, and end at their limits.
    }
    throw start_error(error.kind(), text);
  }
}

GroupCore::~GroupCore() { shutdown(); }

std::shared_ptr<AgreedPlan> GroupCore::agree_on(CallId call, const PlanText& text,
                                                std::shared_ptr<const Plan> plan,
                                                std::shared_ptr<const Plan> reverse, double timeout_seconds) {
  refuse_if_failed();
  try {
    return agree_whole(call, text, std::move(plan), std::move(reverse), timeout_seconds);
  } catch (const std::bad_alloc& error) {
    const std::string what =
        fmt::format("rank {}: no memory to agree on a call with: {}", identity_.rank, error.what());
    watcher_->abort(what);  // the others wait for this rank
    throw start_error(ErrorKind::Generic, what);
  }
}

std::shared_ptr<AgreedPlan> GroupCore::agree_whole(CallId call, const PlanText& text,
                                                   std::shared_ptr<const Plan> plan,
                                                   std::shared_ptr<const Plan> reverse,
                                                   double timeout_seconds) {
  auto forward = std::make_shared<PlanDirection>(std::move(plan), text, identity_);
  std::shared_ptr<PlanDirection> backward;
  if (reverse)
    backward = std::make_shared<PlanDirection>(std::move(reverse),
                                               PlanText{text.op + " backward", text.descriptor}, identity_);
  const TimePoint deadline = deadline_after(timeout_seconds);
  const std::lock_guard lock(agree_mutex_);
  // The first rank gives the slots, so no two ranks can give one slot to two plans.
  const bool leads = identity_.rank == identity_.ranks.front();
  const std::optional<int32_t> offered = leads ? slots_->next() : -1;
  if (!offered) {
    const std::string full = fmt::format(
        "rank {}: group {} has {} transfers alive, the most it can have; close some (a Resharder, "
        "a graph that is kept)",
        identity_.rank, identity_.name, kSlots);
    say_rejected(call, full);
    throw LayoutError(full);
  }
  int32_t slot = -1;
  try {
    slot = agree_in_time(call, text, *offered, timeout_seconds);
  } catch (const BrokenError& error) {
    watcher_->adopt(error.cause);  // so that peers get the first cause, and not its consequence here
    watcher_->leave_with(call, deadline, timeout_seconds);
    throw;
  }
  if (leads) slots_->take(slot);
  try {
    erase_read();
  } catch (const std::exception&) {
    // The store has failed since, and the board with it.
  }
  return std::make_shared<AgreedPlan>(call.lane, std::move(forward), std::move(backward), slot,
                                      leads ? slots_ : std::weak_ptr<SlotPool>());
}

// The store must not grow with the number of failed calls: for old ones it keeps only that they are over.
void GroupCore::note_posted(CallId call, std::string digest, bool rejected) {
  posted_.push_back({call, std::move(digest), rejected});
  if (posted_.size() <= kMostPosted) return;
  const Posted old = posted_.front();
  posted_.pop_front();
  agreement_bulletin_.pass(old.call.lane, old.call.ordinal, identity_.rank);
  erase(old);
  if (old.rejected) agreement_bulletin_.erase_decision(old.call.lane, old.call.ordinal);
}

// Once all ranks have agreed on a call, all have read what was posted for earlier ones, except for rejections:
// ranks in a transfer read those, and no agreement waits for that.
void GroupCore::erase_read() {
  if (posted_.empty()) return;
  Posted mine = posted_.back();
  mine.agreed = true;
  posted_.pop_back();
  for (const Posted& each : posted_)
    if (!each.rejected) erase(each);
  std::erase_if(posted_, [](const Posted& each) { return !each.rejected; });
  posted_.push_back(mine);
}

// Erases what this rank posted, and the roll of those who posted the same. If all did, one rank erases that for
// all.
void GroupCore::erase(const Posted& each) {
  agreement_bulletin_.erase(each.call.lane, each.call.ordinal, identity_.rank);
  agreement_bulletin_.erase_said(each.call.lane, each.call.ordinal);
  if (each.digest.empty()) return;
  Roll roll =
      agreement_bulletin_.agreeing(each.call.lane, each.call.ordinal, each.digest, identity_.ranks.size());
  if (each.agreed && identity_.rank != identity_.ranks.front())
    roll.disown();
  else
    roll.erase();
}

int32_t GroupCore::agree_in_time(CallId call, const PlanText& text, int32_t offered_slot,
                                 double timeout_seconds) {
  try {
    note_posted(call, digest_of(text.descriptor), false);
    return agree(
        agreement_bulletin_, identity_, call, text.descriptor, offered_slot, deadline_after(timeout_seconds),
        timeout_seconds,
        [&] {
          refuse_if_failed();
          raise_if_told(call);
        },
        [this](int peer) { return network_->lost(peer); });
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw;  // not from the store
  } catch (const std::exception& error) {
    store_failed(call, text, std::string(error.what(), std::strcspn(error.what(), "\n")));
  }
}

// The store may run in the process of a peer, whose death is then noticed soon.
void GroupCore::store_failed(CallId call, const PlanText& text, const std::string& what) {
  for (const TimePoint limit = Clock::now() + kSeenIn; Clock::now() < limit;) {
    raise_if_told(call);
    for (size_t peer = 0; peer < identity_.ranks.size(); ++peer) {
      const int32_t rank = identity_.ranks[peer];
      const std::string why = rank == identity_.rank ? "" : network_->lost(static_cast<int>(peer));
      if (!why.empty())
        raise_cause(
            {static_cast<int32_t>(ErrorKind::PeerLost), identity_.rank, rank,
             fmt::format("call {} of {}: rank {} lost rank {} in phase agree: {} (and the rendezvous store: "
                         "{}). Look at that rank's own output first.",
                         call.ordinal, identity_.name, identity_.rank, rank, why, what)},
            identity_, call);
    }
    sleep_for(std::chrono::milliseconds(10));
  }
  throw group_error(
      identity_, ErrorKind::Generic,
      fmt::format("rank {}: call {} of {}: the rendezvous store does not answer ({}). The process that has "
                  "it is dead or cut off: transfers that the ranks have agreed on continue, new ones need it",
                  identity_.rank, call.ordinal, identity_.name, what),
      {.op = text.op, .sequence = call.ordinal, .phase = "agree"});
}

void GroupCore::raise_if_told(CallId call) {
  for (size_t peer = 0; peer < identity_.ranks.size(); ++peer) {
    if (identity_.ranks[peer] == identity_.rank) continue;
    const std::string told = network_->told(static_cast<int>(peer));
    if (!told.empty()) raise_if_ended(decode_cause(told), identity_, call);
  }
}

void GroupCore::say_rejected(CallId call, const std::string& why) {
  note_posted(call, {}, true);
  const Posting rejection{true, -1, why, identity_.rank};
  agreement_bulletin_.post(call.lane, call.ordinal, rejection);
  agreement_bulletin_.object(call.lane, call.ordinal, rejection);
}

void GroupCore::reject(CallId call, const std::string& message) {
  origin_.check();
  const std::lock_guard lock(agree_mutex_);
  try {
    say_rejected(call, message);
  } catch (const std::exception&) {
    // The others are not notified, and wait to their limits.
  }
}

void GroupCore::adopt_told_refusal() {
  for (size_t peer = 0; peer < identity_.ranks.size(); ++peer) {
    if (identity_.ranks[peer] == identity_.rank) continue;
    const Cause cause = decode_cause(network_->told(static_cast<int>(peer)));
    if (refused_in(cause)) return watcher_->adopt(cause);
  }
}

void GroupCore::refuse(CallId call, const std::string& message, bool agreed) {
  origin_.check();
  // Ranks that have yet to read this rank's agreement must not find it withdrawn.
  if (!agreed) reject(call, message);
  try {
    const TimePoint begun = Clock::now();
    // Connects with ranks that have exchanged nothing with this one, so that they are notified as it leaves.
    for (size_t peer = 0; peer < identity_.ranks.size(); ++peer)
      if (identity_.ranks[peer] != identity_.rank) network_->lost(static_cast<int>(peer));
    const auto over = [this] { return failure() != nullptr; };
    Generation mine = Generation::GoesOn;
    if (agreed ||
        look_for_others(agreement_bulletin_, identity_, call, begun + kOthersCome, over) == Others::Unseen) {
      mine = Generation::Over;
    }
    std::optional<Cause> cause;
    if (decide(agreement_bulletin_, call, mine, true) == Generation::GoesOn) {
      // If the refusal of another call has ended it meanwhile, the next generation has to know of this refusal.
      cause = agreement_bulletin_.read_cause();
      if (!cause || !refused_in(*cause)) return;
    } else if (mine == Generation::Over) {
      cause = agreement_bulletin_.settle_cause(as_cause({call, identity_.rank, message}));
    } else {
      cause = await_cause(agreement_bulletin_, begun + kCauseComes);
    }
    // If the refusal of a later call was first, ranks that wait in calls before it look for this one.
    const auto first = refused_in(*cause);
    if (first && goes_before(call, first->call))
      agreement_bulletin_.leave_at(call.lane, call.ordinal, identity_.rank, message);
    watcher_->adopt(*cause);
    watcher_->leave(Clock::now() + kOwnRuns);
    sleep_for(kTold);
  } catch (const std::exception&) {
    // The store does not answer: the others are not notified, and wait to their limits.
  }
}

bool GroupCore::awaited_in(CallId call) {
  origin_.check();
  const std::lock_guard lock(agree_mutex_);
  return std::any_of(identity_.ranks.begin(), identity_.ranks.end(), [&](int32_t other) {
    if (other == identity_.rank) return false;
    const auto posting = agreement_bulletin_.read(call.lane, call.ordinal, other);
    if (posting) return !posting->rejected;
    return agreement_bulletin_.waits_in(call.lane, other) == call.ordinal;
  });
}

std::shared_ptr<Run> GroupCore::start(const AgreedPlan& agreed, const StartedCall& call,
                                      const BuffersFor& buffers_for) {
  if (network_->anybody_told()) adopt_told_refusal();
  watcher_->come_to({agreed.lane(call.reverse), call.ordinal}, call.timeout_seconds);
  refuse_if_failed();
  try {
    return start_whole(agreed, call, buffers_for);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    // No thread or memory was available in the middle of the start: the others must not wait for the rest.
    const std::string text =
        fmt::format("rank {}: a call could not be started: {}", identity_.rank, error.what());
    watcher_->abort(text);
    throw start_error(ErrorKind::Generic, text);
  }
}

std::shared_ptr<Run> GroupCore::start_whole(const AgreedPlan& agreed, const StartedCall& call,
                                            const BuffersFor& buffers_for) {
  MC_FAULT_POINT("start");
  PlanDirection& direction = agreed.direction(call.reverse);
  Buffers buffers = buffers_for(direction);
  auto run = engine_->start(direction.program(local_ranks_), std::move(buffers),
                            agreed.label(call.reverse, call.ordinal), deadline_after(call.timeout_seconds));
  if (!run->ended()) watcher_->wake();
  return run;
}

std::vector<std::shared_ptr<BoardStore>> GroupCore::boards() const {
  return {agreement_bulletin_.store(), watcher_->board()};
}

void GroupCore::shutdown() {
  if (origin_.foreign() || shut_down_.exchange(true)) return;
  // Stopped before the engine: it still posts the first cause, which has to be on the board before connections
  // close.
  MC_FAULT_POINT("leave");
  watcher_->stop();
  MC_FAULT_POINT("leave");
  engine_->shutdown(shut_down_error());
  MC_FAULT_POINT("leave");
}

}  // namespace meshcast
