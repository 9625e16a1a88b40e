#include <vector>

#include <pybind11/stl.h>

#include "binding/bind.h"
#include "cuda/kernels/launch.h"

namespace meshcast {
namespace {

// Address, bytes of an element, extents, strides in bytes.
using ViewNumbers = std::tuple<uint64_t, int64_t, std::vector<int64_t>, std::vector<int64_t>>;
using PairNumbers = std::pair<ViewNumbers, ViewNumbers>;

StridedView view_of(const ViewNumbers& numbers) {
  const auto& [address, element_bytes, extent, stride] = numbers;
  if (extent.size() > kMaxDims || extent.size() != stride.size())
    throw LayoutError("a view of a kernel has at most 8 dimensions, and a stride for each");
  StridedView out;
  out.data = reinterpret_cast<std::byte*>(address);
  out.ndim = static_cast<int>(extent.size());
  out.element_bytes = element_bytes;
  for (size_t d = 0; d < extent.size(); ++d) {
    out.extent[d] = extent[d];
    out.stride[d] = stride[d];
  }
  return out;
}

std::vector<cuda::BoxPair> pairs_of(const std::vector<PairNumbers>& numbers) {
  std::vector<cuda::BoxPair> out;
  out.reserve(numbers.size());
  for (const auto& [from, to] : numbers) {
    if (std::get<2>(from) != std::get<2>(to)) throw LayoutError("both sides of a copy have equal extents");
    out.push_back({view_of(from), view_of(to)});
  }
  return out;
}

BlockedView blocked_of(const ViewNumbers& numbers, ElementType type, const std::vector<int64_t>& low,
                       const std::vector<int64_t>& block) {
  BlockedView out;
  out.view = view_of(numbers);
  out.type = type;
  const auto ndim = static_cast<size_t>(out.view.ndim);
  if (ndim == 0 || low.size() != ndim || block.size() != ndim)
    throw LayoutError("a box of blocks has a dimension or more, and a beginning and a block in each");
  for (size_t d = 0; d < ndim; ++d) {
    if (low[d] < 0 || block[d] < 1) throw LayoutError("a block begins before 0, or has no elements");
    out.low[d] = low[d];
    out.block[d] = block[d];
  }
  return out;
}

cuda::Target target_of(int device, uint64_t stream, int most_blocks) {
  cuda::Target out;
  out.device = device;
  out.stream = reinterpret_cast<cudaStream_t>(stream);
  out.most_blocks = most_blocks;
  return out;
}

}  // namespace

void bind_cuda(py::module_& parent) {
  py::module_ m = parent.def_submodule("cuda", "Kernels on strided boxes. Used by meshcast.bench.kernels.");
  py::enum_<ElementType> types(m, "ElementType");
  for (const ElementTraits& each : kElementTypes)
    if (each.type != ElementType::None) types.value(each.dtype, each.type);
  py::enum_<ReduceOp>(m, "ReduceOp")
      .value("sum", ReduceOp::Sum)
      .value("avg", ReduceOp::Avg)
      .value("min", ReduceOp::Min)
      .value("max", ReduceOp::Max)
      .value("product", ReduceOp::Product);
  py::enum_<BlockFormat>(m, "BlockFormat")
      .value("fp8_e4m3", BlockFormat::Fp8E4m3)
      .value("mxfp8", BlockFormat::MxFp8)
      .value("nvfp4", BlockFormat::NvFp4);
  m.def("block_amax", [](const ViewNumbers& view, ElementType type, const std::vector<int64_t>& low,
                         const std::vector<int64_t>& block, uint64_t amax, int device, uint64_t stream) {
    cuda::amax_of_blocks(blocked_of(view, type, low, block), reinterpret_cast<float*>(amax),
                         target_of(device, stream, 0));
  });
  m.def("block_values", [](BlockFormat format, const ViewNumbers& view, ElementType type,
                           const std::vector<int64_t>& low, const std::vector<int64_t>& block, uint64_t amax,
                           float tensor_amax, uint64_t values, int device, uint64_t stream) {
    const BlockedView box = blocked_of(view, type, low, block);
    cuda::values_of_blocks(format, box, reinterpret_cast<const float*>(amax), tensor_amax,
                           reinterpret_cast<std::byte*>(values), target_of(device, stream, 0));
  });
  m.def("copy_boxes", [](const std::vector<PairNumbers>& pairs, int device, uint64_t stream, int most_blocks) {
    cuda::copy_boxes(pairs_of(pairs), target_of(device, stream, most_blocks));
  });
  m.def("cast_boxes", [](const std::vector<PairNumbers>& pairs, ElementType from, ElementType to, int device,
                         uint64_t stream, int most_blocks) {
    cuda::cast_boxes(pairs_of(pairs), from, to, target_of(device, stream, most_blocks));
  });
  m.def("reduce_boxes", [](const std::vector<PairNumbers>& pairs, ElementType type, ReduceOp op, int device,
                           uint64_t stream, int most_blocks) {
    cuda::reduce_boxes(pairs_of(pairs), type, op, target_of(device, stream, most_blocks));
  });
  m.def("divide_boxes", [](const std::vector<ViewNumbers>& views, ElementType type, int64_t count, int device,
                           uint64_t stream, int most_blocks) {
    std::vector<StridedView> boxes;
    boxes.reserve(views.size());
    for (const ViewNumbers& view : views) boxes.push_back(view_of(view));
    cuda::divide_boxes(boxes, type, count, target_of(device, stream, most_blocks));
  });
}

}  // namespace meshcast
