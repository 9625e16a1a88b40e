#pragma once

#include <algorithm>
#include <array>
#include <type_traits>

#include <c10/cuda/CUDAGuard.h>
#include <fmt/format.h>

#include "boxes/box_ops.h"
#include "common/error.h"
#include "cuda/kernels/launch.h"

namespace meshcast::cuda {

inline void check(cudaError_t status, const char* what, const Target& target) {
  if (status == cudaSuccess) return;
  cudaGetLastError();  // else the next check of other code would find it
  throw Error(ErrorKind::Generic, fmt::format("{} on CUDA device {} failed: {} ({})", what, target.device,
                                              cudaGetErrorName(status), cudaGetErrorString(status)));
}

// __grid_constant__: the table stays in constant memory, although it is indexed by a number that only the
// running kernel knows; without it each thread would copy the table to its stack.
template <class Op, class Table>
__global__ void __launch_bounds__(kThreads) box_kernel(const __grid_constant__ Table table, const Op op) {
  run_thread(op, DeviceMemory{}, table, blockIdx.x, gridDim.x, threadIdx.x);
}

template <class Op, class Table, class Takes>
void launch_tables(std::span<const BoxPair> pairs, const Op& op, const Target& target, const char* what,
                   const Takes& takes) {
  Table table;
  fill_tables(pairs, Units{Op::kFromBytes, Op::kToBytes, Op::kPiece}, &table, takes, [&](const Table& full) {
    // gridDim.x may be up to 2^31 - 1; run_thread adds it to a tile number in 32 bits.
    uint32_t blocks = std::min<uint32_t>(full.tiles, 1U << 30);
    if (target.most_blocks > 0) blocks = std::min<uint32_t>(blocks, target.most_blocks);
    // Not <<<>>>: only cudaGetLastError() reports its errors, and also earlier errors of other code.
    std::array<void*, 2> arguments{const_cast<Table*>(&full), const_cast<Op*>(&op)};
    check(cudaLaunchKernel(box_kernel<Op, Table>, dim3(blocks), dim3(kThreads), arguments.data(), 0,
                           target.stream),
          what, target);
  });
}

// Has CUDA load a kernel now, and not at its first launch, as it otherwise does (CUDA_MODULE_LOADING).
void load_function(cudaFunction_t function, const char* what, const Target& target);

// kernel: of the file that launches it.
inline void load_kernel(const void* kernel, const Target& target, const char* what) {
  cudaFuncAttributes attributes;
  check(cudaFuncGetAttributes(&attributes, kernel), what, target);
  cudaFunction_t function = nullptr;
  check(cudaGetFuncBySymbol(&function, kernel), what, target);
  load_function(function, what, target);
}

// Small tables while they hold all pairs: a launch costs more the larger its parameters are. Copies, of which
// there are most, have large ones too; for all types of a conversion that would double the binary.
template <class Op, class Takes>
void launch(std::span<const BoxPair> pairs, const Op& op, const Target& target, const char* what,
            const Takes& takes) {
  const c10::cuda::CUDAGuard guard(static_cast<c10::DeviceIndex>(target.device));
  if (target.load_only) {
    load_kernel(reinterpret_cast<const void*>(box_kernel<Op, SmallTable>), target, what);
    if constexpr (std::is_same_v<Op, CopyOp>)
      load_kernel(reinterpret_cast<const void*>(box_kernel<Op, LargeTable>), target, what);
    return;
  }
  if constexpr (std::is_same_v<Op, CopyOp>) {
    if (pairs.size() > SmallTable::kCapacity)
      return launch_tables<Op, LargeTable>(pairs, op, target, what, takes);
  }
  launch_tables<Op, SmallTable>(pairs, op, target, what, takes);
}

inline constexpr auto kTakesAll = [](const CopyNest&) { return true; };

}  // namespace meshcast::cuda
