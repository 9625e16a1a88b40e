#pragma once

#include <array>
#include <cstdint>

#include "memory/strided.h"

namespace meshcast {

// Which values of a tensor are NaNs: those count as one value, since casts do not keep their payload. Complex
// numbers are several values.
struct DigestNans {
  int64_t value_bytes = 0;  // of a value that may be a NaN; 0 where none is
  uint64_t magnitude = 0;   // the bits of a value beside its sign
  uint64_t limit = 0;       // a value whose magnitude is larger is a NaN
};

// Two sums over all elements, of word * weight(position), each modulo 2^32: one in the upper half, one in the
// lower. A word has 2 bytes and a sign, or one byte where elements have one. Added half by half, the sums over
// the parts of a tensor are those of the tensor, however it is cut.
//
// A weight is the product of two odd numbers, of the position in a block of 4096 words (16 bits) and of the
// block (32 bits). So one word that changes always shows, and so do two different ones of a block that change
// places; whatever else changes is missed once in 2^32 or more. Words of 16 bits, since vectors of those are
// multiplied and added up in one instruction.
//
// first: index of the first element of `view` in the whole tensor, row-major; step: of its dimensions, in
// elements. Reads the memory once, without a copy of it. transfers/digest.py does the same for GPUs.
uint64_t digest(const StridedView& view, int64_t first, const std::array<int64_t, kMaxDims>& step,
                const DigestNans& nans);

// The same of the elements whose bytes are [begin, end) of the packed form of `view`. They have just been
// copied: nothing is asked for ahead.
uint64_t digest_of_copied(const StridedView& view, int64_t begin, int64_t end, int64_t first,
                          const std::array<int64_t, kMaxDims>& step, const DigestNans& nans);

}  // namespace meshcast
