#include "binding/bind.h"
#include "common/fault_point.h"

#if MESHCAST_FAULT_POINTS

#include <pybind11/stl.h>

namespace meshcast {

void bind_faults(py::module_& m) {
  m.def("arm_fault", &arm_fault, py::arg("text"));
  m.def("fault_points_passed", &fault_points_passed);
}

}  // namespace meshcast

#endif
