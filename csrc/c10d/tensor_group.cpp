#include "c10d/tensor_group.h"

#include <utility>

#include <fmt/format.h>

#include "c10d/tensor_memory.h"
#include "common/error.h"

namespace meshcast {

TakenTensors take_tensors(const PlanDirection& direction, const StartArgs& args) {
  const size_t n = direction.plan->problems.size();
  if (args.source.size() != n || args.destination.size() != n)
    throw LayoutError(fmt::format("the plan has {} tensors, given are {} sources and {} destinations", n,
                                  args.source.size(), args.destination.size()));
  TakenTensors out;
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

void TensorGroup::shutdown() {
  GroupCore::shutdown();
  bin_->empty();
}

c10::intrusive_ptr<c10d::Work> TensorGroup::start_tensors(const AgreedPlan& agreed, StartArgs args) {
  TakenTensors taken;
  const auto buffers_for = [&](const PlanDirection& direction) {
    bin_->empty();
    taken = take_tensors(direction, args);
    Buffers buffers;
    for (size_t i = 0; i < args.source.size(); ++i) {
      const int64_t element_bytes = direction.plan->problems[i].element_bytes;
      buffers.source.push_back(
          source_memory(args.source[i], direction.tensors.source_shapes[i], element_bytes, i));
      buffers.destination.push_back(
          destination_memory(args.destination[i], direction.tensors.destination_shapes[i], element_bytes, i));
    }
    buffers.types = std::move(taken.types);
    if (!args.nans.empty() && args.nans.size() != args.source.size())
      throw LayoutError("digests are taken of all tensors or of none");
    buffers.nans = args.nans;
    // The engine's threads drop it when the run has ended. Tensors may need the GIL to be freed, so they go to
    // the bin.
    buffers.keepalive = bin_->bag(std::move(taken.kept));
    return buffers;
  };
  const auto run = start(agreed, {args.ordinal, args.reverse, args.timeout_seconds}, buffers_for);
  return c10::make_intrusive<ReshardWork>(rank(), run, bin_, std::move(taken.outputs), watcher());
}

}  // namespace meshcast
