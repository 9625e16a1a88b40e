#include "cuda/kernels/kernel.cuh"

namespace meshcast::cuda {
namespace {

void require(ElementType type, ReduceOp op) {
  if (op == ReduceOp::None || !can_reduce(type, op))
    throw Error(ErrorKind::Generic, "a reduction that its type does not have was started");
}

}  // namespace

void reduce_boxes(std::span<const BoxPair> pairs, ElementType type, ReduceOp op, const Target& target) {
  require(type, op);
  visit_reduced(type, [&](auto element) {
    launch(pairs, ReduceOpOf<decltype(element)>{op}, target, "the reduce kernel", kTakesAll);
  });
}

void divide_boxes(std::span<const StridedView> views, ElementType type, int64_t count, const Target& target) {
  require(type, ReduceOp::Avg);
  visit_reduced(type, [&](auto element) {
    using T = decltype(element);
    if constexpr (!std::is_same_v<T, bool>) {
      // One at a time: a divided carry is a whole chunk, and pairing many up would need memory.
      for (const StridedView& view : views) {
        const BoxPair in_place{view, view};
        launch({&in_place, 1}, DivideOp<T>{count}, target, "the divide kernel", kTakesAll);
      }
    }
  });
}

}  // namespace meshcast::cuda
