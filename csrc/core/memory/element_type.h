#pragma once

#include <cstdint>

namespace meshcast {

// What the elements of a tensor are: only reductions and casts ask.
enum class ElementType : uint8_t {
  None,  // unknown, or one that can be neither reduced nor cast
  Float64,
  Float32,
  Float16,
  BFloat16,
  Int64,
  Int32,
  Int16,
  Int8,
  UInt8,
  Bool,
  Complex64,
  Complex128,
  Float8E4m3,  // torch's float8_e4m3fn
  Float8E5m2,
};

// Of one element in bytes; 0 for None.
int64_t size_of(ElementType type);

// Whether packing and unpacking can cast one into the other: between unlike ones of float32, bfloat16, float16,
// float8_e4m3fn and float8_e5m2.
bool can_cast(ElementType from, ElementType to);

// Whether every `wire` that became a `type` is the same `type` again after one more way through `wire`: a rank
// that forwards what it has unpacked may have to pack it again from there.
bool returns_through(ElementType wire, ElementType type);

}  // namespace meshcast
