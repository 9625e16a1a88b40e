#include "group/group_base.h"

#include <chrono>

#include <fmt/format.h>

#include "common/of_process.h"
#include "run/executor.h"

namespace meshcast {
namespace {

// About how long a command takes if the other ranks have come to it. A slower one waits for them.
constexpr auto kPatience = std::chrono::milliseconds(2);

OfProcess<Executor> control_of_process;

}  // namespace

std::shared_ptr<Executor> control_executor() {
  return control_of_process.get([] { return std::make_shared<Executor>("mc-control", kPatience); });
}

void GroupBase::abort(const std::string& reason) {
  if (!origin_.foreign() && !failure()) watcher_->abort(reason);
}

std::optional<std::string> GroupBase::error() const {
  origin_.check();
  const auto cause = failure();
  if (!cause) return std::nullopt;
  return text_of(cause);
}

std::optional<RefusedCall> GroupBase::refused() const {
  origin_.check();
  return failure() ? watcher_->refused() : std::nullopt;
}

void GroupBase::refuse_if_failed() const {
  origin_.check();
  const auto cause = failure();
  if (!cause) return;
  throw start_error(
      ErrorKind::Aborted,
      fmt::format("rank {}: group {} was aborted by an earlier failure: {}. Destroy the process group and "
                  "build it again.",
                  identity_.rank, identity_.name, text_of(cause)));
}

Error GroupBase::start_error(ErrorKind kind, const std::string& text) const {
  return group_error(identity_, kind, text, {.op = "reshard", .phase = "start"});
}

std::exception_ptr GroupBase::shut_down_error() const {
  return std::make_exception_ptr(start_error(
      ErrorKind::Aborted, fmt::format("rank {}: group {} was shut down", identity_.rank, identity_.name)));
}

}  // namespace meshcast
