#include "memory/element_type.h"

namespace meshcast {

bool can_reduce(ElementType type, ReduceOp op) {
  switch (traits_of(type).reductions) {
    case Reductions::Never: return false;
    case Reductions::NoMean: return op != ReduceOp::Avg;
    case Reductions::NoOrder: return op != ReduceOp::Min && op != ReduceOp::Max;
    case Reductions::All: break;
  }
  return true;
}

bool can_cast(ElementType from, ElementType to) {
  return from != to && traits_of(from).casts && traits_of(to).casts;
}

bool returns_through(ElementType wire, ElementType type) {
  if (wire == type) return true;
  if (!can_cast(wire, type)) return false;
  // 65504, the largest float16, becomes the bfloat16 65536, which is infinite as a float16.
  return wire != ElementType::Float16 || type != ElementType::BFloat16;
}

}  // namespace meshcast
