#include "cuda/kernels/kernel.cuh"

namespace meshcast::cuda {
namespace {

template <class Visit>
void with_element_type(ElementType type, const Visit& visit) {
  switch (type) {
    case ElementType::Float64: return visit(double{});
    case ElementType::Float32: return visit(float{});
    case ElementType::Float16: return visit(Half{});
    case ElementType::BFloat16: return visit(BFloat16{});
    case ElementType::Int64: return visit(int64_t{});
    case ElementType::Int32: return visit(int32_t{});
    case ElementType::Int16: return visit(int16_t{});
    case ElementType::Int8: return visit(int8_t{});
    case ElementType::UInt8: return visit(uint8_t{});
    case ElementType::Bool: return visit(bool{});
    case ElementType::Complex64: return visit(Complex<float>{});
    case ElementType::Complex128: return visit(Complex<double>{});
    case ElementType::Float8E4m3:
    case ElementType::Float8E5m2:
    case ElementType::None: break;
  }
  throw Error(ErrorKind::Generic, "a reduction of elements of an unknown type was started");
}

void require(ElementType type, ReduceOp op) {
  if (op == ReduceOp::None || !can_reduce(type, op))
    throw Error(ErrorKind::Generic, "a reduction that its type does not have was started");
}

}  // namespace

void reduce_boxes(std::span<const BoxPair> pairs, ElementType type, ReduceOp op, const Target& target) {
  require(type, op);
  with_element_type(type, [&](auto element) {
    launch(pairs, ReduceOpOf<decltype(element)>{op}, target, "the reduce kernel", kTakesAll);
  });
}

void divide_boxes(std::span<const StridedView> views, ElementType type, int64_t count, const Target& target) {
  require(type, ReduceOp::Avg);
  with_element_type(type, [&](auto element) {
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
