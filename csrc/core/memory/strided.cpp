#include "memory/strided.h"

#include <algorithm>
#include <array>
#include <cstring>

#include "memory/walk.h"

namespace meshcast {
namespace {

// Element copies of fixed sizes compile to plain loads and stores; memcpy has no alignment rules.
template <int64_t kBytes>
void copy_elements(const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride, int64_t n) {
  for (int64_t i = 0; i < n; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, kBytes);
}

void copy_apart(const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride, int64_t n,
                int64_t element_bytes) {
  switch (element_bytes) {
    case 1: return copy_elements<1>(from, from_stride, to, to_stride, n);
    case 2: return copy_elements<2>(from, from_stride, to, to_stride, n);
    case 4: return copy_elements<4>(from, from_stride, to, to_stride, n);
    case 8: return copy_elements<8>(from, from_stride, to, to_stride, n);
    case 16: return copy_elements<16>(from, from_stride, to, to_stride, n);
    default:
      for (int64_t i = 0; i < n; ++i) {
        std::memcpy(to + i * to_stride, from + i * from_stride, static_cast<size_t>(element_bytes));
      }
  }
}

// The dense runs of a copy, all of the same size. Each is copied once the run kCopyAhead bytes after it, in
// their order, is known, so that this one can be prefetched meanwhile.
class RunsAhead {
 public:
  explicit RunsAhead(Write write) : write_(write) {}

  void add(const std::byte* from, std::byte* to, size_t nbytes) {
    if (nbytes < kCopyLines) {
      std::memcpy(to, from, nbytes);
      return;
    }
    nbytes_ = nbytes;
    if (count_ >= kMost || (count_ > 0 && count_ * nbytes >= kCopyAhead)) {
      const Run& oldest = held_[first_];
      copy_bytes(oldest.to, oldest.from, nbytes, from, write_);
      first_ = (first_ + 1) % kMost;
      --count_;
    }
    held_[(first_ + count_++) % kMost] = {from, to};
  }

  void end() {
    for (; count_ > 0; --count_, first_ = (first_ + 1) % kMost) {
      const Run& run = held_[first_];
      copy_bytes(run.to, run.from, nbytes_, run.from, write_);  // nothing comes next
    }
  }

 private:
  struct Run {
    const std::byte* from;
    std::byte* to;
  };
  static constexpr size_t kMost = kCopyAhead / kCopyLines;

  const Write write_;
  size_t nbytes_ = 0;
  std::array<Run, kMost> held_;  // a ring
  size_t first_ = 0;
  size_t count_ = 0;
};

}  // namespace

int64_t StridedView::nbytes() const {
  int64_t n = element_bytes;
  for (int d = 0; d < ndim; ++d) n *= extent[d];
  return n;
}

bool StridedView::contiguous() const {
  if (nbytes() == 0) return true;
  int64_t expected = element_bytes;
  for (int d = ndim - 1; d >= 0; --d) {
    if (extent[d] != 1 && stride[d] != expected) return false;
    expected *= extent[d];
  }
  return true;
}

void copy(const StridedView& from, const StridedView& to, Write write) {
  const int64_t element_bytes = from.element_bytes;
  RunsAhead runs(write);
  walk_runs(from.ndim, from.extent, from.stride, to.stride,
            [&](int64_t at, int64_t stride, int64_t to_at, int64_t to_stride, int64_t n) {
              const bool dense = n == 1 || (stride == element_bytes && to_stride == element_bytes);
              if (dense) {
                runs.add(from.data + at, to.data + to_at, static_cast<size_t>(n * element_bytes));
              } else {
                copy_apart(from.data + at, stride, to.data + to_at, to_stride, n, element_bytes);
              }
            });
  runs.end();
  if (write == Write::Streamed) end_stream();
}

StridedView packed_like(const StridedView& view, std::byte* data) {
  StridedView out = view;
  out.data = data;
  int64_t stride = view.element_bytes;
  for (int d = view.ndim - 1; d >= 0; --d) {
    out.stride[d] = stride;
    stride *= view.extent[d];
  }
  return out;
}

void pack(const StridedView& view, std::byte* out) { copy(view, packed_like(view, out)); }

void unpack(const std::byte* in, const StridedView& view, Write write) {
  // packed_like only computes strides; the data behind `in` is read, never written.
  copy(packed_like(view, const_cast<std::byte*>(in)), view, write);
}

void pack_range(const StridedView& view, int64_t offset, int64_t nbytes, std::byte* out) {
  walk_range(view, offset, offset + nbytes, 0, {}, [&](const StridedView& part, int64_t) {
    pack(part, out);
    out += part.nbytes();
  });
}

void unpack_range(const std::byte* in, const StridedView& view, int64_t offset, int64_t nbytes, Write write) {
  walk_range(view, offset, offset + nbytes, 0, {}, [&](const StridedView& part, int64_t) {
    unpack(in, part, write);
    in += part.nbytes();
  });
}

}  // namespace meshcast
