#include "cuda/kernels/kernel.cuh"

namespace meshcast::cuda {
namespace {

// What this torch makes of numbers that are too large for e4m3fn; cmake asks it.
using TorchE4m3 = Float8E4m3<MESHCAST_E4M3_SATURATES != 0>;

template <class Visit>
void with_cast_type(CastType type, const Visit& visit) {
  switch (type) {
    case CastType::Float32: return visit(float{});
    case CastType::BFloat16: return visit(BFloat16{});
    case CastType::Float16: return visit(Half{});
    case CastType::Float8E4m3: return visit(TorchE4m3{});
    case CastType::Float8E5m2: return visit(Float8E5m2{});
  }
}

}  // namespace

void cast_boxes(std::span<const BoxPair> pairs, CastType from, CastType to, const Target& target) {
  if (from == to) throw Error(ErrorKind::Generic, "a cast between equal types was started: copy instead");
  with_cast_type(from, [&](auto source) {
    with_cast_type(to, [&](auto result) {
      using From = decltype(source);
      using To = decltype(result);
      if constexpr (!std::is_same_v<From, To>)
        launch(pairs, CastOp<From, To>{}, target, "the cast kernel", kTakesAll);
    });
  });
}

}  // namespace meshcast::cuda
