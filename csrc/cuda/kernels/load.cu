#include <cuda.h>

#include "cuda/kernels/driver_function.h"
#include "cuda/kernels/kernel.cuh"

namespace meshcast::cuda {

void load_function(cudaFunction_t function, const char* what, const Target& target) {
  static const auto load = driver_function<decltype(&cuFuncLoad)>("cuFuncLoad", 12040);
  static const auto ask = driver_function<decltype(&cuFuncIsLoaded)>("cuFuncIsLoaded", 12040);
  if (load == nullptr || ask == nullptr) return;  // an older driver loads it where its attributes are asked for
  CUfunctionLoadingState state = CU_FUNCTION_LOADING_STATE_UNLOADED;
  CUresult result = load(function);
  if (result == CUDA_SUCCESS) result = ask(&state, function);
  if (result == CUDA_SUCCESS && state == CU_FUNCTION_LOADING_STATE_LOADED) return;
  throw Error(ErrorKind::Generic,
              fmt::format("the driver did not load {} on CUDA device {} (error {}), and would load it in the "
                          "middle of a call: set CUDA_MODULE_LOADING=EAGER before the program starts",
                          what, target.device, static_cast<int>(result)));
}

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
  BlockedView box;
  for (const ElementType type : {ElementType::Float32, ElementType::Float16, ElementType::BFloat16}) {
    box.type = type;
    amax_of_blocks(box, nullptr, target);
    for (const BlockFormat format : {BlockFormat::Fp8E4m3, BlockFormat::MxFp8, BlockFormat::NvFp4})
      values_of_blocks(format, box, nullptr, 0, nullptr, target);
  }
}

}  // namespace meshcast::cuda
