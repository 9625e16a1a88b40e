#include "run/executor.h"

#include <algorithm>
#include <cstdio>
#include <deque>
#include <exception>
#include <list>
#include <mutex>
#include <system_error>
#include <utility>

#include "common/error.h"
#include "common/of_process.h"
#include "common/sync.h"
#include "common/thread_name.h"

namespace meshcast {
namespace {

constexpr auto kIdle = std::chrono::seconds(1);  // how long an idle thread lives
// A callback that computes takes less, as a rule; one that waits for a call rarely does.
constexpr std::chrono::milliseconds kCallbackPatience(5);

OfProcess<Executor> callbacks_of_process;
[[gnu::used]] std::shared_ptr<Executor>* kept_callbacks = nullptr;  // never freed, and never read

}  // namespace

struct Executor::State {
  struct Task {
    std::function<void()> run;
    const void* key = nullptr;
  };
  struct Running {
    const void* key = nullptr;
    TimePoint begun;
  };

  State(const char* name, std::chrono::milliseconds patience) : name(name), patience(patience) {}

  const char* const name;
  const std::chrono::milliseconds patience;

  Mutex mutex;
  Condition changed;   // for threads that have no task
  Condition finished;  // for finish()
  std::deque<Task> queue;
  std::list<Running> running;
  size_t threads = 0;
  size_t reserved = 0;
  bool stopping = false;  // end once no task is left
  bool closed = false;    // begins nothing more

  // The first task in the queue that may run together with the running ones.
  auto next() {
    return std::find_if(queue.begin(), queue.end(), [this](const Task& task) {
      return task.key == nullptr || std::none_of(running.begin(), running.end(),
                                                 [&](const Running& at) { return at.key == task.key; });
    });
  }

  // The time from which on all running tasks count as blocked.
  TimePoint relief() const {
    TimePoint latest = TimePoint::min();
    for (const Running& at : running) latest = std::max(latest, at.begun + patience);
    return latest;
  }

  // Makes a thread look at the queue: at once, or when the running tasks count as blocked. False if none will
  // before one of them has ended.
  static bool call(const std::shared_ptr<State>& state) {
    if (state->closed) return false;
    if (state->next() == state->queue.end()) return true;
    if (state->threads > state->running.size()) {
      state->changed.notify_one();
      return true;
    }
    try {
      start(state);
      return true;
    } catch (const std::system_error&) {
      return false;
    }
  }

  static void start(const std::shared_ptr<State>& state) {
    Thread([state] {
      name_this_thread(state->name);
      serve(state);
    }).detach();
    ++state->threads;
  }
};

// Made again in a forked child. Never freed: a thread that ends a run as the process ends may still post.
Executor& Executor::of_process() {
  auto found = callbacks_of_process.there();
  if (!found) {
    found = callbacks_of_process.get([] {
      auto made = std::make_shared<Executor>("mc-callback", kCallbackPatience);
      if (Simulation* const simulation = Simulation::current()) {
        simulation->keep(made);
      } else {
        kept_callbacks = new std::shared_ptr<Executor>(made);
      }
      return made;
    });
  }
  return *found;
}

Executor::Executor(const char* name, std::chrono::milliseconds patience)
    : state_(std::make_shared<State>(name, patience)) {}

Executor::~Executor() {
  if (origin_.foreign()) return;
  const std::lock_guard lock(state_->mutex);
  state_->stopping = true;
  state_->changed.notify_all();
}

bool Executor::post(std::function<void()> task, const void* key) {
  if (origin_.foreign()) return false;
  const std::lock_guard lock(state_->mutex);
  state_->queue.push_back({std::move(task), key});
  State::call(state_);
  return state_->threads > 0;
}

bool Executor::try_post(std::function<void()> task) {
  if (origin_.foreign()) return false;
  State::Task refused;  // freed without the lock
  const std::lock_guard lock(state_->mutex);
  state_->queue.push_back({std::move(task), nullptr});
  if (State::call(state_)) return true;
  refused = std::move(state_->queue.back());
  state_->queue.pop_back();
  return false;
}

bool Executor::call() {
  if (origin_.foreign()) return false;
  const std::lock_guard lock(state_->mutex);
  State::call(state_);
  return state_->threads > 0;
}

std::shared_ptr<void> Executor::reserve() {
  origin_.check();
  const std::lock_guard lock(state_->mutex);
  try {
    if (state_->threads == 0 && !state_->closed) State::start(state_);
  } catch (const std::system_error& error) {
    throw Error(ErrorKind::Generic, no_thread("callbacks of futures", error));
  }
  ++state_->reserved;
  return {nullptr, [state = state_, origin = origin_](std::nullptr_t) {
            if (origin.foreign()) return;
            const std::lock_guard lock(state->mutex);
            --state->reserved;
          }};
}

void Executor::finish(TimePoint limit) {
  if (origin_.foreign()) return;
  std::unique_lock lock(state_->mutex);
  state_->finished.wait_until(lock, limit, [&] { return state_->queue.empty() && state_->running.empty(); });
  state_->closed = true;
  state_->changed.notify_all();
}

size_t Executor::threads() const {
  const std::lock_guard lock(state_->mutex);
  return state_->threads;
}

void Executor::serve(const std::shared_ptr<State>& state) {
  std::unique_lock lock(state->mutex);
  TimePoint idle_since = Clock::now();
  while (!state->closed) {
    const auto next = state->next();
    const TimePoint now = Clock::now();
    if (next == state->queue.end() || now < state->relief()) {
      const bool idle = next == state->queue.end();
      if (idle && state->stopping) break;
      if (idle && now - idle_since >= kIdle && (state->threads > 1 || state->reserved == 0)) break;
      state->changed.wait_until(lock, idle ? now + kIdle : state->relief());
      continue;
    }
    State::Task task = std::move(*next);
    state->queue.erase(next);
    const auto me = state->running.insert(state->running.end(), {task.key, now});
    State::call(state);  // a thread to replace this one if it is blocked
    lock.unlock();
    try {
      task.run();
    } catch (const std::exception& error) {
      // From C++: exceptions of Python stay in the future that then() made.
      std::fprintf(stderr, "meshcast: a task of %s raised: %s\n", state->name, error.what());
    }
    task.run = nullptr;  // its contents are freed without the lock
    lock.lock();
    state->running.erase(me);
    if (state->queue.empty() && state->running.empty()) state->finished.notify_all();
    idle_since = Clock::now();
  }
  --state->threads;
}

}  // namespace meshcast
