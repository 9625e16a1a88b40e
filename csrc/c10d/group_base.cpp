#include "c10d/group_base.h"

#include <fmt/format.h>

#include "c10d/tensor_memory.h"

namespace meshcast {

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
  ErrorContext context;
  context.rank = identity_.rank;
  context.op = "reshard";
  context.phase = "start";
  return {kind, text, context};
}

std::exception_ptr GroupBase::shut_down_error() const {
  return std::make_exception_ptr(start_error(
      ErrorKind::Aborted, fmt::format("rank {}: group {} was shut down", identity_.rank, identity_.name)));
}

GroupBase::Taken GroupBase::take(const PlanDirection& direction, const StartArgs& args) {
  const size_t n = direction.plan->problems.size();
  if (args.source.size() != n || args.destination.size() != n)
    throw LayoutError(fmt::format("the plan has {} tensors, given are {} sources and {} destinations", n,
                                  args.source.size(), args.destination.size()));
  Taken out;
  for (size_t i = 0; i < n; ++i) {
    const auto& src = args.source[i];
    const auto& dst = args.destination[i];
    out.types.push_back(checked_type(src, direction.tensors.reductions[i], i));
    refuse_overlap(src, dst, i);
    if (src) out.kept.push_back(*src);
    if (dst) out.kept.push_back(*dst);
    if (dst) out.outputs.push_back(*dst);
  }
  return out;
}

}  // namespace meshcast
