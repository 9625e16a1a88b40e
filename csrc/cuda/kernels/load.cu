#include "cuda/kernels/kernel.cuh"

namespace meshcast::cuda {

void load_kernels(int device) {
  Target target;
  target.device = device;
  target.load_only = true;
  copy_boxes({}, target);
  for (int from = 0; from <= static_cast<int>(CastType::Float8E5m2); ++from) {
    for (int to = 0; to <= static_cast<int>(CastType::Float8E5m2); ++to)
      if (from != to) cast_boxes({}, static_cast<CastType>(from), static_cast<CastType>(to), target);
  }
  const StridedView nothing;
  for (int type = 1; type <= static_cast<int>(ElementType::Complex128); ++type) {
    const auto element = static_cast<ElementType>(type);
    if (can_reduce(element, ReduceOp::Sum)) reduce_boxes({}, element, ReduceOp::Sum, target);
    if (can_reduce(element, ReduceOp::Avg)) divide_boxes({&nothing, 1}, element, 1, target);
  }
}

}  // namespace meshcast::cuda
