#include "memory/copy_bytes.h"

#include <array>
#include <cstring>

namespace meshcast {
namespace {

constexpr size_t kLine = 64;  // bytes that are read from memory, or written to it, together

// Copies whole lines; `to` is at the beginning of a line.
using CopyLines = void (*)(std::byte* to, const std::byte* from, size_t nbytes, const std::byte* ahead);

// Uses the compiler's vectors and builtins: each compiler has its own header of intrinsics, and clang-tidy
// reads our code with GCC's.
template <typename Vector, typename Store>
[[gnu::always_inline]] inline void copy_lines(std::byte* to, const std::byte* from, size_t nbytes,
                                              const std::byte* ahead, const Store& store) {
  using Type = typename Vector::Type;
  for (size_t at = 0; at < nbytes; at += kLine) {
    __builtin_prefetch(ahead + at);
    for (size_t i = 0; i < kLine; i += sizeof(Type)) {
      Type value;
      std::memcpy(&value, from + at + i, sizeof(Type));
      store(reinterpret_cast<Type*>(to + at + i), &value);
    }
  }
}

struct Narrow {
  using Type = long long __attribute__((vector_size(16), may_alias));
};

void cached(std::byte* to, const std::byte* from, size_t nbytes, const std::byte* ahead) {
  copy_lines<Narrow>(to, from, nbytes, ahead, [](auto* out, const auto* value) { *out = *value; });
}

#if defined(__SSE2__)
void streamed(std::byte* to, const std::byte* from, size_t nbytes, const std::byte* ahead) {
  copy_lines<Narrow>(to, from, nbytes, ahead, [](auto* out, const auto* value) {
#if defined(__clang__)
    __builtin_nontemporal_store(*value, out);
#else
    __builtin_ia32_movntdq(out, *value);
#endif
  });
}
#else
constexpr CopyLines streamed = cached;
#endif

#if defined(__x86_64__)
struct Wide {
  using Type = long long __attribute__((vector_size(32), may_alias));
};

[[gnu::target("avx2")]] void wide_cached(std::byte* to, const std::byte* from, size_t nbytes,
                                         const std::byte* ahead) {
  copy_lines<Wide>(
      to, from, nbytes, ahead,
      [](auto* out, const auto* value) __attribute__((always_inline)) { *out = *value; });
}

[[gnu::target("avx2")]] void wide_streamed(std::byte* to, const std::byte* from, size_t nbytes,
                                           const std::byte* ahead) {
  copy_lines<Wide>(
      to, from, nbytes, ahead, [](auto* out, const auto* value) __attribute__((always_inline)) {
#if defined(__clang__)
        __builtin_nontemporal_store(*value, out);
#else
        __builtin_ia32_movntdq256(out, *value);
#endif
      });
}
#endif

std::array<CopyLines, 2> chosen() {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("avx2")) return {wide_cached, wide_streamed};
#endif
  return {cached, streamed};
}

const std::array<CopyLines, 2> kCopyLinesOf = chosen();  // by Write

}  // namespace

void copy_bytes(std::byte* to, const std::byte* from, size_t nbytes, const std::byte* ahead, Write write) {
  if (nbytes >= kCopyLines) {
    const size_t head = (kLine - reinterpret_cast<uintptr_t>(to) % kLine) % kLine;
    std::memcpy(to, from, head);
    to += head;
    from += head;
    nbytes -= head;
    const size_t lines = nbytes / kLine * kLine;
    const CopyLines copy = kCopyLinesOf[static_cast<size_t>(write)];
    // In a long run, its own bytes come next, up to its end.
    const size_t within = lines > kCopyAhead ? lines - kCopyAhead : 0;
    copy(to, from, within, from + kCopyAhead);
    copy(to + within, from + within, lines - within, ahead);
    to += lines;
    from += lines;
    nbytes -= lines;
  }
  std::memcpy(to, from, nbytes);
}

#if defined(__SSE2__)
void end_stream() { __builtin_ia32_sfence(); }
#else
void end_stream() {}
#endif

}  // namespace meshcast
