#include "memory/changes.h"

#include <algorithm>
#include <array>
#include <bit>
#include <cstring>
#include <string>
#include <type_traits>

#include "common/error.h"

// clang-tidy cannot read the intrinsics of GCC's headers (CMakeLists.txt).
#if defined(__x86_64__) && !defined(MESHCAST_NO_INTRINSICS)
#define MESHCAST_X86
#include <immintrin.h>
#endif

namespace meshcast {
namespace {

constexpr int64_t kGroup = 64;  // elements
constexpr int64_t kByteBits = 8;

template <typename T>
T loaded(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return value;
}

// The elements of a box by their row-major positions. Dimensions that lie one behind the other in memory are
// merged, so that most groups are in one run.
class BoxCursor {
 public:
  explicit BoxCursor(const StridedView& view) : origin_(view.data), step_(view.element_bytes) {
    for (int d = 0; d < view.ndim; ++d) {
      if (view.extent[d] == 1) continue;
      const bool dense = dims_ > 0 && stride_[dims_ - 1] == view.extent[d] * view.stride[d];
      const int to = dense ? dims_ - 1 : dims_++;
      extent_[to] = dense ? extent_[to] * view.extent[d] : view.extent[d];
      stride_[to] = view.stride[d];
    }
    if (dims_ == 0) return;
    --dims_;
    length_ = extent_[dims_];
    step_ = stride_[dims_];
    seek(0);
  }

  // Bytes between neighbours in a run.
  int64_t step() const { return step_; }

  // Where a group begins that is in one run; else null.
  std::byte* group(int64_t position) {
    if (position < first_ || position >= first_ + length_) seek(position);
    const int64_t inside = position - first_;
    return inside + kGroup <= length_ ? run_ + inside * step_ : nullptr;
  }

  // Passes the parts of [position, position + n) in each run: where they begin, after how many elements, and
  // how many they are.
  template <typename Visit>
  [[gnu::always_inline]] void visit(int64_t position, int64_t n, const Visit& part) {
    for (int64_t done = 0; done < n;) {
      const int64_t inside = position + done - first_;
      if (inside < 0 || inside >= length_) [[unlikely]] {
        seek(position + done);
        continue;
      }
      const int64_t here = std::min(n - done, length_ - inside);
      part(run_ + inside * step_, done, here);
      done += here;
    }
  }

 private:
  void seek(int64_t position) {
    int64_t run = position / length_;
    first_ = run * length_;
    run_ = origin_;
    for (int d = dims_; d-- > 0; run /= extent_[d]) run_ += run % extent_[d] * stride_[d];
  }

  std::byte* origin_;
  std::byte* run_ = origin_;
  int64_t first_ = 0;   // position at which the run begins
  int64_t length_ = 1;  // of a run, elements
  int64_t step_;
  int dims_ = 0;  // outside of runs
  std::array<int64_t, kMaxDims> extent_{};
  std::array<int64_t, kMaxDims> stride_{};
};

// A bit for each of n elements that differ, at most kGroup.
template <typename T>
uint64_t differing_one_by_one(const std::byte* a, const std::byte* b, int64_t n) {
  uint64_t found = 0;
  for (int64_t i = 0; i < n; ++i) {
    const auto at = i * static_cast<int64_t>(sizeof(T));
    found |= uint64_t{loaded<T>(a + at) != loaded<T>(b + at)} << i;
  }
  return found;
}

#ifdef MESHCAST_X86
// 16 elements that are equal, as bytes of ones.
template <typename T>
[[gnu::always_inline]] inline __m128i equal_bytes(const std::byte* a, const std::byte* b) {
  const auto vector = [](const std::byte* from, int at) __attribute__((always_inline)) {
    return _mm_loadu_si128(reinterpret_cast<const __m128i*>(from) + at);
  };
  if constexpr (sizeof(T) == 1) {
    return _mm_cmpeq_epi8(vector(a, 0), vector(b, 0));
  } else if constexpr (sizeof(T) == 2) {
    return _mm_packs_epi16(_mm_cmpeq_epi16(vector(a, 0), vector(b, 0)),
                           _mm_cmpeq_epi16(vector(a, 1), vector(b, 1)));
  } else {
    const auto four = [&](int at) __attribute__((always_inline)) {
      return _mm_cmpeq_epi32(vector(a, at), vector(b, at));
    };
    return _mm_packs_epi16(_mm_packs_epi32(four(0), four(1)), _mm_packs_epi32(four(2), four(3)));
  }
}
#endif

template <typename T>
[[gnu::always_inline]] inline uint64_t differing(const std::byte* a, const std::byte* b, int64_t n) {
#ifdef MESHCAST_X86
  if constexpr (sizeof(T) <= 4) {
    if (n == kGroup) {
      constexpr int64_t kBytes = 16 * sizeof(T);
      uint64_t equal = 0;
      for (int i = 0; i < 4; ++i) {
        const int bits = _mm_movemask_epi8(equal_bytes<T>(a + i * kBytes, b + i * kBytes));
        equal |= static_cast<uint64_t>(static_cast<uint32_t>(bits)) << (16 * i);
      }
      return ~equal;
    }
  }
#endif
  return differing_one_by_one<T>(a, b, n);
}

// A bit for each byte that is not zero.
[[gnu::always_inline]] inline uint32_t set_bytes(uint64_t bits) {
  bits |= bits >> 4;
  bits |= bits >> 2;
  bits |= bits >> 1;
  return static_cast<uint32_t>((bits & 0x0101010101010101U) * 0x0102040810204080U >> 56);
}

// The bytes of a group behind its bit in the map; `earlier` becomes `now`. Returns where they end.
using PutGroup = std::byte* (*)(const std::byte* now, std::byte* earlier, uint64_t changed, std::byte* out);
// The inverse. Returns where the next group begins.
using TakeGroup = const std::byte* (*)(const std::byte* from, std::byte* to);
// Bytes that both may touch, which is more than those of the group.
template <typename T>
constexpr int64_t kTouched = 1 + kByteBits + kGroup* int64_t{sizeof(T)} + 64;

#ifdef MESHCAST_X86
// Processors that pack and spread the lanes of a vector do it without a branch for each element, of which many
// would be predicted wrongly.
#define MESHCAST_PACKS_LANES gnu::target("avx512f,avx512bw,avx512vl,avx512vbmi2,popcnt")

bool packs_lanes() {
  return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
         __builtin_cpu_supports("avx512vbmi2");
}

template <typename T>
[[MESHCAST_PACKS_LANES]] std::byte* put_group(const std::byte* now, std::byte* earlier, uint64_t changed,
                                              std::byte* out) {
  constexpr int kLanes = 64 / sizeof(T);
  const __m128i bits = _mm_cvtsi64_si128(static_cast<int64_t>(changed));
  const __mmask16 bytes = _mm_test_epi8_mask(bits, bits);
  *out++ = static_cast<std::byte>(bytes);
  _mm_storel_epi64(reinterpret_cast<__m128i*>(out), _mm_maskz_compress_epi8(bytes, bits));
  out += __builtin_popcount(bytes);
  for (int i = 0; i < kGroup / kLanes; ++i) {
    const __m512i values = _mm512_loadu_si512(now + i * 64);
    const uint64_t mine = kLanes == 64 ? changed : changed >> (i * kLanes) & ((uint64_t{1} << kLanes % 64) - 1);
    __m512i packed = _mm512_setzero_si512();
    if constexpr (sizeof(T) == 1) packed = _mm512_maskz_compress_epi8(mine, values);
    if constexpr (sizeof(T) == 2) packed = _mm512_maskz_compress_epi16(static_cast<__mmask32>(mine), values);
    if constexpr (sizeof(T) == 4) packed = _mm512_maskz_compress_epi32(static_cast<__mmask16>(mine), values);
    if constexpr (sizeof(T) == 8) packed = _mm512_maskz_compress_epi64(static_cast<__mmask8>(mine), values);
    _mm512_storeu_si512(out, packed);
    _mm512_storeu_si512(earlier + i * 64, values);
    out += static_cast<int64_t>(sizeof(T)) * __builtin_popcountll(mine);
  }
  return out;
}

template <typename T>
[[MESHCAST_PACKS_LANES]] const std::byte* take_group(const std::byte* from, std::byte* to) {
  constexpr int kLanes = 64 / sizeof(T);
  const auto bytes = static_cast<__mmask16>(*from++);
  const __m128i packed = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(from));
  const auto changed = static_cast<uint64_t>(_mm_cvtsi128_si64(_mm_maskz_expand_epi8(bytes, packed)));
  from += __builtin_popcount(bytes);
  for (int i = 0; i < kGroup / kLanes; ++i) {
    const __m512i values = _mm512_loadu_si512(from);
    const __m512i before = _mm512_loadu_si512(to + i * 64);
    const uint64_t mine = kLanes == 64 ? changed : changed >> (i * kLanes) & ((uint64_t{1} << kLanes % 64) - 1);
    __m512i now = _mm512_setzero_si512();
    if constexpr (sizeof(T) == 1) now = _mm512_mask_expand_epi8(before, mine, values);
    if constexpr (sizeof(T) == 2) now = _mm512_mask_expand_epi16(before, static_cast<__mmask32>(mine), values);
    if constexpr (sizeof(T) == 4) now = _mm512_mask_expand_epi32(before, static_cast<__mmask16>(mine), values);
    if constexpr (sizeof(T) == 8) now = _mm512_mask_expand_epi64(before, static_cast<__mmask8>(mine), values);
    _mm512_storeu_si512(to + i * 64, now);
    from += static_cast<int64_t>(sizeof(T)) * __builtin_popcountll(mine);
  }
  return from;
}

#undef MESHCAST_PACKS_LANES

template <typename T>
PutGroup put_group_of() {
  return packs_lanes() ? put_group<T> : nullptr;
}
template <typename T>
TakeGroup take_group_of() {
  return packs_lanes() ? take_group<T> : nullptr;
}
#else
template <typename T>
PutGroup put_group_of() {
  return nullptr;
}
template <typename T>
TakeGroup take_group_of() {
  return nullptr;
}
#endif

int64_t elements_of(const StridedView& box) { return box.nbytes() / box.element_bytes; }
int64_t groups_of(int64_t elements) { return (elements + kGroup - 1) / kGroup; }
int64_t map_bytes_of(int64_t elements) { return (groups_of(elements) + kByteBits - 1) / kByteBits; }

// The record of a box, which has fewer bytes than its elements; 0 where nothing has changed, -1 where it would
// be longer. `earlier` then has a part of this version.
template <typename T>
int64_t encode_box(const StridedView& box, std::byte* earlier, std::byte* out) {
  constexpr auto kElement = static_cast<int64_t>(sizeof(T));
  const int64_t elements = elements_of(box);
  const int64_t map_bytes = map_bytes_of(elements);
  const int64_t limit = elements * kElement;
  std::memset(out, 0, static_cast<size_t>(map_bytes));
  BoxCursor cursor(box);
  const bool dense = cursor.step() == kElement;
  const PutGroup put = put_group_of<T>();
  std::array<std::byte, kGroup * sizeof(T)> gathered;
  int64_t at = map_bytes;
  for (int64_t first = 0; first < elements; first += kGroup, earlier += kGroup * kElement) {
    const int64_t n = std::min(kGroup, elements - first);
    const std::byte* now = gathered.data();
    cursor.visit(first, n, [&](const std::byte* from, int64_t done, int64_t here) {
      if (dense && here == n) {
        now = from;
      } else if (dense) {
        std::memcpy(gathered.data() + done * kElement, from, static_cast<size_t>(here * kElement));
      } else {
        for (int64_t i = 0; i < here; ++i)
          std::memcpy(gathered.data() + (done + i) * kElement, from + i * cursor.step(), sizeof(T));
      }
    });
    uint64_t changed = differing<T>(now, earlier, n);
    if (changed == 0) continue;
    if (put != nullptr && n == kGroup && at + kTouched<T> < limit) {
      out[first / kGroup / kByteBits] |= std::byte{1} << (first / kGroup % kByteBits);
      at = put(now, earlier, changed, out + at) - out;
      continue;
    }
    uint32_t bytes = set_bytes(changed);
    const int64_t more = 1 + std::popcount(bytes) + std::popcount(changed) * kElement;
    if (at + more >= limit) return -1;
    const int64_t group = first / kGroup;
    out[group / kByteBits] |= std::byte{1} << (group % kByteBits);
    out[at++] = static_cast<std::byte>(bytes);
    for (; bytes != 0; bytes &= bytes - 1)
      out[at++] = static_cast<std::byte>(changed >> (kByteBits * std::countr_zero(bytes)) & 0xFF);
    for (; changed != 0; changed &= changed - 1, at += kElement)
      std::memcpy(out + at, now + std::countr_zero(changed) * kElement, sizeof(T));
    std::memcpy(earlier, now, static_cast<size_t>(n * kElement));
  }
  return at == map_bytes ? 0 : at;
}

// Whether these are the bytes of a record of so many elements. A branch for a group: it reads the bytes with a
// bit for each element as one word, and counts in it.
[[gnu::always_inline]] inline bool fits(const std::byte* record, int64_t nbytes, int64_t elements,
                                        int64_t element_bytes) {
  const int64_t map_bytes = map_bytes_of(elements);
  if (nbytes <= map_bytes) return false;
  int64_t at = map_bytes;
  for (int64_t group = 0; group < map_bytes * kByteBits; ++group) {
    const int64_t first = group * kGroup;
    if ((record[group / kByteBits] & std::byte{1} << (group % kByteBits)) == std::byte{0}) continue;
    if (at >= nbytes) return false;
    const auto bytes = static_cast<uint32_t>(record[at++]);
    const int count = std::popcount(bytes);
    if (count == 0 || at + count > nbytes) return false;
    uint64_t bits = 0;
    if (at + kByteBits <= nbytes) {
      bits = loaded<uint64_t>(record + at) << (kGroup - kByteBits * count);
    } else {
      std::memcpy(reinterpret_cast<std::byte*>(&bits) + kByteBits - count, record + at,
                  static_cast<size_t>(count));
    }
    if (std::popcount(set_bytes(bits)) != count) return false;
    const int64_t n = elements - first;
    const int64_t last = kByteBits * (std::bit_width(bytes) - 1) + static_cast<int64_t>(std::bit_width(bits)) -
                         (kGroup - kByteBits);
    if (last > n) return false;
    at += count;
    const int64_t values = std::popcount(bits);
    at += values * element_bytes;
    if (at > nbytes) return false;
  }
  return at == nbytes;
}

#ifdef MESHCAST_X86
[[gnu::target("popcnt")]] bool fits_counted(const std::byte* record, int64_t nbytes, int64_t elements,
                                            int64_t element_bytes) {
  return fits(record, nbytes, elements, element_bytes);
}

bool is_record(const std::byte* record, int64_t nbytes, int64_t elements, int64_t element_bytes) {
  return __builtin_cpu_supports("popcnt") ? fits_counted(record, nbytes, elements, element_bytes)
                                          : fits(record, nbytes, elements, element_bytes);
}
#else
bool is_record(const std::byte* record, int64_t nbytes, int64_t elements, int64_t element_bytes) {
  return fits(record, nbytes, elements, element_bytes);
}
#endif

template <typename T>
void apply_box(const std::byte* record, const std::byte* end, const StridedView& box) {
  constexpr auto kElement = static_cast<int64_t>(sizeof(T));
  const int64_t elements = elements_of(box);
  const int64_t map_bytes = map_bytes_of(elements);
  const std::byte* at = record + map_bytes;
  BoxCursor cursor(box);
  const TakeGroup take = cursor.step() == kElement ? take_group_of<T>() : nullptr;
  for (int64_t byte = 0; byte < map_bytes; ++byte) {
    for (auto left = static_cast<uint32_t>(record[byte]); left != 0; left &= left - 1) {
      const int64_t first = (byte * kByteBits + std::countr_zero(left)) * kGroup;
      std::byte* const group = take != nullptr && end - at >= kTouched<T> ? cursor.group(first) : nullptr;
      if (group != nullptr) {
        at = take(at, group);
        continue;
      }
      uint64_t changed = 0;
      for (auto bytes = static_cast<uint32_t>(*at++); bytes != 0; bytes &= bytes - 1)
        changed |= static_cast<uint64_t>(*at++) << (kByteBits * std::countr_zero(bytes));
      cursor.visit(first, std::min(kGroup, elements - first), [&](std::byte* to, int64_t done, int64_t here) {
        uint64_t mine = changed >> done;
        if (here < kGroup) mine &= (uint64_t{1} << here) - 1;
        for (; mine != 0; mine &= mine - 1, at += kElement)
          std::memcpy(to + std::countr_zero(mine) * cursor.step(), at, sizeof(T));
      });
    }
  }
}

// Calls `action` with a value of the unsigned type of an element.
template <typename Action>
auto by_element(int64_t element_bytes, const Action& action) {
  switch (element_bytes) {
    case 1: return action(uint8_t{});
    case 2: return action(uint16_t{});
    case 4: return action(uint32_t{});
    case 8: return action(uint64_t{});
    default: throw LayoutError("changes: elements of " + std::to_string(element_bytes) + " bytes");
  }
}

[[noreturn]] void throw_not_changes(size_t box, const std::string& why) {
  throw Error(ErrorKind::Generic,
              "the changes of box " + std::to_string(box) + " are damaged, and nothing was written: " + why);
}

struct ChangedBox {
  const std::byte* at;
  int64_t nbytes;
  bool raw;
};

}  // namespace

int64_t encode_changes(const std::vector<StridedView>& boxes, std::byte* earlier, std::byte* stream) {
  int64_t at = 0;
  bool any = false;
  for (const StridedView& box : boxes) {
    const int64_t nbytes = box.nbytes();
    std::byte* const out = stream + at + kStreamHead;
    int64_t size = 0;
    if (nbytes > 0) {
      size = by_element(box.element_bytes, [&]<typename T>(T) { return encode_box<T>(box, earlier, out); });
    }
    const bool raw = size < 0;
    if (raw) {
      size = nbytes;
      pack(box, out);
      std::memcpy(earlier, out, static_cast<size_t>(nbytes));
    }
    const uint64_t head = static_cast<uint64_t>(size) << 1 | uint64_t{raw};
    std::memcpy(stream + at, &head, sizeof(head));
    any = any || size > 0;
    at += kStreamHead + size;
    earlier += nbytes;
  }
  return any ? at : 0;
}

void apply_changes(const std::byte* stream, int64_t nbytes,
                   const std::vector<std::vector<StridedView>>& boxes) {
  std::vector<ChangedBox> found(boxes.size());
  int64_t at = 0;
  for (size_t i = 0; i < boxes.size(); ++i) {
    const StridedView& box = boxes[i].at(0);
    if (nbytes - at < kStreamHead) throw_not_changes(i, "its length is missing");
    const auto head = loaded<uint64_t>(stream + at);
    at += kStreamHead;
    const uint64_t size = head >> 1;
    if (size > static_cast<uint64_t>(nbytes - at)) throw_not_changes(i, "they end too early");
    const bool raw = (head & 1) != 0;
    const auto length = static_cast<int64_t>(size);
    found[i] = {length == 0 ? nullptr : stream + at, length, raw};
    if (raw && length != box.nbytes()) throw_not_changes(i, "its elements have another size");
    if (!raw && length > 0 && !is_record(stream + at, length, elements_of(box), box.element_bytes))
      throw_not_changes(i, "bit maps and values do not fit");
    at += length;
  }
  if (at != nbytes) throw_not_changes(boxes.size(), "more follow than there are boxes");
  for (size_t i = 0; i < boxes.size(); ++i) {
    if (found[i].at == nullptr) continue;
    for (const StridedView& box : boxes[i]) {
      if (found[i].raw) {
        unpack(found[i].at, box);
      } else {
        by_element(box.element_bytes,
                   [&]<typename T>(T) { apply_box<T>(found[i].at, found[i].at + found[i].nbytes, box); });
      }
    }
  }
}

}  // namespace meshcast
