#pragma once

#include <cstdint>
#include <type_traits>

#include "common/error.h"
#include "common/numbers.h"
#include "layout/layout.h"

namespace meshcast {

// The type of a tensor's elements; used only by reductions and casts.
enum class ElementType : uint8_t {
  None,  // unknown, or a type that can be neither reduced nor cast
#define MESHCAST_ELEMENT_TYPE(name, ...) name,
#include "memory/element_types.def"
};

// Used instead of std::complex, whose product has special rules for infinities, which torch does not follow and
// a kernel cannot call.
template <typename T>
struct Complex {
  T re;
  T im;
};

// The reductions that a type supports.
enum class Reductions : uint8_t { Never, All, NoMean, NoOrder };

struct ElementTraits {
  ElementType type = ElementType::None;
  const char* dtype = "";  // torch's name
  int64_t bytes = 0;       // of one element
  Reductions reductions = Reductions::Never;
  bool casts = false;  // kernels can
};

inline constexpr ElementTraits kElementTypes[] = {
    {},
#define MESHCAST_ELEMENT_TYPE(name, cpp_type, reductions, casts, at_type, dtype) \
  {ElementType::name, dtype, int64_t{sizeof(cpp_type)}, Reductions::reductions, casts},
#include "memory/element_types.def"
};

constexpr const ElementTraits& traits_of(ElementType type) { return kElementTypes[static_cast<size_t>(type)]; }

// The size of one element in bytes; 0 for None.
constexpr int64_t size_of(ElementType type) { return traits_of(type).bytes; }

// Whether partial values of this type support this reduction.
bool can_reduce(ElementType type, ReduceOp op);

// Whether packing and unpacking can cast one into the other: between different floats of 32 bits or less.
bool can_cast(ElementType from, ElementType to);

// Whether every value that was cast from `wire` to `type` is unchanged by another cast to `wire` and back: a
// rank that forwards what it has unpacked may have to pack it again from there.
bool returns_through(ElementType wire, ElementType type);

// Calls visit with a value of the C++ type of a type that some reduction supports; throws for all others.
template <typename Visit>
void visit_reduced(ElementType type, const Visit& visit) {
#define MESHCAST_ELEMENT_TYPE(name, cpp_type, reductions, ...) \
  if constexpr (Reductions::reductions != Reductions::Never) { \
    if (type == ElementType::name) return visit(cpp_type{});   \
  }
#include "memory/element_types.def"
  throw Error(ErrorKind::Generic, "a reduction of elements of a type that has none was started");
}

// The same for types that kernels cast.
template <typename Visit>
void visit_cast(ElementType type, const Visit& visit) {
#define MESHCAST_ELEMENT_TYPE(name, cpp_type, reductions, casts, ...) \
  if constexpr (casts) {                                              \
    if (type == ElementType::name) return visit(cpp_type{});          \
  }
#include "memory/element_types.def"
  throw Error(ErrorKind::Generic, "no kernel casts between these types: cast before the transfer");
}

}  // namespace meshcast
