#pragma once

#include <cstddef>
#include <cstdint>

namespace meshcast {

// Cached: the written data will be read soon. Streamed: it is large, and bypasses the caches if the processor
// can (x86-64); the destination is then not read before it is written, and evicts nothing.
enum class Write : uint8_t { Cached, Streamed };

// The distance in bytes from the copied bytes to the prefetched ones.
inline constexpr size_t kCopyAhead = 8192;
// The size in bytes from which copy_bytes prefetches and streams: below, partial lines cost more than that
// saves.
inline constexpr size_t kCopyLines = 256;

// Copies between memory that does not overlap, and prefetches as many bytes, at most kCopyAhead, from `ahead`
// on, which the caller copies next: the processor itself prefetches within a page only. Other threads see
// streamed data once the thread that wrote it has called end_stream().
void copy_bytes(std::byte* to, const std::byte* from, size_t nbytes, const std::byte* ahead, Write write);
void end_stream();

}  // namespace meshcast
