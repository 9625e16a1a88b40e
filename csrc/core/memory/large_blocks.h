#pragma once

#include <cstddef>

namespace meshcast {

// Memory of results that fill thousands of pages: the first write to a new page costs more than writing its
// bytes. So new blocks request huge pages, and freed blocks are kept for the next result of the same size. A
// kept block is marked as free, so the system may take its pages if it is short of memory. Thread-safe; a
// forked child keeps its own.

// The size in bytes from which this pays off: a huge page.
inline constexpr size_t kLargeBlock = size_t{2} << 20;
// The most bytes that are kept; if the block that was freed last is larger, it alone is kept.
inline constexpr size_t kKeptBytes = size_t{64} << 20;

// Returns uninitialised memory, aligned to kLargeBlock. Throws std::bad_alloc.
void* take_large_block(size_t nbytes);
void give_large_block(void* block, size_t nbytes) noexcept;  // nbytes as in take_large_block()

size_t kept_large_bytes() noexcept;  // kept by this process

}  // namespace meshcast
