#include "cuda/kernels/kernel.cuh"

namespace meshcast::cuda {
namespace {

// The result of this torch for numbers that are too large for e4m3fn; cmake determines it.
using TorchE4m3 = Float8E4m3<MESHCAST_E4M3_SATURATES != 0>;

template <typename T>
using OfTorch = std::conditional_t<std::is_same_v<T, Float8E4m3<true>>, TorchE4m3, T>;

}  // namespace

void cast_boxes(std::span<const BoxPair> pairs, ElementType from, ElementType to, const Target& target) {
  if (from == to) throw Error(ErrorKind::Generic, "a cast between equal types was started: copy instead");
  visit_cast(from, [&](auto source) {
    visit_cast(to, [&](auto result) {
      using From = OfTorch<decltype(source)>;
      using To = OfTorch<decltype(result)>;
      if constexpr (!std::is_same_v<From, To>)
        launch(pairs, CastOp<From, To>{}, target, "the cast kernel", kTakesAll);
    });
  });
}

}  // namespace meshcast::cuda
