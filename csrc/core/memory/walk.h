#pragma once

#include <array>
#include <cstdint>

#include "memory/strided.h"

namespace meshcast {

// The elements of two strided boxes of equal extents, pair by pair. The dimensions that are jointly dense are
// merged away; what is left is a nest of loops around one innermost run, which is all that `visit` sees: where
// the run begins in either (strides' units, from the first element), the distance of its elements, and how
// many there are.
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

}  // namespace meshcast
