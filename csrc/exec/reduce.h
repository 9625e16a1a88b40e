#pragma once

#include <cstddef>
#include <cstdint>

#include "exec/strided.h"
#include "layout/layout.h"

namespace meshcast {

// What the elements of a tensor are: only reductions ask.
enum class ElementType : uint8_t {
  None,  // unknown, or one that cannot be reduced
  Float64,
  Float32,
  Float16,
  BFloat16,
  Int64,
  Int32,
  Int16,
  Int8,
  UInt8,
  Bool,
  Complex64,
  Complex128,
};

// Complex numbers have no order, and truth values no mean.
bool can_reduce(ElementType type, ReduceOp op);

// carried = op(own, carried), element by element; `carried` is packed like `own`. Avg adds, see divide(). Each
// step is rounded to the type, as in a collective of torch; min and max pass a NaN on; sums of integers wrap
// around; those of truth values are "or".
void combine(const StridedView& own, std::byte* carried, ElementType type, ReduceOp op);

// The end of an average of `count` values. Integers round towards zero.
void divide(std::byte* carried, int64_t nbytes, ElementType type, int64_t count);

}  // namespace meshcast
