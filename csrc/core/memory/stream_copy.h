#pragma once

#include <cstddef>

namespace meshcast {

// Copies past the caches where the processor can (x86-64), else as memcpy does: the destination is then not
// read in before it is written and pushes nothing out. For memory that is not read again soon. The two do not
// overlap. What it wrote is seen by other threads after end_stream(), called by the thread that wrote.
void stream_copy(std::byte* to, const std::byte* from, size_t nbytes);
void end_stream();

}  // namespace meshcast
