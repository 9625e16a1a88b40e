#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "memory/element_type.h"
#include "memory/strided.h"
#include "plan/plan.h"
#include "run/program.h"

namespace meshcast {

// How a local tensor lies in memory, without its address.
struct TensorForm {
  std::array<int64_t, kMaxDims> stride{};  // bytes
  int64_t element_bytes = 0;
  ElementType type = ElementType::None;  // None where nothing is reduced or cast

  friend bool operator==(const TensorForm&, const TensorForm&) = default;
};

// The tensors of a run by problem. Elements travel as `wire` types, whose size the plan counts with: that of
// the source or of the destination, so that a cast happens once, in the packing of the one or the unpacking of
// the other; and what was unpacked can be packed again without loss (returns_through). A rank may hold neither
// side: the types are still those of the tensors, and the same on all ranks.
struct TensorForms {
  std::vector<TensorForm> source;
  std::vector<TensorForm> destination;
  std::vector<ElementType> wire;

  friend bool operator==(const TensorForms&, const TensorForms&) = default;
};

// Throws Error unless the forms fit the plan, and every tensor is cast on one side at most, by what packing and
// unpacking can do.
void check_forms(const Plan& plan, const TensorForms& forms);

}  // namespace meshcast
