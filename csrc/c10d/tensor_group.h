#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "c10d/reshard_work.h"
#include "group/group_core.h"

namespace meshcast {

// The arguments of one start, apart from the plan.
struct StartArgs {
  int64_t ordinal = 0;  // of the call in its lane; a backward has that of its forward
  bool reverse = false;
  std::vector<std::optional<at::Tensor>> source;       // by problem; none where this rank holds nothing
  std::vector<std::optional<at::Tensor>> destination;  // by problem
  double timeout_seconds = 0;
  std::vector<DigestNans> nans{};  // by problem, where digests are taken of what is copied; else empty
};

// The tensors of a start: those that it keeps alive, those of them that are its results, and the element types
// of the sources, by problem.
struct TakenTensors {
  std::vector<at::Tensor> kept;
  std::vector<at::Tensor> outputs;
  std::vector<ElementType> types;
};

// Checks what does not depend on the device. Throws LayoutError.
TakenTensors take_tensors(const PlanDirection& direction, const StartArgs& args);

// A group whose calls move tensors on CPUs. No method may be called with the GIL held.
class TensorGroup final : public GroupCore {
 public:
  using GroupCore::GroupCore;
  ~TensorGroup() override { shutdown(); }

  void shutdown();  // as GroupCore::shutdown, and frees the remaining tensors

  // As GroupCore::start. Throws LayoutError where a tensor does not fit the plan.
  c10::intrusive_ptr<c10d::Work> start_tensors(const AgreedPlan& agreed, StartArgs args);

 private:
  const std::shared_ptr<RecycleBin> bin_ = std::make_shared<RecycleBin>();
};

}  // namespace meshcast
