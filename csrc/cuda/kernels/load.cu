#include "cuda/kernels/kernel.cuh"

namespace meshcast::cuda {

void load_kernels(int device) {
  Target target;
  target.device = device;
  target.load_only = true;
  copy_boxes({}, target);
  const StridedView nothing;
  for (const ElementTraits& from : kElementTypes) {
    for (const ElementTraits& to : kElementTypes)
      if (can_cast(from.type, to.type)) cast_boxes({}, from.type, to.type, target);
    if (can_reduce(from.type, ReduceOp::Sum)) reduce_boxes({}, from.type, ReduceOp::Sum, target);
    if (can_reduce(from.type, ReduceOp::Avg)) divide_boxes({&nothing, 1}, from.type, 1, target);
  }
}

}  // namespace meshcast::cuda
