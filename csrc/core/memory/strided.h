#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

#include "layout/box.h"
#include "memory/copy_bytes.h"

namespace meshcast {

// A box of a local tensor as memory: `data` is its first element, strides are in bytes and may be anything
// a torch tensor may have (zero and non-contiguous included). Does not own the memory.
struct StridedView {
  std::byte* data = nullptr;
  int ndim = 0;
  int64_t element_bytes = 0;
  std::array<int64_t, kMaxDims> extent{};
  std::array<int64_t, kMaxDims> stride{};

  int64_t nbytes() const;

  // True if the elements lie in row-major order without gaps, so that the view is its own packed form.
  bool contiguous() const;
};

// The extents of `view` over memory in row-major order without gaps.
StridedView packed_like(const StridedView& view, std::byte* data);

// Row-major gather of `view` into `out` and the inverse. `out`/`in` hold view.nbytes() bytes.
void pack(const StridedView& view, std::byte* out);
void unpack(const std::byte* in, const StridedView& view, Write write = Write::Cached);

// The same for the bytes [offset, offset + nbytes) of the packed form, which may begin and end anywhere.
void pack_range(const StridedView& view, int64_t offset, int64_t nbytes, std::byte* out);
void unpack_range(const std::byte* in, const StridedView& view, int64_t offset, int64_t nbytes,
                  Write write = Write::Cached);

// Element-wise copy between two views of equal extents that do not overlap in memory.
void copy(const StridedView& from, const StridedView& to, Write write = Write::Cached);

}  // namespace meshcast
