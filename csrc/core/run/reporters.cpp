#include "run/reporters.h"

#include <algorithm>
#include <utility>

#include "common/of_process.h"

namespace meshcast {
namespace {

OfProcess<Reporters> reporters_of_process;

}  // namespace

std::shared_ptr<Reporters> Reporters::of_process() {
  return reporters_of_process.get([] { return std::make_shared<Reporters>(); });
}

Reporters::Reporters() : state_(std::make_shared<State>()), threads_("mc-report", kStoreGrace) {}

bool Reporters::want(const std::shared_ptr<Reporting>& who) {
  if (origin_.foreign()) return false;
  {
    const std::lock_guard lock(state_->mutex);
    auto& wanted = state_->wanted;
    if (std::find(wanted.begin(), wanted.end(), who) != wanted.end()) return threads_.call();
    wanted.push_back(who);
  }
  return threads_.post([state = state_, who = std::weak_ptr(who)] { report(*state, who); }, who->connection());
}

void Reporters::drop(const Reporting& who) {
  if (origin_.foreign()) return;
  const std::lock_guard lock(state_->mutex);
  std::erase_if(state_->wanted, [&](const auto& each) { return each.get() == &who; });
}

bool Reporters::held_up(const void* connection) const {
  if (origin_.foreign()) return false;
  const std::lock_guard lock(state_->mutex);
  const TimePoint now = Clock::now();
  return std::any_of(state_->running.begin(), state_->running.end(), [&](const auto& at) {
    const TimePoint since = at->waits_since();
    return at->connection() == connection && since != TimePoint() && now - since >= kStoreGrace;
  });
}

void Reporters::report(State& state, const std::weak_ptr<Reporting>& wanting) {
  const auto who = wanting.lock();
  {
    const std::lock_guard lock(state.mutex);
    if (!who || std::erase(state.wanted, who) == 0) return;  // dropped
    state.running.push_back(who);
  }
  who->report();
  const std::lock_guard lock(state.mutex);
  std::erase(state.running, who);
}

}  // namespace meshcast
