#include "run/reporters.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

#include <unistd.h>

#include "common/thread_name.h"

namespace meshcast {
namespace {

constexpr auto kIdle = std::chrono::seconds(1);  // without anything to say, before a thread ends

std::mutex reporters_mutex;
std::weak_ptr<Reporters> reporters_of_process;  // guarded by reporters_mutex
pid_t made_in = 0;                              // likewise: a forked child has the object and no threads

bool is_held_up(const Reporting& who, TimePoint now) {
  const TimePoint since = who.waits_since();
  return since != TimePoint() && now - since >= Reporters::kStoreGrace;
}

}  // namespace

struct Reporters::State {
  std::mutex mutex;
  std::condition_variable changed;
  std::deque<std::shared_ptr<Reporting>> queue;
  std::vector<std::shared_ptr<Reporting>> running;  // one for each thread that is not idle
  size_t threads = 0;
  bool stopping = false;

  // The first in the queue whose connection nobody is at.
  auto next() {
    return std::find_if(queue.begin(), queue.end(), [this](const auto& who) {
      return std::none_of(running.begin(), running.end(),
                          [&](const auto& at) { return at->connection() == who->connection(); });
    });
  }

  bool all_held_up() const {
    const TimePoint now = Clock::now();
    return running.size() == threads &&
           std::all_of(running.begin(), running.end(), [&](const auto& at) { return is_held_up(*at, now); });
  }
};

std::shared_ptr<Reporters> Reporters::of_process() {
  const std::lock_guard lock(reporters_mutex);
  auto reporters = reporters_of_process.lock();
  if (reporters && made_in == getpid()) return reporters;
  reporters = std::make_shared<Reporters>();
  reporters_of_process = reporters;
  made_in = getpid();
  return reporters;
}

Reporters::Reporters() : pid_(getpid()), state_(std::make_shared<State>()) {}

Reporters::~Reporters() {
  if (getpid() != pid_) return;
  const std::lock_guard lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
}

bool Reporters::want(const std::shared_ptr<Reporting>& who) {
  if (getpid() != pid_) return false;
  const std::lock_guard lock(state_->mutex);
  auto& queue = state_->queue;
  if (std::find(queue.begin(), queue.end(), who) == queue.end()) queue.push_back(who);
  if (state_->next() == queue.end()) return true;  // behind one over the same connection
  if (state_->all_held_up()) {
    try {
      std::thread([state = state_] {
        name_this_thread("mc-report");
        serve(state);
      }).detach();
    } catch (const std::system_error&) {
      return false;  // it stays in the queue, for a thread that comes back or can be had later
    }
    ++state_->threads;
  } else {
    state_->changed.notify_all();
  }
  return true;
}

void Reporters::drop(const Reporting& who) {
  if (getpid() != pid_) return;
  const std::lock_guard lock(state_->mutex);
  std::erase_if(state_->queue, [&](const auto& each) { return each.get() == &who; });
}

bool Reporters::held_up(const void* connection) const {
  if (getpid() != pid_) return false;
  const std::lock_guard lock(state_->mutex);
  const TimePoint now = Clock::now();
  return std::any_of(state_->running.begin(), state_->running.end(),
                     [&](const auto& at) { return at->connection() == connection && is_held_up(*at, now); });
}

void Reporters::serve(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  const auto something = [&] { return state->stopping || state->next() != state->queue.end(); };
  while (state->changed.wait_for(lock, kIdle, something) && !state->stopping) {
    const auto next = state->next();
    auto who = std::move(*next);
    state->queue.erase(next);
    state->running.push_back(who);
    lock.unlock();
    who->report();
    lock.lock();
    std::erase(state->running, who);
    // Dropped without the lock: it may be the last to know it.
    lock.unlock();
    who.reset();
    lock.lock();
    state->changed.notify_all();  // for those over the same connection
  }
  --state->threads;
}

}  // namespace meshcast
