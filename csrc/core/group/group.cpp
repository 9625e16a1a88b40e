#include "group/group.h"

#include <algorithm>
#include <chrono>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "common/signals.h"
#include "common/thread_name.h"
#include "group/bulletin.h"

namespace meshcast {
namespace {

using std::chrono::milliseconds;

// How late a command may be: it ends by itself at its deadline, or soon after it begins if that is later,
// unless the store blocks it.
constexpr auto kStuck = milliseconds(1500);
constexpr auto kKnown = milliseconds(700);       // the longest wait of a refusing rank until others know
constexpr auto kLeastClose = milliseconds(500);  // granted to a control thread at the end of its group

// The group whose commands this thread runs. Not of use in a simulation, whose threads are one.
thread_local const Group* controlled = nullptr;

class Connection final : public Command {
 public:
  explicit Connection(TimePoint deadline) : Command(kNoLane, 0, deadline, true) {}

  bool ready() override { return true; }
  Begun begin(const std::shared_ptr<GroupCore>& core, const std::exception_ptr& error) override {
    const std::lock_guard lock(mutex_);
    if (!core) error_ = error;
    done_ = true;
    over_.notify_all();
    return Begun::Done;
  }
  bool wait_until(TimePoint limit) {
    std::unique_lock lock(mutex_);
    return over_.wait_until(lock, limit, [this] { return done_; });
  }
  std::exception_ptr error() const { return error_; }  // once it is done

 private:
  Mutex mutex_;
  Condition over_;
  bool done_ = false;
  std::exception_ptr error_;
};

std::optional<ErrorKind> kind_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const Error& typed) {
    return typed.kind();
  } catch (...) {
    return std::nullopt;
  }
}

}  // namespace

Group::Group(GroupIdentity identity, std::shared_ptr<Connector> connector, std::shared_ptr<KnownOffers> known,
             size_t kept, std::shared_ptr<OpenRefusals> open)
    : identity_(std::move(identity)),
      connector_(std::move(connector)),
      known_(std::move(known)),
      kept_(kept),
      open_(std::move(open)),
      control_(control_executor()),
      generation_(kept) {}

Group::~Group() {
  if (origin_.foreign()) return;
  end_left();
  if (generation_.core) generation_.core->shutdown();
}

std::shared_ptr<GroupCore> Group::core() const {
  const std::lock_guard lock(mutex_);
  return generation_.core;
}

void Group::submit(const std::shared_ptr<Command>& command) {
  origin_.check();
  if (!command->ordinal || command->lane == kNoLane) assume_open();
  if (const auto refusal = enqueue(command)) {
    refusal->wait();
    command->refused();
  }
}

// Returns the command that notifies the others, if this rank refused the call as it began it.
std::shared_ptr<Refusal> Group::enqueue(std::shared_ptr<Command> command) {
  std::unique_lock lock(mutex_);
  if (!command->ordinal) command->ordinal = ordinals_[command->lane]++;
  const bool idle = !running_ && !has_thread_;
  if (idle && generation_.core) return begin_here(lock, std::move(command));
  queue_.push_back(std::move(command));
  if (idle) start_thread(lock);
  return nullptr;
}

std::shared_ptr<Refusal> Group::begin_here(std::unique_lock<Mutex>& lock, std::shared_ptr<Command> command) {
  running_ = command;
  begun_ = Clock::now();
  const uint64_t turn = turn_;
  const auto core = generation_.core;
  lock.unlock();
  const Command::Begun begun = command->ready() ? command->begin(core, nullptr) : Command::Begun::Again;
  lock.lock();
  if (turn_ != turn) return nullptr;  // given up
  running_.reset();
  idle_.notify_all();
  std::shared_ptr<Refusal> refusal;
  // Before commands that were queued meanwhile.
  if (begun == Command::Begun::Again) queue_.push_front(std::move(command));
  if (begun == Command::Begun::Refused) queue_.push_front(refusal = refusal_of(command));
  if (!queue_.empty()) start_thread(lock);
  return refusal;
}

std::shared_ptr<Refusal> Group::refusal_of(const std::shared_ptr<Command>& command) {
  return std::make_shared<Refusal>(shared_from_this(), command->lane, command->ordinal, command->deadline,
                                   command->refusal, Refusal::Told{true, {}});
}

void Group::start_thread(std::unique_lock<Mutex>& lock) {
  begun_ = Clock::now();
  has_thread_ = control_->try_post([self = shared_from_this(), turn = turn_] { self->run(turn); });
  if (!has_thread_) fail_without_thread(lock);  // the next command may get one
}

// Notifies all ranks at once, from this thread, so that they can continue.
void Group::fail_without_thread(std::unique_lock<Mutex>& lock) {
  const auto queue = std::exchange(queue_, {});
  const auto core = generation_.core;
  const auto failed = error_;
  lock.unlock();
  const std::system_error why(std::make_error_code(std::errc::resource_unavailable_try_again));
  const Error error = group_error(
      identity_, ErrorKind::Generic,
      fmt::format("rank {}: group {}: {}", identity_.rank, identity_.name, no_thread("a call", why)),
      {.op = "reshard", .phase = "start"});
  for (const auto& each : queue) {
    try {
      if (core)
        core->reject(each->call(), error.what());
      else if (!failed)
        refuse_meeting(next_generation().store, identity_.rank, std::string(), error.what());
    } catch (const std::exception&) {
      // The store does not answer: the others wait to their limits.
    }
    each->begin(nullptr, failed ? failed : std::make_exception_ptr(error));
  }
  lock.lock();
}

void Group::run(uint64_t turn) {
  if (Simulation::current()) return run_commands(turn);
  controlled = this;
  run_commands(turn);
  controlled = nullptr;
}

void Group::run_commands(uint64_t turn) {
  for (;;) {
    std::shared_ptr<Command> command;
    std::shared_ptr<Command> done;  // what it holds may need more than this lock to be freed
    {
      const std::lock_guard lock(mutex_);
      if (turn_ != turn) return;
      done.swap(running_);
      if (done && done->tells()) idle_.notify_all();
      if (queue_.empty()) {
        has_thread_ = false;
        idle_.notify_all();
        return;
      }
      running_ = command = queue_.front();
      begun_ = Clock::now();
      queue_.pop_front();
    }
    Next next = Next::SameAgain;
    while (next == Next::SameAgain) next = begin(command, turn);
    if (next == Next::Nothing) return;
    if (is_up()) {
      end_left();
      erase_old_keys();
    }
  }
}

Group::Next Group::begin(const std::shared_ptr<Command>& command, uint64_t turn) {
  std::exception_ptr error;
  std::shared_ptr<GroupCore> core;
  {
    const std::lock_guard lock(mutex_);
    core = generation_.core;
    error = error_;
  }
  if (!core && !error && command->meets)
    for (const auto& ended : {ended_before(command->call()), refused_last(command->call())})
      if (ended && !error) error = std::make_exception_ptr(*ended);
  if (!core && !error && command->meets) {
    try {
      if (!bring_up(*command, turn)) return Next::Nothing;
    } catch (const MeetAgainError&) {  // of this command alone
      error = std::current_exception();
    } catch (const std::exception&) {
      const std::lock_guard lock(mutex_);
      if (!error_) error_ = std::current_exception();
      error = error_;
    }
    core = this->core();
  }
  if (!core) {
    command->begin(nullptr, error);
    keep_first_cause();
    return Next::Command;
  }
  if (command->ordinal) {
    std::unique_lock lock(mutex_);
    const auto first = generation_.first.find(command->lane);
    if (first != generation_.first.end() && *command->ordinal < first->second) {
      lock.unlock();
      command->begin(nullptr, skipped(*command->ordinal));
      return Next::Command;
    }
  }
  const Command::Begun begun = command->begin(core, nullptr);
  if (begun == Command::Begun::Again) return Next::SameAgain;
  if (begun == Command::Begun::Refused) {  // before this rank continues
    const auto refusal = refusal_of(command);
    while (begin(refusal, turn) == Next::SameAgain) {
    }
    command->refused();
  }
  return Next::Command;
}

GenerationKeys Group::next_generation() {
  const auto store = connector_->store();
  if (origin_of_generations_.empty()) {
    // All members come to each generation exactly once, so the number of arrivals distinguishes this group from
    // earlier ones of the same store.
    const int64_t arrivals = store->add(identity_.name + "/arrivals", 1);
    origin_of_generations_ =
        fmt::format("{}/{}", identity_.name, (arrivals - 1) / static_cast<int64_t>(identity_.ranks.size()));
  }
  const std::string prefix = fmt::format("{}/{}", origin_of_generations_, ++generations_);
  auto board = std::make_shared<BoardStore>(std::make_shared<PrefixedStore>(prefix, store));
  const std::lock_guard lock(mutex_);
  boards_[kThis].push_back(board);
  return {prefix, std::move(board)};
}

bool Group::bring_up(const Command& command, uint64_t turn) {
  MeetingPart part;
  part.generation = [this] { return next_generation(); };
  part.what = meeting_for(command.call());
  part.next = [this] { return stated(); };
  part.deadline = command.deadline;
  part.closing = [this] {
    const std::lock_guard lock(mutex_);
    return closing_;
  };
  part.waits = [this, prepares = command.lane == kNoLane] {
    if (open_) open_->meets(identity_.ranks, prepares);
  };
  struct Over {
    Group& group;
    ~Over() {
      if (group.open_) group.open_->has_met(group.identity_.ranks);
    }
  } const over{*this};
  for (;;) {
    Met met = meet(identity_, *connector_, known_, part);
    if (met.core) return take(std::move(met), turn);
    if (!met.refused) continue;
    note_refused(*met.refused);
    if (const auto ended = ended_before(command.call())) throw MeetAgainError(*ended);
  }
}

// Called as a generation comes up. The ranks have met for it, so each has ended all generations before the last
// that came up.
void Group::note_boards() {
  const auto move = [this](size_t from, size_t to) {
    boards_[to].insert(boards_[to].end(), boards_[from].begin(), boards_[from].end());
    boards_[from].clear();
  };
  const auto board = boards_[kThis].back();
  boards_[kThis].pop_back();
  move(kLast, kOver);
  move(kThis, kLast);
  boards_[kThis] = {board};
  for (const auto& each : generation_.core->boards()) boards_[kThis].push_back(each);
}

void Group::erase_old_keys() {
  std::vector<std::shared_ptr<BoardStore>> over;
  {
    const std::lock_guard lock(mutex_);
    over.swap(boards_[kOver]);
  }
  try {
    for (const auto& each : over) each->erase_all();
  } catch (const std::exception&) {
    // The store has failed, and its keys with it.
  }
}

// Sets the core of the generation that has come up, unless its thread was given up meanwhile.
bool Group::take(Met met, uint64_t turn) {
  std::string closing;
  {
    const std::lock_guard lock(mutex_);
    if (turn_ == turn) {
      generation_.core = met.core;
      generation_.first = std::move(met.first);
      note_boards();
      closing = closing_;  // it came while the group connected, and found nothing to abort
    }
  }
  if (this->core() != met.core) {
    met.core->shutdown();
    return false;
  }
  if (!closing.empty()) met.core->abort(closing);
  return true;
}

// By lane, the ordinal of this rank's next call; empty unless ranks may have completed different calls.
Ordinals Group::stated() const {
  const std::lock_guard lock(mutex_);
  if (!refused_) return {};
  Ordinals out = ordinals_;
  const auto lower = [&out](const std::shared_ptr<Command>& command) {
    if (!command || !command->ordinal) return;
    const auto found = out.find(command->lane);
    if (found != out.end()) found->second = std::min(found->second, *command->ordinal);
  };
  lower(running_);
  for (const auto& each : queue_) lower(each);
  return out;
}

bool Group::left(const std::shared_ptr<GroupCore>& core, CallId call) {
  const auto refused = core->refused();
  if (!refused) return false;
  const std::lock_guard lock(mutex_);
  if (generation_.core == core) {
    left_.push_back(std::exchange(generation_, Generation(kept_)));
    refused_ = refused;
    if (refused->text.find(kChanged) != std::string::npos && refused->rank != identity_.rank) {
      news_ = group_error(
          identity_, ErrorKind::Generic,
          fmt::format("rank {}: call {} of {}: rank {} reports: {} The result of that call on this "
                      "rank may mix them, too.",
                      identity_.rank, refused->call.ordinal, identity_.name, refused->rank, refused->text),
          {.peer = refused->rank, .op = "reshard", .sequence = refused->call.ordinal, .phase = "transfer"});
      has_news_ = true;
    }
  }
  return call.lane != refused->call.lane || call.ordinal > refused->call.ordinal;
}

std::optional<Error> Group::error_of_refusal(const GroupCore& core, CallId call) const {
  const auto refused = core.refused();
  return refused ? std::optional(error_of(*refused, call)) : std::nullopt;
}

Error Group::error_of(const RefusedCall& refused, CallId call) const {
  const bool same = call.lane == refused.call.lane && call.ordinal == refused.call.ordinal;
  const std::string what = same ? std::string("refused its arguments")
                                : fmt::format("refused call {} of this group", refused.call.ordinal);
  return group_error(identity_, ErrorKind::PlanMismatch,
                     fmt::format("rank {}: call {} of {}: rank {} {}: {}", identity_.rank, call.ordinal,
                                 identity_.name, refused.rank, what, refused.text),
                     {.peer = refused.rank, .op = "reshard", .sequence = call.ordinal, .phase = "agree"});
}

// The later of two refused calls of a lane counts: the ranks are past the other.
void Group::note_refused(const RefusedCall& refused) {
  const std::lock_guard lock(mutex_);
  if (!refused_ || refused_->call.lane != refused.call.lane || refused_->call.ordinal < refused.call.ordinal)
    refused_ = refused;
}

// The error of a call that this rank had yet to make when a later one was refused, or of the refused one: no
// rank meets for it.
std::optional<Error> Group::ended_before(CallId call) const {
  const std::lock_guard lock(mutex_);
  if (!refused_ || call.lane != refused_->call.lane || call.ordinal > refused_->call.ordinal)
    return std::nullopt;
  return error_of(*refused_, call);
}

// The error of a call that was refused in the last generation before the refusal of an earlier call ended that.
// Other ranks learnt of it there, and no rank meets for it.
std::optional<Error> Group::refused_last(CallId call) const {
  {
    const std::lock_guard lock(mutex_);
    if (!refused_) return std::nullopt;
  }
  try {
    Bulletin board(control());
    const auto objection = board.objection(call.lane, call.ordinal);
    if (!objection || !objection->rejected ||
        decide(board, call, meshcast::Generation::GoesOn) == meshcast::Generation::Over)
      return std::nullopt;
    return error_of(RefusedCall{call, objection->rank, objection->text}, call);
  } catch (const std::exception&) {
    return std::nullopt;  // the store has failed: the meeting will say so
  }
}

std::exception_ptr Group::skipped(int64_t ordinal) const {
  const std::lock_guard lock(mutex_);
  // A generation begins after a refused call, or with the first calls of all ranks.
  const RefusedCall refused = refused_.value_or(RefusedCall{});
  return std::make_exception_ptr(group_error(
      identity_, ErrorKind::PlanMismatch,
      fmt::format("rank {}: call {} of {}: other ranks had completed this call when they learnt that rank {} "
                  "refused call {}, so it can no longer move anything; the next one works. Rank {}: {}",
                  identity_.rank, ordinal, identity_.name, refused.rank, refused.call.ordinal, refused.rank,
                  refused.text),
      {.peer = refused.rank, .op = "reshard", .sequence = ordinal, .phase = "agree"}));
}

bool Group::may_begin_again(const std::shared_ptr<GroupCore>& core, CallId call) {
  if (!left(core, call)) return false;
  const std::lock_guard lock(mutex_);
  return ordinals_[call.lane] == call.ordinal + 1;
}

bool Group::begin_again(const std::shared_ptr<Command>& command, const std::shared_ptr<GroupCore>& core) {
  if (!command->ordinal || !may_begin_again(core, command->call())) return false;
  submit(command);
  return true;
}

void Group::end_left() {
  std::vector<Generation> left;
  {
    const std::lock_guard lock(mutex_);
    left.swap(left_);
  }
  for (const Generation& each : left) {
    for (const auto& [key, thing] : each.attached) thing->close();
    each.core->shutdown();
  }
}

void Group::assume_open() {
  if (open_) open_->assume(*this);
}

std::shared_ptr<Refusal> Group::refuse(int32_t lane, std::optional<int64_t> ordinal, const std::string& why,
                                       double timeout_seconds) {
  origin_.check();
  if (!ordinal) assume_open();
  return refuse_now(lane, ordinal, why, timeout_seconds);
}

std::shared_ptr<Refusal> Group::refuse_next(int32_t lane, const std::string& why, double timeout_seconds) {
  origin_.check();
  return refuse_now(lane, std::nullopt, why, timeout_seconds);
}

std::shared_ptr<Refusal> Group::refuse_now(int32_t lane, std::optional<int64_t> ordinal, const std::string& why,
                                           double timeout_seconds) {
  const bool backward = lane == AgreedPlan::kReverseLane;
  auto refusal = std::make_shared<Refusal>(shared_from_this(), lane, lane == kNoLane ? 0 : ordinal,
                                           deadline_after(timeout_seconds), why, Refusal::Told{backward, {}});
  enqueue(refusal);
  return refusal;
}

std::shared_ptr<Refusal> Group::retract(CallId call, const std::string& why, double timeout_seconds,
                                        std::function<std::optional<int64_t>()> generation) {
  origin_.check();
  auto refusal =
      std::make_shared<Refusal>(shared_from_this(), call.lane, call.ordinal, deadline_after(timeout_seconds),
                                why, Refusal::Told{true, std::move(generation)});
  enqueue(refusal);
  return refusal;
}

int64_t Group::next_ordinal(int32_t lane) {
  origin_.check();
  assume_open();
  return counted(lane);
}

int64_t Group::counted(int32_t lane) const {
  const std::lock_guard lock(mutex_);
  const auto found = ordinals_.find(lane);
  return found == ordinals_.end() ? 0 : found->second;
}

bool Group::is_awaited() const {
  const auto core = this->core();
  return core && core->awaited_in({0, counted(0)});
}

bool Group::was_used() const {
  const std::lock_guard lock(mutex_);
  return generation_.core || !ordinals_.empty();
}

bool Group::is_untouched() const {
  const std::lock_guard lock(mutex_);
  return !generation_.core && !has_thread_ && !error_;
}

bool Group::is_over() const {
  const auto store = control();
  if (!store || !is_idle()) return false;
  const auto cause = Bulletin(store).read_cause();
  return cause && refused_in(*cause);
}

bool Group::is_idle() const {
  const std::lock_guard lock(mutex_);
  return !running_ && !has_thread_ && !error_;
}

std::shared_ptr<Attachment> Group::attached(const std::string& key) const {
  const std::lock_guard lock(mutex_);
  const auto found = generation_.attached.find(key);
  return found == generation_.attached.end() ? nullptr : found->second;
}

void Group::attach(const std::string& key, std::shared_ptr<Attachment> thing) {
  const std::lock_guard lock(mutex_);
  generation_.attached[key].swap(thing);  // the replaced one is freed without the lock
}

bool Group::has_agreed(const std::shared_ptr<GroupCore>& core, const std::string& descriptor) const {
  const std::lock_guard lock(mutex_);
  return generation_.core == core && generation_.agreements.has(descriptor);
}

std::shared_ptr<AgreedPlan> Group::use_agreed(const std::shared_ptr<GroupCore>& core,
                                              const std::string& descriptor) {
  const std::lock_guard lock(mutex_);
  return generation_.core == core ? generation_.agreements.use(descriptor) : nullptr;
}

void Group::add_agreed(const std::shared_ptr<GroupCore>& core, const std::string& descriptor,
                       const std::shared_ptr<AgreedPlan>& agreed) {
  std::shared_ptr<AgreedPlan> forgotten;  // freed without the lock
  const std::lock_guard lock(mutex_);
  if (generation_.core == core) forgotten = generation_.agreements.add(descriptor, agreed);
}

std::optional<Error> Group::take_news() {
  if (!has_news()) return std::nullopt;
  const std::lock_guard lock(mutex_);
  has_news_ = false;
  return std::exchange(news_, std::nullopt);
}

std::shared_ptr<Store> Group::control() const {
  if (generations_ == 0) return nullptr;
  return std::make_shared<PrefixedStore>(fmt::format("{}/{}/control", origin_of_generations_, generation()),
                                         connector_->store());
}

std::optional<std::string> Group::posted_cause() const {
  try {
    const auto store = control();
    if (!store) return std::nullopt;
    const auto cause = Bulletin(store).read_cause();
    if (!cause || refused_in(*cause)) return std::nullopt;
    return cause->text;
  } catch (const std::exception&) {
    return std::nullopt;  // the store has failed: it has no more to say, and the limit holds
  }
}

std::optional<std::string> Group::cause() const {
  if (const auto core = this->core(); core && !core->refused())
    if (auto error = core->error()) return error;
  return posted_cause();
}

void Group::connect(double timeout_seconds) {
  const auto command = std::make_shared<Connection>(deadline_after(timeout_seconds));
  submit(command);
  while (!wait_in_slices(std::max(command->deadline, Clock::now()) + kStuck,
                         [&](TimePoint slice) { return command->wait_until(slice); }))
    give_up_if_stuck();
  if (const auto error = command->error()) std::rethrow_exception(error);
}

void Group::give_up_if_stuck() {
  std::shared_ptr<Command> command;
  std::deque<std::shared_ptr<Command>> queue;
  std::exception_ptr error;
  std::string reason;
  {
    const std::lock_guard lock(mutex_);
    const bool waits = !running_ && !queue_.empty();  // for a thread
    command = waits ? queue_.front() : running_;
    if (!command || Clock::now() < std::max(command->deadline, begun_) + kStuck) return;
    queue.swap(queue_);
    if (waits) queue.pop_front();
    ++turn_;
    running_.reset();
    has_thread_ = false;
    idle_.notify_all();
    reason = fmt::format(
        "a call of group {} could not begin within its limit: the rendezvous store does not "
        "answer. Its process or its host is frozen, or cut off",
        identity_.name);
    const bool up = generation_.core != nullptr;
    error = std::make_exception_ptr(
        group_error(identity_, ErrorKind::DeadlineExceeded, fmt::format("rank {}: {}", identity_.rank, reason),
                    {.op = up ? "reshard" : "connect", .phase = up ? "agree" : "connect"}));
    error_ = error;
  }
  const std::exception_ptr later = keep_first_cause();
  abort(reason);
  command->begin(nullptr, error);
  for (const auto& each : queue) each->begin(nullptr, later);
}

// Calls after the failed one report its cause, as in an aborted group.
std::exception_ptr Group::keep_first_cause() {
  const std::lock_guard lock(mutex_);
  if (error_ && kind_of(error_) != ErrorKind::Aborted)
    error_ = std::make_exception_ptr(group_error(
        identity_, ErrorKind::Aborted,
        fmt::format("rank {}: the private group failed before: {}", identity_.rank, text_of(error_)),
        {.phase = "connect"}));
  return error_;
}

void Group::abort(const std::string& reason) {
  if (origin_.foreign()) return;
  std::shared_ptr<GroupCore> core;
  std::map<std::string, std::shared_ptr<Attachment>> attached;
  {
    const std::lock_guard lock(mutex_);
    if (closing_.empty()) closing_ = reason;
    core = generation_.core;
    attached = generation_.attached;
  }
  if (core) core->abort(reason);
  for (const auto& [key, thing] : attached) thing->abort(reason);
}

// Refusals that have yet to be posted.
bool Group::has_refusals() const {
  const auto refuses = [](const auto& command) { return command && command->tells(); };
  return refuses(running_) || std::any_of(queue_.begin(), queue_.end(), refuses);
}

void Group::close(TimePoint limit) {
  if (origin_.foreign()) return;
  std::map<std::string, std::shared_ptr<Attachment>> attached;
  {
    const std::lock_guard lock(mutex_);
    if (closing_.empty()) closing_ = "the process group was destroyed";
    attached = generation_.attached;
  }
  for (const auto& [key, thing] : attached) thing->close();  // also a start that waits inside one
  attached.clear();
  std::deque<std::shared_ptr<Command>> queue;
  std::exception_ptr error;
  {
    std::unique_lock lock(mutex_);
    // Other ranks that do not learn of its refusal would report this rank as lost.
    if (controlled != this || Simulation::current())
      idle_.wait_until(lock, std::min<TimePoint>(limit, Clock::now() + kKnown),
                       [this] { return !has_refusals(); });
    queue.swap(queue_);
    if (!error_)
      error_ =
          std::make_exception_ptr(group_error(identity_, ErrorKind::Aborted, closing_, {.phase = "connect"}));
    error = error_;
  }
  for (const auto& each : queue) each->begin(nullptr, error);
  end_left();
  if (const auto core = this->core()) core->shutdown();
  Generation generation(kept_);
  {
    std::unique_lock lock(mutex_);
    if (controlled != this || Simulation::current())
      idle_.wait_until(lock, std::max<TimePoint>(limit, Clock::now() + kLeastClose),
                       [this] { return !running_ && !has_thread_; });
    std::swap(generation, generation_);  // it may have come up meanwhile
  }
  if (generation.core) generation.core->shutdown();
}

Refusal::Refusal(const std::shared_ptr<Group>& group, int32_t lane, std::optional<int64_t> ordinal,
                 TimePoint deadline, std::string why, Told told)
    : Command(lane, ordinal, deadline, false), group_(group), why_(std::move(why)), told_(std::move(told)) {}

void Refusal::wait() {
  std::unique_lock lock(mutex_);
  over_.wait_until(lock, Clock::now() + kKnown, [this] { return is_over_; });
}

Command::Begun Refusal::begin(const std::shared_ptr<GroupCore>& core, const std::exception_ptr& error) {
  const Begun begun = tell(core, error != nullptr);
  if (begun == Begun::Again) return begun;
  const std::lock_guard lock(mutex_);
  is_over_ = true;
  over_.notify_all();
  return begun;
}

Command::Begun Refusal::tell(const std::shared_ptr<GroupCore>& core, bool failed) {
  const auto group = group_.lock();
  if (!group) return Begun::Done;
  if (told_.generation && (!core || told_.generation() != group->generation() || core->error()))
    return Begun::Done;
  if (core && lane != kNoLane) {
    core->refuse(call(), why_, told_.agreed);
    return group->left(core, call()) && !told_.generation ? Begun::Again : Begun::Done;
  }
  if (!core && !failed) {
    try {
      for (;;) {
        const RefusedMeeting said =
            refuse_meeting(group->next_generation().store, group->identity_.rank, meeting_for(call()), why_);
        if (said.counts) break;
        if (said.instead) group->note_refused(*said.instead);
      }
    } catch (const std::exception&) {
      // The store does not answer: the others wait to their limits.
    }
  }
  return Begun::Done;
}

}  // namespace meshcast
