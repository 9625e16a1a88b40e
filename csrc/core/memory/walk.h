#pragma once

#include <array>
#include <cstdint>

#include "memory/strided.h"

namespace meshcast {

// The elements of two strided boxes of equal extents, pair by pair. Jointly dense dimensions are merged, which
// leaves a nest of loops around one innermost run. `visit` gets, for either box, the begin of the run (in units
// of the strides, from the first element) and the distance of its elements, and then their number.
template <typename Visit>
void walk_runs(int ndim, const std::array<int64_t, kMaxDims>& extent, const std::array<int64_t, kMaxDims>& a,
               const std::array<int64_t, kMaxDims>& b, const Visit& visit) {
  int dims = 0;
  std::array<int64_t, kMaxDims> n{};
  std::array<int64_t, kMaxDims> a_stride{};
  std::array<int64_t, kMaxDims> b_stride{};
  for (int d = 0; d < ndim; ++d) {
    if (extent[d] == 0) return;
    if (extent[d] == 1) continue;
    const int last = dims - 1;
    const bool dense = last >= 0 && a_stride[last] == extent[d] * a[d] && b_stride[last] == extent[d] * b[d];
    const int to = dense ? last : dims++;
    n[to] = dense ? n[to] * extent[d] : extent[d];
    a_stride[to] = a[d];
    b_stride[to] = b[d];
  }
  if (dims == 0) return visit(int64_t{0}, int64_t{0}, int64_t{0}, int64_t{0}, int64_t{1});
  const int inner = dims - 1;
  std::array<int64_t, kMaxDims> index{};
  int64_t a_at = 0;
  int64_t b_at = 0;
  for (;;) {
    visit(a_at, a_stride[inner], b_at, b_stride[inner], n[inner]);
    int d = inner - 1;
    for (; d >= 0; --d) {
      a_at += a_stride[d];
      b_at += b_stride[d];
      if (++index[d] < n[d]) break;
      a_at -= n[d] * a_stride[d];
      b_at -= n[d] * b_stride[d];
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

// Cuts the bytes [begin, end) of the packed form of `view` into views and passes each, in order, to `visit`,
// with the position of its first element. `first` is the position of the view's first element, `step` the
// distance of neighbouring positions in each dimension.
template <typename Visit>
void walk_range(const StridedView& view, int64_t begin, int64_t end, int64_t first,
                const std::array<int64_t, kMaxDims>& step, const Visit& visit) {
  if (begin >= end) return;
  if (begin == 0 && end == view.nbytes()) return visit(view, first);
  if (view.ndim == 0) {  // part of an element
    StridedView bytes{view.data + begin, 1, 1, {}, {}};
    bytes.extent[0] = end - begin;
    bytes.stride[0] = 1;
    return visit(bytes, first);
  }
  StridedView row = view;
  std::array<int64_t, kMaxDims> row_step{};
  --row.ndim;
  for (int d = 0; d < row.ndim; ++d) {
    row.extent[d] = view.extent[d + 1];
    row.stride[d] = view.stride[d + 1];
    row_step[d] = step[d + 1];
  }
  const int64_t row_bytes = row.nbytes();
  const auto visit_row = [&](int64_t index, int64_t from, int64_t to) {
    StridedView one = row;
    one.data = view.data + index * view.stride[0];
    walk_range(one, from, to, first + index * step[0], row_step, visit);
  };
  int64_t index = begin / row_bytes;
  const int64_t last = end / row_bytes;
  if (index == last) return visit_row(index, begin - index * row_bytes, end - index * row_bytes);
  if (begin % row_bytes != 0) {
    visit_row(index, begin % row_bytes, row_bytes);
    ++index;
  }
  if (index < last) {
    StridedView whole = view;
    whole.data += index * view.stride[0];
    whole.extent[0] = last - index;
    visit(whole, first + index * step[0]);
  }
  if (end % row_bytes != 0) visit_row(last, 0, end % row_bytes);
}

}  // namespace meshcast
