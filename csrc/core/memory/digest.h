#pragma once

#include <array>
#include <cstdint>

#include "memory/strided.h"

namespace meshcast {

// Which values of a tensor are NaNs: they all count as the same value, since casts do not keep their payload. A
// complex number is several values.
struct DigestNans {
  int64_t value_bytes = 0;  // of a value that may be a NaN; 0 if none may be
  uint64_t magnitude = 0;   // the bits of a value except its sign
  uint64_t limit = 0;       // a value whose magnitude is larger is a NaN
};

// Two sums over all elements, of word * weight(position), each modulo 2^32: one in the upper half, one in the
// lower. A word has 2 bytes and a sign, or one byte if elements have one. Added half by half, the sums over the
// parts of a tensor give the sums of the tensor, however it is cut.
//
// A weight is the product of two odd numbers, of the position in a block of 4096 words (16 bits) and of the
// block (32 bits). So a change of one word is always detected, and so is an exchange of two different words of
// a block; any other change is missed once in 2^32 or more. Words have 16 bits, since one instruction
// multiplies and adds vectors of those.
//
// first: index of the first element of `view` in the whole tensor, row-major; step: of its dimensions, in
// elements. Reads the memory once, without a copy. transfers/digest.py does the same for GPUs.
uint64_t digest(const StridedView& view, int64_t first, const std::array<int64_t, kMaxDims>& step,
                const DigestNans& nans);

// The same for the elements whose bytes are [begin, end) of the packed form of `view`. They have just been
// copied, so nothing is prefetched.
uint64_t digest_of_copied(const StridedView& view, int64_t begin, int64_t end, int64_t first,
                          const std::array<int64_t, kMaxDims>& step, const DigestNans& nans);

}  // namespace meshcast
