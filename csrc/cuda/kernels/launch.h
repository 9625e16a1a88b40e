#pragma once

#include <cstdint>
#include <span>

#include <cuda_runtime_api.h>

#include "boxes/launch_plan.h"
#include "memory/block_quantize.h"
#include "memory/reduce.h"

// The only way to the kernels. Every call enqueues on the stream and returns: it waits for nothing and
// allocates nothing, and a CUDA graph may capture it. The caller keeps the memory of both sides alive, and
// unwritten by others, until the stream has passed. Errors of CUDA become Error (Generic) with CUDA's own name.

namespace meshcast::cuda {

struct Target {
  int device = 0;  // holds both sides, or can reach them
  cudaStream_t stream = nullptr;
  int64_t most_pitch = kMostPitch;  // of rows in copies, as the GPU says
  int most_blocks = 0;              // of a kernel, to leave the GPU to others; 0: as many as there is work for
  bool load_only = false;           // see load_kernels()
};

// to = from, byte by byte; the elements of a pair have one size, any size. Pack and unpack are the cases where
// one side is packed (packed_like). A plain run or wide rows go to the copy engine, all others share launches.
void copy_boxes(std::span<const BoxPair> pairs, const Target& target);

// The same with a conversion on the way, rounded to nearest even as by torch.Tensor.to of the torch that
// this was built for. can_cast(from, to) must hold.
void cast_boxes(std::span<const BoxPair> pairs, ElementType from, ElementType to, const Target& target);

// to = op(from, to), element by element: what combine() of memory/reduce.h does on the CPU, bit for bit except
// in NaNs. Avg adds; divide_boxes ends it. can_reduce(type, op) must hold.
void reduce_boxes(std::span<const BoxPair> pairs, ElementType type, ReduceOp op, const Target& target);

// Divides every element of the views in place by `count`; integers round towards zero.
void divide_boxes(std::span<const StridedView> views, ElementType type, int64_t count, const Target& target);

// block_amax() of memory/block_quantize.h, bit for bit, of a box on the GPU: so is `amax`.
void amax_of_blocks(const BlockedView& box, float* amax, const Target& target);

// block_values(), bit for bit; box, amax and values are on the GPU.
void values_of_blocks(BlockFormat format, const BlockedView& box, const float* amax, float tensor_amax,
                      std::byte* values, const Target& target);

// Has CUDA load all kernels, which it otherwise does at the first launch of each; that may wait for everything
// that runs on the GPU, also for a kernel of NCCL that waits for a rank which waits for this one.
void load_kernels(int device);

}  // namespace meshcast::cuda
