#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/strided.h"

// Boxes as their changes since an earlier version: lossless, and by the bits of the elements, so that the
// payloads of NaNs and the signs of zeros count.
//
// A record of a box has, row-major, a bit for each 64 elements, set where one of them has changed, the first
// one lowest; and then for each such group a byte with a bit for each 8 elements, for each that is set a byte
// with a bit for each element, and the elements that have changed. One changed element in a hundred takes 0.3
// bits of each element in addition to its own.
//
// A stream has boxes one after the other. Each begins with 8 bytes, in the order of this machine: twice the
// number of bytes that follow, plus 1 where they are the elements themselves, which is where a record would be
// no smaller. Nothing follows where nothing has changed.

namespace meshcast {

inline constexpr int64_t kStreamHead = 8;  // bytes of each box

// Elements have 1, 2, 4 or 8 bytes. `earlier` holds the boxes of the version before, packed one after the
// other, and gets those of this version. Writes at most the bytes of the boxes and kStreamHead for each.
// Returns how many bytes the stream has, 0 where nothing has changed.
int64_t encode_changes(const std::vector<StridedView>& boxes, std::byte* earlier, std::byte* stream);

// Makes this version of the earlier one: each box in one place or more. Throws Error, before it writes
// anything, unless the stream is one of such boxes.
void apply_changes(const std::byte* stream, int64_t nbytes, const std::vector<std::vector<StridedView>>& boxes);

}  // namespace meshcast
