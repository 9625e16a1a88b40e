#include "memory/strided.h"

#include <algorithm>
#include <cstring>

#include "memory/stream_copy.h"
#include "memory/walk.h"

namespace meshcast {
namespace {

// Fixed-size element copies compile to plain loads and stores; memcpy keeps them free of alignment rules.
template <int64_t kBytes>
void copy_elements(const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride, int64_t n) {
  for (int64_t i = 0; i < n; ++i) std::memcpy(to + i * to_stride, from + i * from_stride, kBytes);
}

void copy_run(const std::byte* from, int64_t from_stride, std::byte* to, int64_t to_stride, int64_t n,
              int64_t element_bytes, Write write) {
  if (from_stride == element_bytes && to_stride == element_bytes) {
    const auto nbytes = static_cast<size_t>(n * element_bytes);
    if (write == Write::Streamed) {
      stream_copy(to, from, nbytes);
    } else {
      std::memcpy(to, from, nbytes);
    }
    return;
  }
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

// Runs of this size and more are worth a look ahead, and so many bytes of one: more would push each other out.
constexpr int64_t kAheadFrom = 1024;
constexpr int64_t kAheadBytes = 8192;
constexpr int64_t kAheadStep = 64;  // bytes that come together

// Asks for the bytes of a run while the one before it is copied. The processor does so by itself within a page
// of memory only, and runs with gaps between them lie in others.
void look_ahead(const std::byte* from, int64_t nbytes) {
  for (int64_t at = 0; at < std::min(nbytes, kAheadBytes); at += kAheadStep) __builtin_prefetch(from + at);
}

// Cuts the bytes [begin, end) of the packed form of `view` into views and gives each, in order, to `visit`.
template <typename Visit>
void visit_range(const StridedView& view, int64_t begin, int64_t end, const Visit& visit) {
  if (begin >= end) return;
  if (begin == 0 && end == view.nbytes()) return visit(view);
  if (view.ndim == 0) {  // part of an element
    StridedView bytes{view.data + begin, 1, 1, {}, {}};
    bytes.extent[0] = end - begin;
    bytes.stride[0] = 1;
    return visit(bytes);
  }
  StridedView row = view;
  --row.ndim;
  for (int d = 0; d < row.ndim; ++d) {
    row.extent[d] = view.extent[d + 1];
    row.stride[d] = view.stride[d + 1];
  }
  const int64_t row_bytes = row.nbytes();
  const auto visit_row = [&](int64_t index, int64_t from, int64_t to) {
    StridedView one = row;
    one.data = view.data + index * view.stride[0];
    visit_range(one, from, to, visit);
  };
  int64_t first = begin / row_bytes;
  const int64_t last = end / row_bytes;
  if (first == last) return visit_row(first, begin - first * row_bytes, end - first * row_bytes);
  if (begin % row_bytes != 0) {
    visit_row(first, begin % row_bytes, row_bytes);
    ++first;
  }
  if (first < last) {
    StridedView whole = view;
    whole.data += first * view.stride[0];
    whole.extent[0] = last - first;
    visit(whole);
  }
  if (end % row_bytes != 0) visit_row(last, 0, end % row_bytes);
}

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
  const std::byte* held = nullptr;  // a dense run that is copied once the next one is known
  std::byte* held_to = nullptr;
  int64_t held_bytes = 0;
  const auto copy_held = [&] { copy_run(held, 1, held_to, 1, held_bytes, 1, write); };
  walk_runs(from.ndim, from.extent, from.stride, to.stride,
            [&](int64_t at, int64_t stride, int64_t to_at, int64_t to_stride, int64_t n) {
              const bool one = n == 1;  // has no stride
              const int64_t nbytes = n * element_bytes;
              const bool dense = one || (stride == element_bytes && to_stride == element_bytes);
              if (!dense || nbytes < kAheadFrom)
                return copy_run(from.data + at, one ? element_bytes : stride, to.data + to_at,
                                one ? element_bytes : to_stride, n, element_bytes, write);
              if (held) {
                if (held + held_bytes != from.data + at) look_ahead(from.data + at, nbytes);
                copy_held();
              }
              held = from.data + at;
              held_to = to.data + to_at;
              held_bytes = nbytes;
            });
  if (held) copy_held();
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
  visit_range(view, offset, offset + nbytes, [&](const StridedView& part) {
    pack(part, out);
    out += part.nbytes();
  });
}

void unpack_range(const std::byte* in, const StridedView& view, int64_t offset, int64_t nbytes, Write write) {
  visit_range(view, offset, offset + nbytes, [&](const StridedView& part) {
    unpack(in, part, write);
    in += part.nbytes();
  });
}

}  // namespace meshcast
