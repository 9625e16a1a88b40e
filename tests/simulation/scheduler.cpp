#include "simulation/scheduler.h"

#include <algorithm>
#include <iterator>
#include <optional>
#include <utility>

#include <cxxabi.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <ucontext.h>

#if defined(__SANITIZE_ADDRESS__)
#include <sanitizer/common_interface_defs.h>
#endif

#if defined(__SANITIZE_THREAD__)
// std::call_once has variables of the real thread, which simulated threads use in turn.
extern "C" __attribute__((visibility("default"))) const char* __tsan_default_suppressions() {
  return "race:_Prepare_execution\n";
}
#endif

namespace meshcast::simulation {
namespace {

constexpr size_t kStack = 256 * 1024;
thread_local Scheduler* active = nullptr;  // of this thread

// The exceptions that a thread is handling: of the real thread, so fibers swap them.
struct Handled {
  void* caught = nullptr;
  unsigned uncaught = 0;
};

class Stacks {
 public:
  ~Stacks() {
    for (void* const each : free_) munmap(each, kStack);
  }
  void* take() {
    if (!free_.empty()) {
      void* const found = free_.back();
      free_.pop_back();
      return found;
    }
    void* const made = mmap(nullptr, kStack, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (made == MAP_FAILED) throw std::bad_alloc();
    return made;
  }
  void give(void* stack) { free_.push_back(stack); }

 private:
  std::vector<void*> free_;
};
thread_local Stacks stacks;

}  // namespace

struct Scheduler::Fiber {
  uint64_t id = 0;
  uint64_t process = 0;
  std::function<void()> body;
  void* stack = nullptr;
  ucontext_t context{};
  Handled handled{};
  bool ended = false;
  size_t place = 0;  // among those that are ready
  bool ready = true;
  bool told = false;         // what it waited for has come
  const void* on = nullptr;  // a mutex, a condition, or a thread
  std::optional<std::multimap<TimePoint, Fiber*>::iterator> limit;
#if defined(__SANITIZE_ADDRESS__)
  void* fake_stack = nullptr;
#elif defined(__SANITIZE_THREAD__)
  void* sanitized = nullptr;
#endif

  ~Fiber() {
    if (!stack) return;
#if defined(__SANITIZE_THREAD__)
    __tsan_destroy_fiber(sanitized);
#endif
    stacks.give(stack);
  }
};

Scheduler::Scheduler(uint64_t seed) : random_(seed), main_(std::make_unique<Fiber>()), hub_(main_.get()) {
#if defined(__SANITIZE_THREAD__)
  main_->sanitized = __tsan_get_current_fiber();
  // As in a process with threads: else the standard library counts references without atomics.
  static const bool has_had_threads = (std::thread([] {}).join(), true);
  static_cast<void>(has_had_threads);
#endif
  active = this;
}

Scheduler::~Scheduler() { active = nullptr; }

int64_t Scheduler::draw(int64_t low, int64_t high) {
  const Unwatched unwatched;
  return low + static_cast<int64_t>(random_() % static_cast<uint64_t>(high - low + 1));
}

MESHCAST_UNWATCHED bool Scheduler::runs_here() const noexcept { return active == this && running_ != nullptr; }
MESHCAST_UNWATCHED TimePoint Scheduler::now() noexcept { return time_; }
MESHCAST_UNWATCHED uint64_t Scheduler::process() noexcept { return running_->process; }
void Scheduler::keep(std::shared_ptr<void> thing) {
  const Unwatched unwatched;
  kept_[running_->process].push_back(std::move(thing));
}

uint64_t Scheduler::start_in(uint64_t process, std::function<void()> body) {
  const Unwatched unwatched;
  hand_over(this);
  auto fiber = std::make_unique<Fiber>();
  fiber->id = next_++;
  fiber->process = process;
  fiber->body = std::move(body);
  fiber->stack = stacks.take();
  getcontext(&fiber->context);
  fiber->context.uc_stack.ss_sp = fiber->stack;
  fiber->context.uc_stack.ss_size = kStack;
  const auto at = reinterpret_cast<uintptr_t>(this);
  makecontext(&fiber->context, reinterpret_cast<void (*)()>(&Scheduler::enter), 2,
              static_cast<unsigned>(at >> 32), static_cast<unsigned>(at));
#if defined(__SANITIZE_THREAD__)
  fiber->sanitized = __tsan_create_fiber(0);
#endif
  const uint64_t id = fiber->id;
  fiber->place = ready_.size();
  ready_.push_back(fiber.get());
  fibers_.emplace(id, std::move(fiber));
  return id;
}

uint64_t Scheduler::start(std::function<void()> body) {
  const Unwatched unwatched;
  const uint64_t made = start_in(running_->process, std::move(body));
  yield();
  return made;
}

MESHCAST_UNWATCHED void Scheduler::enter(unsigned high, unsigned low) {
  auto& self = *reinterpret_cast<Scheduler*>(static_cast<uintptr_t>(high) << 32 | low);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(nullptr, nullptr, nullptr);
#endif
  Fiber& me = *self.running_;
  take_over(&self);
  self.live(me);
  hand_over(&self);
  self.switch_back();
}

void Scheduler::live(Fiber& me) {
  std::function<void()> body;
  {
    const Unwatched unwatched;
    body = std::move(me.body);
  }
  std::exception_ptr thrown;
  try {
    body();
    body = nullptr;
  } catch (...) {
    thrown = std::current_exception();
  }
  const Unwatched unwatched;
  if (thrown && !thrown_) thrown_ = thrown;
  me.ended = true;
  wake_all(&me);
}

MESHCAST_UNWATCHED void Scheduler::switch_to(Fiber& fiber) {
  ++hand_overs_;
  running_ = &fiber;
  auto& handled = *reinterpret_cast<Handled*>(abi::__cxa_get_globals());
  const Handled mine = handled;
  handled = fiber.handled;
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_start_switch_fiber(&hub_->fake_stack, fiber.stack, kStack);
#elif defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(fiber.sanitized, __tsan_switch_to_fiber_no_sync);
#endif
  swapcontext(&hub_->context, &fiber.context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(hub_->fake_stack, nullptr, nullptr);
#endif
  handled = mine;
  running_ = nullptr;
}

MESHCAST_UNWATCHED void Scheduler::switch_back() {
  Fiber& me = *running_;
  me.handled = *reinterpret_cast<Handled*>(abi::__cxa_get_globals());
#if defined(__SANITIZE_ADDRESS__)
  // The stack of the thread itself is known to the sanitizer already.
  __sanitizer_start_switch_fiber(me.ended ? nullptr : &me.fake_stack, nullptr, 0);
#elif defined(__SANITIZE_THREAD__)
  __tsan_switch_to_fiber(hub_->sanitized, __tsan_switch_to_fiber_no_sync);
#endif
  swapcontext(&me.context, &hub_->context);
#if defined(__SANITIZE_ADDRESS__)
  __sanitizer_finish_switch_fiber(me.fake_stack, nullptr, nullptr);
#endif
}

bool Scheduler::is_frozen(const Fiber& fiber) const {
  return !frozen_.empty() && std::find(frozen_.begin(), frozen_.end(), fiber.process) != frozen_.end();
}

Scheduler::Fiber* Scheduler::choose() {
  if (frozen_.empty()) return ready_.empty() ? nullptr : ready_[random_() % ready_.size()];
  std::vector<Fiber*> able;
  std::copy_if(ready_.begin(), ready_.end(), std::back_inserter(able),
               [this](const Fiber* each) { return !is_frozen(*each); });
  return able.empty() ? nullptr : able[random_() % able.size()];
}

// To the next moment at which something happens by itself. False where there is none.
bool Scheduler::advance(TimePoint limit) {
  TimePoint next = events_.empty() ? TimePoint::max() : events_.begin()->first;
  const auto first = std::find_if(limits_.begin(), limits_.end(),
                                  [this](const auto& each) { return !is_frozen(*each.second); });
  if (first != limits_.end()) next = std::min(next, first->first);
  if (next == TimePoint::max()) return false;
  time_ = std::max(time_, next);
  if (time_ > limit)
    throw Violation(fmt::format("after {} s of virtual time threads still wait",
                                std::chrono::duration_cast<std::chrono::seconds>(elapsed()).count()));
  return true;
}

void Scheduler::run(Clock::duration duration) {
  const Unwatched unwatched;
  const TimePoint limit = time_ + duration;
  for (;;) {
    while (!events_.empty() && events_.begin()->first <= time_) {
      const auto event = std::move(events_.begin()->second);
      events_.erase(events_.begin());
      event();
    }
    while (!limits_.empty() && limits_.begin()->first <= time_) wake(*limits_.begin()->second, false);
    Fiber* const next = choose();
    if (next) {
      time_ += std::chrono::microseconds(draw(1, 5));
      switch_to(*next);
      if (next->ended) {
        leave_ready(*next);
        fibers_.erase(next->id);
      }
      if (thrown_) std::rethrow_exception(std::exchange(thrown_, nullptr));
    } else if (fibers_.empty()) {
      take_over(this);
      return;
    } else if (!advance(limit)) {
      throw Violation(fmt::format("{} threads wait for ever", fibers_.size()));
    }
  }
}

MESHCAST_UNWATCHED bool Scheduler::block(const void* on, TimePoint limit) {
  Fiber& me = *running_;
  park(me, on, limit);
  switch_back();
  return me.told;
}

void Scheduler::leave_ready(const Fiber& fiber) {
  Fiber* const last = ready_.back();
  ready_[fiber.place] = last;
  last->place = fiber.place;
  ready_.pop_back();
}

void Scheduler::park(Fiber& me, const void* on, TimePoint limit) {
  const Unwatched unwatched;
  me.on = on;
  me.ready = me.told = false;
  leave_ready(me);
  if (on) waiting_[on].push_back(&me);
  if (limit != TimePoint::max()) me.limit = limits_.emplace(limit, &me);
}

void Scheduler::wake(Fiber& fiber, bool told) {
  const Unwatched unwatched;
  if (fiber.on) {
    const auto found = waiting_.find(fiber.on);
    std::erase(found->second, &fiber);
    if (found->second.empty()) waiting_.erase(found);
  }
  if (fiber.limit) limits_.erase(*fiber.limit);
  fiber.limit.reset();
  fiber.on = nullptr;
  fiber.ready = true;
  fiber.told = told;
  fiber.place = ready_.size();
  ready_.push_back(&fiber);
}

void Scheduler::wake_all(const void* on) {
  for (auto found = waiting_.find(on); found != waiting_.end(); found = waiting_.find(on))
    wake(*found->second.back(), true);
}

void Scheduler::yield() { switch_back(); }

void Scheduler::lock(const Mutex& mutex) {
  const Unwatched unwatched;
  if (chance(8)) yield();
  while (std::find(held_.begin(), held_.end(), &mutex) != held_.end()) block(&mutex, TimePoint::max());
  held_.push_back(&mutex);
}

void Scheduler::unlock(const Mutex& mutex) noexcept {
  const Unwatched unwatched;
  held_.erase(std::find(held_.begin(), held_.end(), &mutex));
  wake_all(&mutex);
}

bool Scheduler::wait(const Condition& condition, TimePoint limit) {
  const Unwatched unwatched;
  if (limit <= time_) {
    yield();
    return false;
  }
  if (chance(50)) {  // as the standard allows
    yield();
    return true;
  }
  return block(&condition, limit);
}

void Scheduler::notify(const Condition& condition, bool all) noexcept {
  const Unwatched unwatched;
  if (all) return wake_all(&condition);
  const auto found = waiting_.find(&condition);
  if (found != waiting_.end()) wake(*found->second[random_() % found->second.size()], true);
}

void Scheduler::sleep_until(TimePoint limit) {
  const Unwatched unwatched;
  if (limit <= time_) return yield();
  block(nullptr, limit);
}

void Scheduler::join(uint64_t thread) {
  const Unwatched unwatched;
  for (auto other = fibers_.find(thread); other != fibers_.end() && !other->second->ended;
       other = fibers_.find(thread))
    block(other->second.get(), TimePoint::max());
  take_over(this);
}

uint64_t Scheduler::thread() const { return running_->id; }

void Scheduler::freeze(uint64_t process) {
  const Unwatched unwatched;
  frozen_.push_back(process);
  if (running_ && running_->process == process) yield();
}

void Scheduler::thaw(uint64_t process) { std::erase(frozen_, process); }

void Scheduler::at(TimePoint when, std::function<void()> event) {
  const Unwatched unwatched;
  events_.emplace(when, std::move(event));
}

}  // namespace meshcast::simulation
