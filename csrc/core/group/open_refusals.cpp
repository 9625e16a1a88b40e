#include "group/open_refusals.h"

#include <algorithm>
#include <chrono>
#include <sstream>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "group/group.h"
#include "run/executor.h"

namespace meshcast {
namespace {

using std::chrono::milliseconds;

constexpr auto kFirstPause = milliseconds(10);  // between two looks for ranks that wait
constexpr auto kLongestPause = milliseconds(50);
constexpr auto kHold = milliseconds(600);        // the wait of a refusing rank for ranks that wait for it
constexpr auto kCloseLimit = milliseconds(500);  // granted to a search when its process group ends
constexpr const char* kMeeting = "meeting";      // topic of which groups meet
constexpr const char* kPrepare = "prepare";
constexpr const char* kCall = "call";

}  // namespace

OpenRefusal::OpenRefusal(std::string why, std::vector<int32_t> known, bool prepares, double timeout_seconds)
    : why_(std::move(why)),
      known_(std::move(known)),
      prepares_(prepares),
      timeout_seconds_(timeout_seconds),
      deadline_(deadline_after(timeout_seconds)) {}

bool OpenRefusal::fits(const std::vector<int32_t>& ranks) const {
  return std::includes(ranks.begin(), ranks.end(), known_.begin(), known_.end());
}

void OpenRefusal::tell(Group& group) {
  auto told = group.refuse_next(prepares_ ? kNoLane : 0, why_, timeout_seconds_);
  const std::lock_guard lock(mutex_);
  told_ = std::move(told);
  changed_.notify_all();
}

std::shared_ptr<Refusal> OpenRefusal::told_by(TimePoint limit) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, limit, [this] { return told_ != nullptr; });
  return told_;
}

OpenRefusals::OpenRefusals(std::vector<int32_t> ranks, int32_t rank, std::shared_ptr<Site> site)
    : ranks_(std::move(ranks)), rank_(rank), control_(control_executor()), site_(std::move(site)) {}

void OpenRefusals::know(const std::shared_ptr<Group>& group) {
  const std::lock_guard lock(mutex_);
  std::erase_if(groups_, [](const auto& each) { return each.expired(); });
  groups_.push_back(group);
}

void OpenRefusals::refuse(const std::shared_ptr<OpenRefusal>& refusal,
                          const std::vector<std::shared_ptr<OpenRefusals>>& where) {
  for (const auto& each : where) each->add(refusal, where.size() == 1);
  auto told = refusal->told_by(Clock::now() + kHold);
  if (!told && !refusal->prepares_) {
    std::vector<std::pair<OpenRefusals*, std::shared_ptr<Group>>> meant;
    for (const auto& each : where)
      for (const auto& group : each->fitting(*refusal))
        if (group->was_used()) meant.emplace_back(each.get(), group);
    if (meant.size() == 1 && meant.front().second->is_up())
      meant.front().first->tell(*refusal, *meant.front().second);
    told = refusal->told_by(Clock::now());
  }
  if (told) told->wait();
}

void OpenRefusals::add(const std::shared_ptr<OpenRefusal>& refusal, bool keeps) {
  const std::lock_guard lock(mutex_);
  if (!site_) return;
  open_.push_back({refusal, keeps});
  if (keeps) keeps_any_ = true;
  ++added_;
  changed_.notify_all();
  // Without a thread, the next call notifies them.
  if (!searches_) searches_ = control_->try_post([self = shared_from_this()] { self->search(); });
}

void OpenRefusals::search() {
  Clock::duration pause = kFirstPause;
  for (uint64_t added = 0;;) {
    std::vector<std::shared_ptr<OpenRefusal>> refusals;
    {
      std::unique_lock lock(mutex_);
      if (std::exchange(added, added_) != added_) pause = kFirstPause;
      changed_.wait_until(lock, Clock::now() + pause, [&] { return !site_ || added_ != added; });
      const TimePoint now = Clock::now();
      for (const Open& each : open_)
        if (each.refusal->is_open() && now < each.refusal->deadline_) refusals.push_back(each.refusal);
      if (!site_ || refusals.empty()) {
        searches_ = false;
        changed_.notify_all();
        return;
      }
    }
    try {
      look_for(refusals);
    } catch (const std::exception&) {
      // The store does not answer, or the process group has ended: the next call notifies them.
      const std::lock_guard lock(mutex_);
      searches_ = false;
      changed_.notify_all();
      return;
    }
    pause = std::min<Clock::duration>(pause * 3 / 2, kLongestPause * static_cast<int64_t>(crowd()));
  }
}

void OpenRefusals::look_for(const std::vector<std::shared_ptr<OpenRefusal>>& refusals) {
  const auto meetings = others_meetings();
  for (const auto& refusal : refusals)
    if (const auto group = awaiting(*refusal, meetings)) tell(*refusal, *group);
}

// A group in which a rank waits for this one; null if there is none.
std::shared_ptr<Group> OpenRefusals::awaiting(const OpenRefusal& refusal,
                                              const std::vector<Meeting>& meetings) const {
  if (!refusal.prepares_)
    for (auto& group : fitting(refusal))
      if (group->is_awaited()) return group;
  for (const Meeting& each : meetings) {
    const auto& ranks = each.ranks;
    if (each.prepares != refusal.prepares_ || !refusal.fits(ranks)) continue;
    if (std::find(ranks.begin(), ranks.end(), rank_) == ranks.end()) continue;
    auto group = site()->group_of(ranks);
    if (group->is_untouched() || (!refusal.prepares_ && group->is_over())) return group;
  }
  return nullptr;
}

std::vector<std::shared_ptr<Group>> OpenRefusals::fitting(const OpenRefusal& refusal) const {
  std::vector<std::shared_ptr<Group>> out;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& each : groups_) out.push_back(each.lock());
  }
  // Without the lock: the last reference to a group also frees what a layer above keeps with it.
  std::erase_if(out, [&](const auto& group) {
    return !group || !group->has(rank_) || !refusal.fits(group->identity().ranks);
  });
  return out;
}

void OpenRefusals::tell(OpenRefusal& refusal, Group& group) {
  const std::lock_guard in_order(order_);
  if (refusal.claim()) refusal.tell(group);
  forget_closed();
}

void OpenRefusals::tell_open(Group& group) {
  const std::lock_guard in_order(order_);
  std::vector<std::shared_ptr<OpenRefusal>> meant;
  {
    const std::lock_guard lock(mutex_);
    for (const Open& each : open_)
      if (each.keeps && each.refusal->fits(group.identity().ranks)) meant.push_back(each.refusal);
  }
  for (const auto& refusal : meant) {
    if (refusal->prepares_ && !group.is_untouched()) continue;  // another group was to be prepared
    if (refusal->claim()) refusal->tell(group);
  }
  forget_closed();
}

void OpenRefusals::forget_closed() {
  const std::lock_guard lock(mutex_);
  const TimePoint now = Clock::now();
  std::erase_if(open_, [now](const Open& each) {
    const bool stays = each.keeps && !each.refusal->prepares_;  // no rank waits in prepare() for longer
    return !each.refusal->is_open() || (!stays && now >= each.refusal->deadline_);
  });
  keeps_any_ = std::any_of(open_.begin(), open_.end(), [](const Open& each) { return each.keeps; });
}

void OpenRefusals::meets(const std::vector<int32_t>& ranks, bool prepares) {
  const std::lock_guard lock(meetings_mutex_);
  if (is_closed()) return;
  meetings_[ranks] = prepares;
  write_meetings();
}

void OpenRefusals::has_met(const std::vector<int32_t>& ranks) {
  const std::lock_guard lock(meetings_mutex_);
  if (meetings_.erase(ranks) == 0) return;
  try {
    write_meetings();
  } catch (const std::exception&) {
    // The store has failed, or the process group has ended.
  }
}

// A line for each: the purpose of the meeting, and its ranks.
void OpenRefusals::write_meetings() {
  if (meetings_.empty()) return conversation().forget(kMeeting);
  std::string text;
  for (const auto& [ranks, prepares] : meetings_)
    text += fmt::format("{} {}\n", prepares ? kPrepare : kCall, fmt::join(ranks, " "));
  conversation().say(kMeeting, text);
}

std::vector<OpenRefusals::Meeting> OpenRefusals::others_meetings() const {
  std::vector<Meeting> out;
  Conversation board = conversation();
  for (const int32_t other : ranks_) {
    if (other == rank_) continue;
    std::istringstream lines(board.heard(kMeeting, other).value_or(""));
    for (std::string line; std::getline(lines, line);) {
      std::istringstream words(line);
      std::string what;
      words >> what;
      Meeting meeting{{}, what == kPrepare};
      for (int32_t rank = 0; words >> rank;) meeting.ranks.push_back(rank);
      out.push_back(std::move(meeting));
    }
  }
  return out;
}

Conversation OpenRefusals::conversation() const { return Conversation(site()->store(), rank_, ranks_.size()); }

bool OpenRefusals::is_closed() const {
  const std::lock_guard lock(mutex_);
  return !site_;
}

std::shared_ptr<OpenRefusals::Site> OpenRefusals::site() const {
  const std::lock_guard lock(mutex_);
  if (!site_) throw Error(ErrorKind::Aborted, "the process group was destroyed");
  return site_;
}

// This rank makes no more calls: notifies the others in each group that can have been meant.
void OpenRefusals::tell_left() {
  const std::lock_guard in_order(order_);
  std::vector<std::shared_ptr<OpenRefusal>> left;
  {
    const std::lock_guard lock(mutex_);
    for (const Open& each : open_)
      if (each.keeps && !each.refusal->prepares_ && each.refusal->claim()) left.push_back(each.refusal);
  }
  for (const auto& refusal : left)
    for (const auto& group : fitting(*refusal))
      if (group->was_used()) refusal->tell(*group);
}

void OpenRefusals::close() {
  if (keeps_any_) tell_left();
  std::shared_ptr<Site> site;  // freed without the lock
  std::unique_lock lock(mutex_);
  site.swap(site_);
  open_.clear();
  keeps_any_ = false;
  changed_.notify_all();
  changed_.wait_until(lock, Clock::now() + kCloseLimit, [this] { return !searches_; });
  lock.unlock();
}

}  // namespace meshcast
