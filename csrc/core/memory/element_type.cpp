#include "memory/element_type.h"

namespace meshcast {
namespace {

bool is_cast_type(ElementType type) {
  switch (type) {
    case ElementType::Float32:
    case ElementType::BFloat16:
    case ElementType::Float16:
    case ElementType::Float8E4m3:
    case ElementType::Float8E5m2: return true;
    default: return false;
  }
}

}  // namespace

int64_t size_of(ElementType type) {
  switch (type) {
    case ElementType::None: return 0;
    case ElementType::Int8:
    case ElementType::UInt8:
    case ElementType::Bool:
    case ElementType::Float8E4m3:
    case ElementType::Float8E5m2: return 1;
    case ElementType::Float16:
    case ElementType::BFloat16:
    case ElementType::Int16: return 2;
    case ElementType::Float32:
    case ElementType::Int32: return 4;
    case ElementType::Float64:
    case ElementType::Int64:
    case ElementType::Complex64: return 8;
    case ElementType::Complex128: return 16;
  }
  return 0;
}

bool can_cast(ElementType from, ElementType to) { return from != to && is_cast_type(from) && is_cast_type(to); }

bool returns_through(ElementType wire, ElementType type) {
  if (wire == type) return true;
  if (!can_cast(wire, type)) return false;
  // 65504, the largest float16, becomes the bfloat16 65536, which is infinite as a float16.
  return wire != ElementType::Float16 || type != ElementType::BFloat16;
}

}  // namespace meshcast
