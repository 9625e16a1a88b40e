#include "cuda/kernels/kernel.cuh"

namespace meshcast::cuda {
namespace {

// Below this a run rides along in the kernel's table if there is one: a call of its own costs microseconds.
// A guess until measured.
constexpr int64_t kOwnCallBytes = int64_t{256} * 1024;

void copy_plainly(const CopyNest& nest, Route route, const Target& target) {
  if (route == Route::Flat) {
    check(cudaMemcpyAsync(nest.to, nest.from, static_cast<size_t>(nest.run), cudaMemcpyDefault, target.stream),
          "a copy of a run", target);
    return;
  }
  check(cudaMemcpy2DAsync(nest.to, static_cast<size_t>(nest.to_stride[0]), nest.from,
                          static_cast<size_t>(nest.from_stride[0]), static_cast<size_t>(nest.run),
                          static_cast<size_t>(nest.extent[0]), cudaMemcpyDefault, target.stream),
        "a copy of rows", target);
}

}  // namespace

void copy_boxes(std::span<const BoxPair> pairs, const Target& target) {
  const bool alone = pairs.size() == 1;
  launch(pairs, CopyOp{}, target, "the copy kernel", [&](const CopyNest& nest) {
    const Route route = route_of(nest, target.most_pitch);
    if (route == Route::Kernel) return true;
    const int64_t rows = route == Route::Pitched ? nest.extent[0] : 1;
    if (!alone && nest.run * rows < kOwnCallBytes) return true;
    copy_plainly(nest, route, target);
    return false;
  });
}

}  // namespace meshcast::cuda
