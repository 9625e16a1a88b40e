#pragma once

#include <array>
#include <cstdint>

#include "memory/strided.h"

namespace meshcast {

// What a digest takes for one word, and which values are NaNs: those count as one value, since casts do not
// keep their payload. Elements of more than 4 bytes are several words, complex numbers several values.
struct DigestWords {
  int64_t bytes = 1;        // of a word: 1, 2 or 4
  int64_t value_bytes = 0;  // of a value that may be a NaN: of a word, or 8; 0 where none is
  uint64_t magnitude = 0;   // the bits of a value beside its sign
  uint64_t limit = 0;       // a value whose magnitude is larger is a NaN
};

// The sum over all elements of word * weight(position), modulo 2^64: the sum over the parts of a tensor is that
// of the tensor, however it is cut. A weight is the product of two odd numbers, of the position in a block of
// 4096 words (32 bits) and of the block (64 bits). So one word that changes always shows, and so do two unlike
// ones of a block that change places; whatever else changes is missed once in 2^32 or more.
//
// first: index of the first element of `view` in the whole tensor, row-major; step: of its dimensions, in
// elements. Reads the memory once, without a copy of it. transfers/digest.py does the same for GPUs.
uint64_t digest(const StridedView& view, int64_t first, const std::array<int64_t, kMaxDims>& step,
                const DigestWords& words);

}  // namespace meshcast
