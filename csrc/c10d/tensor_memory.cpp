#include "c10d/tensor_memory.h"

#include <algorithm>
#include <string>

#include <ATen/MemoryOverlap.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "common/error.h"

namespace meshcast {
namespace {

bool is_empty(const std::vector<int64_t>& shape) {
  return std::any_of(shape.begin(), shape.end(), [](int64_t extent) { return extent == 0; });
}

// Null if there is none, in any way that torch reports it.
std::byte* address_of(const at::Tensor& tensor) {
  try {
    return static_cast<std::byte*>(tensor.data_ptr());
  } catch (const c10::Error&) {  // of a fake tensor
    return nullptr;
  }
}

TensorMemory checked_memory(const char* side, const std::optional<at::Tensor>& tensor,
                            const std::optional<std::vector<int64_t>>& shape, int64_t element_bytes,
                            size_t index, at::Device device) {
  if (!shape || is_empty(*shape)) return {};  // nothing is read or written, whatever was given
  if (!tensor) {
    throw LayoutError(fmt::format("{} tensor {}: this rank holds a shard of shape [{}], but none was given",
                                  side, index, fmt::join(*shape, ", ")));
  }
  const bool elsewhere = device.is_cpu() ? !tensor->is_cpu() : tensor->device() != device;
  if (elsewhere || tensor->layout() != at::kStrided) {
    throw LayoutError(fmt::format("{} tensor {}: expected a dense tensor on {}, found one on {}", side, index,
                                  device.str(), tensor->device().str()));
  }
  if (tensor->sizes().vec() != *shape) {
    throw LayoutError(
        fmt::format("{} tensor {}: expected the local shape [{}] of this rank's shard, found [{}]", side, index,
                    fmt::join(*shape, ", "), fmt::join(tensor->sizes(), ", ")));
  }
  if (static_cast<int64_t>(tensor->element_size()) != element_bytes) {
    throw LayoutError(fmt::format("{} tensor {}: expected elements of {} bytes, found {} bytes", side, index,
                                  element_bytes, tensor->element_size()));
  }
  TensorMemory memory;
  memory.data = address_of(*tensor);
  if (!memory.data) {
    throw LayoutError(fmt::format(
        "{} tensor {}: it has no memory of its own (a pending asynchronous result, a fake or another "
        "wrapped tensor); wait for it or pass what it wraps",
        side, index));
  }
  int64_t last = tensor->storage_offset();
  for (int64_t d = 0; d < tensor->dim(); ++d) last += (tensor->size(d) - 1) * tensor->stride(d);
  if (static_cast<size_t>((last + 1) * element_bytes) > tensor->storage().nbytes()) {
    throw LayoutError(fmt::format(
        "{} tensor {}: its memory holds {} bytes, fewer than the {} that its shape and strides reach; was its "
        "storage resized?",
        side, index, tensor->storage().nbytes(), (last + 1) * element_bytes));
  }
  for (int64_t d = 0; d < tensor->dim(); ++d)
    memory.stride[static_cast<size_t>(d)] = tensor->stride(d) * element_bytes;
  return memory;
}

}  // namespace

ElementType element_type(at::ScalarType type) {
#define MESHCAST_ELEMENT_TYPE(name, cpp_type, reductions, casts, at_type, ...) \
  if (type == at::ScalarType::at_type) return ElementType::name;
#include "memory/element_types.def"
  return ElementType::None;
}

TensorMemory source_memory(const std::optional<at::Tensor>& tensor,
                           const std::optional<std::vector<int64_t>>& shape, int64_t element_bytes,
                           size_t index, at::Device device) {
  return checked_memory("source", tensor, shape, element_bytes, index, device);
}

TensorMemory destination_memory(const std::optional<at::Tensor>& tensor,
                                const std::optional<std::vector<int64_t>>& shape, int64_t element_bytes,
                                size_t index, at::Device device) {
  const TensorMemory memory = checked_memory("destination", tensor, shape, element_bytes, index, device);
  if (memory.data && at::has_internal_overlap(*tensor) == at::MemOverlap::Yes) {
    throw LayoutError(fmt::format(
        "destination tensor {}: several of its elements share memory (an expanded tensor?)", index));
  }
  return memory;
}

ElementType checked_type(const std::optional<at::Tensor>& source, ReduceOp op, size_t index) {
  if (!source) return ElementType::None;
  const ElementType type = element_type(source->scalar_type());
  if (op != ReduceOp::None && !can_reduce(type, op)) {
    throw LayoutError(fmt::format("source tensor {}: elements of type {} cannot be reduced by Partial({})",
                                  index, c10::toString(source->scalar_type()), to_string(op)));
  }
  return type;
}

void refuse_overlap(const std::optional<at::Tensor>& source, const std::optional<at::Tensor>& destination,
                    size_t index) {
  if (!source || !destination || source->numel() == 0 || destination->numel() == 0) return;
  // Tensors without strides are refused for that reason.
  if (source->layout() != at::kStrided || destination->layout() != at::kStrided) return;
  const auto status = at::get_overlap_status(*source, *destination);
  if (status == at::MemOverlapStatus::Full || status == at::MemOverlapStatus::Partial) {
    throw LayoutError(
        fmt::format("tensor {}: source and destination share memory; give the destination its own", index));
  }
}

}  // namespace meshcast
