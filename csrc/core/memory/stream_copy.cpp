#include "memory/stream_copy.h"

#include <cstdint>
#include <cstring>

namespace meshcast {

#if defined(__SSE2__)

namespace {

// What one instruction stores. Through the compiler's own builtins: the header that names them for both
// compilers is a different one for each, and clang-tidy reads our code with GCC's.
using Vector = long long __attribute__((vector_size(16), may_alias));

constexpr size_t kLine = 64;  // bytes that the processor writes out in one go, if they come together
constexpr size_t kWorthwhile = 4 * kLine;  // below this, the lines cut at both ends cost more than is saved

Vector load(const std::byte* from) {
  Vector value;
  std::memcpy(&value, from, sizeof(value));
  return value;
}

void store(std::byte* to, Vector value) {
  auto* out = reinterpret_cast<Vector*>(to);
#if defined(__clang__)
  __builtin_nontemporal_store(value, out);
#else
  __builtin_ia32_movntdq(out, value);
#endif
}

}  // namespace

void stream_copy(std::byte* to, const std::byte* from, size_t nbytes) {
  if (nbytes >= kWorthwhile) {
    const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
    std::memcpy(to, from, head);
    to += head;
    from += head;
    nbytes -= head;
    for (; nbytes >= kLine; nbytes -= kLine, to += kLine, from += kLine) {
      const Vector a = load(from);
      const Vector b = load(from + 16);
      const Vector c = load(from + 32);
      const Vector d = load(from + 48);
      store(to, a);
      store(to + 16, b);
      store(to + 32, c);
      store(to + 48, d);
    }
  }
  std::memcpy(to, from, nbytes);
}

void end_stream() { __builtin_ia32_sfence(); }

#else

void stream_copy(std::byte* to, const std::byte* from, size_t nbytes) { std::memcpy(to, from, nbytes); }

void end_stream() {}

#endif

}  // namespace meshcast
