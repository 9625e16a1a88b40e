#pragma once

#include <cstddef>

namespace meshcast {

// Memory of results that fill pages by the thousand: the first write to a page of new memory costs more than
// the bytes that are written. So new blocks ask the system for huge pages, and freed ones are kept for the next
// result of the same size. What is kept is marked as free: the system takes its pages where it is short of
// memory. Thread-safe; a forked child keeps its own.

// Bytes from which a block is worth that: a huge page.
inline constexpr size_t kLargeBlock = size_t{2} << 20;
// Bytes that are kept in all, unless the block that was freed last is larger: then that one alone.
inline constexpr size_t kKeptBytes = size_t{64} << 20;

// Returns memory of any values, on a boundary of kLargeBlock. Throws std::bad_alloc.
void* take_large_block(size_t nbytes);
void give_large_block(void* block, size_t nbytes) noexcept;  // with the bytes that were asked for

size_t kept_large_bytes() noexcept;  // of this process, for the next results

}  // namespace meshcast
