#pragma once

#include <cstddef>
#include <cstdint>

#include "layout/layout.h"
#include "memory/element_type.h"
#include "memory/strided.h"

namespace meshcast {

// carried = op(own, carried), element by element; `carried` is packed like `own`. Avg adds, see divide(). Each
// step is rounded to the type, as in a collective of torch; min and max propagate NaN; sums of integers wrap
// around; sums of truth values are "or".
void combine(const StridedView& own, std::byte* carried, ElementType type, ReduceOp op);

// The last step of an average of `count` values. Integers round towards zero.
void divide(std::byte* carried, int64_t nbytes, ElementType type, int64_t count);

}  // namespace meshcast
