#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <ATen/core/Tensor.h>

#include "run/run.h"

namespace meshcast {

// A local tensor as the executor sees it, after checking it against what the plan expects of this rank:
// `shape` is none where the rank is not in the mesh. `index` is the number of the tensor in the call, for
// messages. Throw LayoutError.
TensorMemory source_memory(const std::optional<at::Tensor>& tensor,
                           const std::optional<std::vector<int64_t>>& shape, int64_t element_bytes,
                           size_t index, at::Device device = at::kCPU);
TensorMemory destination_memory(const std::optional<at::Tensor>& tensor,
                                const std::optional<std::vector<int64_t>>& shape, int64_t element_bytes,
                                size_t index, at::Device device = at::kCPU);

// None for what can be neither reduced nor cast.
ElementType element_type(at::ScalarType type);

// The type of its elements. Throws LayoutError where `op` is not None and cannot reduce them.
ElementType checked_type(const std::optional<at::Tensor>& source, ReduceOp op, size_t index);

// A destination that shares memory with its source would be overwritten while it is still being sent.
void refuse_overlap(const std::optional<at::Tensor>& source, const std::optional<at::Tensor>& destination,
                    size_t index);

}  // namespace meshcast
