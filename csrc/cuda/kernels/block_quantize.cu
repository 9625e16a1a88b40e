#include "boxes/block_ops.h"
#include "cuda/kernels/kernel.cuh"

namespace meshcast::cuda {
namespace {

constexpr int kWarps = kThreads / kLanes;  // of a thread block

template <typename T>
__global__ void __launch_bounds__(kThreads)
    amax_kernel(const __grid_constant__ BlockedView box, const AmaxShare share, uint32_t* amax) {
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t tasks = share.blocks * share.warps_per_block;
  const int64_t step = int64_t{gridDim.x} * kWarps;
  for (int64_t task = int64_t{blockIdx.x} * kWarps + threadIdx.x / kLanes; task < tasks; task += step) {
    const int64_t block = task / share.warps_per_block;
    const int64_t warp = task - block * share.warps_per_block;
    uint32_t most = lane_amax<T>(DeviceMemory{}, box, block, warp, share.warps_per_block, lane);
    for (int by = kLanes / 2; by > 0; by /= 2) most = max(most, __shfl_xor_sync(0xFFFFFFFF, most, by));
    if (lane == 0) atomicMax(amax + block, most);
  }
}

template <BlockFormat kFormat, typename T>
__global__ void __launch_bounds__(kThreads)
    values_kernel(const __grid_constant__ BlockedView box, const float* amax, float tensor_scale, int64_t runs,
                  std::byte* values) {
  const int64_t step = int64_t{gridDim.x} * kThreads;
  for (int64_t run = int64_t{blockIdx.x} * kThreads + threadIdx.x; run < runs; run += step)
    make_run<kFormat, T>(DeviceMemory{}, box, amax, tensor_scale, run, values);
}

// tasks: threads or warps that there is work for; per_block: that a thread block has of them.
template <typename... Arguments>
void start(void (*kernel)(Arguments...), int64_t tasks, int per_block, const char* what, const Target& target,
           Arguments... arguments) {
  if (target.load_only) return load_kernel(reinterpret_cast<const void*>(kernel), target, what);
  if (tasks == 0) return;
  int64_t blocks = std::min<int64_t>((tasks - 1) / per_block + 1, int64_t{1} << 30);
  if (target.most_blocks > 0) blocks = std::min<int64_t>(blocks, target.most_blocks);
  std::array<void*, sizeof...(Arguments)> pointers{&arguments...};
  check(cudaLaunchKernel(reinterpret_cast<const void*>(kernel), dim3(static_cast<uint32_t>(blocks)),
                         dim3(kThreads), pointers.data(), 0, target.stream),
        what, target);
}

}  // namespace

void amax_of_blocks(const BlockedView& box, float* amax, const Target& target) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(target.device));
  const AmaxShare share = target.load_only ? AmaxShare{} : amax_share(box);
  auto* bits = reinterpret_cast<uint32_t*>(amax);
  if (share.blocks > 0) {
    check(cudaMemsetAsync(bits, 0, static_cast<size_t>(share.blocks) * sizeof(float), target.stream),
          "clearing of magnitudes", target);
  }
  visit_quantized(box.type, [&](auto element) {
    start(amax_kernel<decltype(element)>, share.blocks * share.warps_per_block, kWarps,
          "the kernel of magnitudes", target, box, share, bits);
  });
}

void values_of_blocks(BlockFormat format, const BlockedView& box, const float* amax, float tensor_amax,
                      std::byte* values, const Target& target) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(target.device));
  const float tensor_scale = nvfp4_tensor_scale(tensor_amax);
  const int64_t runs = target.load_only ? 0 : num_runs(box);
  visit_quantized(box.type, [&](auto element) {
    using T = decltype(element);
    const auto with = [&](auto kernel) {
      start(kernel, runs, kThreads, "the kernel of block-scaled values", target, box, amax, tensor_scale, runs,
            values);
    };
    switch (format) {
      case BlockFormat::Fp8E4m3: return with(values_kernel<BlockFormat::Fp8E4m3, T>);
      case BlockFormat::MxFp8: return with(values_kernel<BlockFormat::MxFp8, T>);
      case BlockFormat::NvFp4: return with(values_kernel<BlockFormat::NvFp4, T>);
    }
  });
}

}  // namespace meshcast::cuda
