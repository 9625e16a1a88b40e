#pragma once

#include <cstddef>
#include <cstdint>

namespace meshcast {

// Cached: what is written will be read soon. Streamed: it is large, and passes the caches by where the
// processor can (x86-64); the destination is then not read in before it is written and pushes nothing out.
enum class Write : uint8_t { Cached, Streamed };

// Bytes between what is copied and what is asked for meanwhile.
inline constexpr size_t kCopyAhead = 8192;
// Bytes from which copy_bytes asks ahead and streams: below, lines cut at both ends cost more than is saved.
inline constexpr size_t kCopyLines = 256;

// Copies between memory that does not overlap, and asks meanwhile for as many bytes, at most kCopyAhead, from
// `ahead` on, which the caller copies next: the processor looks ahead by itself within a page of memory only.
// What is streamed is seen by other threads after end_stream(), called by the thread that wrote.
void copy_bytes(std::byte* to, const std::byte* from, size_t nbytes, const std::byte* ahead, Write write);
void end_stream();

}  // namespace meshcast
