#include "rounds/tensor_forms.h"

#include <fmt/format.h>

#include "common/error.h"

namespace meshcast {
namespace {

void check_form(size_t tensor, const TensorForm& source, const TensorForm& destination, ElementType wire,
                int64_t wire_bytes) {
  const auto refuse_sizes = [tensor](int64_t found, int64_t expected) {
    throw Error(ErrorKind::Generic, fmt::format("tensor {} has elements of {} bytes, its plan counts with {}",
                                                tensor, found, expected));
  };
  for (const TensorForm* form : {&source, &destination}) {
    const int64_t expected = form->type == wire ? wire_bytes : size_of(form->type);
    if (form->element_bytes != expected) refuse_sizes(form->element_bytes, expected);
  }
  const bool at_source = source.type != wire;
  const bool at_destination = destination.type != wire;
  if (!at_source && !at_destination) return;
  if (size_of(wire) != wire_bytes) refuse_sizes(size_of(wire), wire_bytes);
  if ((at_source && at_destination) || (at_source && !can_cast(source.type, wire)) ||
      (at_destination && !returns_through(wire, destination.type)))
    throw Error(
        ErrorKind::Generic,
        fmt::format("tensor {} would be cast as no rank can on the way: cast it before or after", tensor));
}

}  // namespace

void check_forms(const Plan& plan, const TensorForms& forms) {
  const size_t problems = plan.problems.size();
  if (forms.source.size() != problems || forms.destination.size() != problems || forms.wire.size() != problems)
    throw Error(ErrorKind::Generic,
                fmt::format("forms of {} tensors for a plan of {}", forms.source.size(), problems));
  for (size_t i = 0; i < problems; ++i)
    check_form(i, forms.source[i], forms.destination[i], forms.wire[i], plan.problems[i].element_bytes);
}

}  // namespace meshcast
