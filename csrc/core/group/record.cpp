#include "group/record.h"

#include <algorithm>
#include <atomic>

#include <fmt/format.h>

#include "common/of_process.h"
#include "run/executor.h"

namespace meshcast {
namespace {

constexpr size_t kKeptFlights = 2000;

PerProcess<Record> record_of_process;

std::atomic<void (*)(const LongWait&)> wait_notifier{nullptr};
std::atomic<Clock::duration::rep> long_wait_ticks{0};

}  // namespace

CallSums& CallSums::operator+=(const CallSums& other) {
  calls += other.calls;
  failed += other.failed;
  retries += other.retries;
  messages += other.messages;
  bytes_sent += other.bytes_sent;
  bytes_received += other.bytes_received;
  seconds += other.seconds;
  waited += other.waited;
  bound += other.bound;
  moving_seconds += other.moving_seconds;
  return *this;
}

Record& Record::of_process() { return record_of_process.get(); }

std::vector<std::shared_ptr<const Flight>> Record::flights() const {
  const std::lock_guard lock(mutex_);
  return {flights_.begin(), flights_.end()};
}

int64_t Record::begun() const {
  const std::lock_guard lock(mutex_);
  return begun_;
}

Counted Record::counted() const {
  const std::lock_guard lock(mutex_);
  Counted out = closed_;
  for (const Traffic* each : open_) each->add_to(out);
  return out;
}

Traffic& Record::traffic_of(const std::string& op) {
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = operations_.find(op); found != operations_.end()) return *found->second;
  }
  auto made = std::make_shared<Traffic>(op);
  std::shared_ptr<Traffic> spare;  // freed without the lock, which its destructor takes
  const std::lock_guard lock(mutex_);
  auto& kept = operations_[op];
  if (kept) {
    spare = std::move(made);
  } else {
    kept = std::move(made);
  }
  return *kept;
}

Traffic::Traffic(std::string op, double bound, int32_t rank, std::vector<Moved> moved)
    : op_(std::move(op)), bound_(bound), rank_(rank), moved_(std::move(moved)), record_(Record::of_process()) {
  const std::lock_guard lock(record_.mutex_);
  record_.open_.insert(this);
}

Traffic::~Traffic() {
  if (record_.origin_.foreign()) return;
  const std::lock_guard lock(record_.mutex_);
  record_.open_.erase(this);
  add_to(record_.closed_);
}

void Traffic::ended(double seconds, double waited) {
  const std::lock_guard lock(record_.mutex_);
  ++sums_.calls;
  sums_.seconds += seconds;
  sums_.waited += waited;
}

void Traffic::waited(double seconds) {
  const std::lock_guard lock(record_.mutex_);
  sums_.waited += seconds;
}

void Traffic::failed() {
  const std::lock_guard lock(record_.mutex_);
  ++sums_.failed;
}

void Traffic::again() {
  const std::lock_guard lock(record_.mutex_);
  ++sums_.retries;
}

bool Traffic::only_sends() const {
  return std::all_of(moved_.begin(), moved_.end(), [&](const Moved& each) { return each.sender == rank_; });
}

std::string Traffic::text() const {
  int64_t sent = 0;
  int64_t received = 0;
  for (const Moved& each : moved_) (each.sender == rank_ ? sent : received) += each.nbytes;
  return fmt::format("sends {} B, receives {} B", sent, received);
}

void Traffic::add_to(Counted& counted) const {
  if (sums_.calls == 0 && sums_.failed == 0 && sums_.retries == 0) return;
  CallSums sums = sums_;
  sums.bound = static_cast<double>(sums.calls) * bound_;
  sums.moving_seconds = bound_ > 0 ? sums.seconds : 0;
  for (const Moved& each : moved_) {
    CallSums pair = sums;
    pair.messages = sums.calls * each.messages;
    pair.bytes_sent = sums.calls * each.nbytes;
    counted.pairs[{each.sender, each.receiver}] += pair;
  }
  for (const Moved& each : moved_) {
    sums.messages += sums.calls * each.messages;
    (each.sender == rank_ ? sums.bytes_sent : sums.bytes_received) += sums.calls * each.nbytes;
  }
  counted.calls[op_] += sums;
}

std::shared_ptr<Flight> Flight::add(std::string op, std::shared_ptr<const Members> group, int32_t rank,
                                    std::shared_ptr<const std::string> what, Site site) {
  Record& record = Record::of_process();
  auto made =
      std::make_shared<Flight>(record, std::move(op), std::move(group), rank, std::move(what), std::move(site));
  std::shared_ptr<const Flight> oldest;  // freed without the lock: its site may be anything
  const std::lock_guard lock(record.mutex_);
  if (record.flights_.size() == kKeptFlights) {
    oldest = std::move(record.flights_.front());
    record.flights_.pop_front();
  }
  record.flights_.push_back(made);
  ++record.begun_;
  return made;
}

Flight::Flight(Record& record, std::string op, std::shared_ptr<const Members> group, int32_t rank,
               std::shared_ptr<const std::string> what, Site site)
    : op(std::move(op)),
      group(std::move(group)),
      rank(rank),
      what(std::move(what)),
      site(std::move(site)),
      begun(std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count()),
      clock(Clock::now()),
      record_(record) {}

double Flight::elapsed() const { return std::chrono::duration<double>(Clock::now() - clock).count(); }

void Flight::counted_as(int32_t lane, int64_t position, std::weak_ptr<Start> call) {
  const std::lock_guard lock(record_.mutex_);
  progress_.lane = lane;
  progress_.position = position;
  progress_.call = std::move(call);
}

void Flight::settled(int64_t run, std::shared_ptr<void> facts, std::shared_ptr<Traffic> traffic) {
  // What is replaced is freed without the lock.
  const std::lock_guard lock(record_.mutex_);
  if (run >= 0) {
    progress_.run = run;
    progress_.facts.swap(facts);
  }
  if (traffic) progress_.traffic.swap(traffic);
}

bool Flight::ended(std::optional<TimePoint> waiting, std::optional<double> moved) {
  bool counts = false;
  double seconds = 0;
  {
    const std::lock_guard lock(record_.mutex_);
    if (progress_.seconds) return false;
    progress_.seconds = seconds = elapsed();
    progress_.call.reset();  // else the memory of 2,000 ended calls is kept
    counts = !std::exchange(counted_, true);
  }
  const double waited = waiting ? std::chrono::duration<double>(Clock::now() - *waiting).count() : seconds;
  counts ? traffic().ended(moved.value_or(seconds), waited) : traffic().waited(waited);
  return true;
}

void Flight::ended_unwaited(double moved) {
  {
    const std::lock_guard lock(record_.mutex_);
    if (std::exchange(counted_, true)) return;
  }
  traffic().ended(moved, 0);
}

bool Flight::failed(Failure failure) {
  {
    const std::lock_guard lock(record_.mutex_);
    if (progress_.failure) return false;
    progress_.seconds = elapsed();
    progress_.call.reset();
    progress_.failure = std::move(failure);
  }
  failed_unwaited();
  return true;
}

void Flight::failed_unwaited() {
  {
    const std::lock_guard lock(record_.mutex_);
    if (std::exchange(counted_, true)) return;
  }
  traffic().failed();
}

void Flight::again() { traffic().again(); }

Flight::Progress Flight::progress() const {
  const std::lock_guard lock(record_.mutex_);
  return progress_;
}

Traffic& Flight::traffic() {
  {
    const std::lock_guard lock(record_.mutex_);
    if (progress_.traffic) return *progress_.traffic;
  }
  return record_.traffic_of(op);
}

void notify_of_long_waits(void (*notify)(const LongWait& wait), double seconds) {
  wait_notifier = notify;
  long_wait_ticks = std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)).count();
}

bool WaitNotice::is_due(TimePoint now) const {
  const auto lasts = long_wait_ticks.load(std::memory_order_relaxed);
  return lasts > 0 && !posted_ && (now - begun_).count() >= lasts;
}

// The user's log may block: no wait of ours depends on it.
void WaitNotice::post(LongWait wait) {
  posted_ = true;
  std::erase(wait.ranks, wait.rank);  // a store may have lost this rank's signature
  wait.seconds = std::chrono::duration<double>(Clock::now() - begun_).count();
  Executor::of_process().post([wait = std::move(wait)] {
    if (auto* const notify = wait_notifier.load()) notify(wait);
  });
}

}  // namespace meshcast
