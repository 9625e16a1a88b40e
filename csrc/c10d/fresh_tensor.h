#pragma once

#include <ATen/core/Tensor.h>

namespace meshcast {

// Returns a dense tensor on the CPU whose values are not set, as a result for a call to fill. One of
// kLargeBlock bytes or more has its memory from large_blocks.h, unless use_large_blocks(false) was called.
at::Tensor fresh_tensor(at::IntArrayRef shape, at::ScalarType dtype);
void use_large_blocks(bool use);

}  // namespace meshcast
