#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "binding/bind.h"
#include "c10d/group_base.h"
#include "common/forks.h"

// What the two cores of a private group look like in Python alike. Every method that may block or free tensors
// runs without the GIL; no thread of theirs takes it, but in a future's callback that is Python's.
namespace meshcast {

using NoGil = py::call_guard<py::gil_scoped_release>;
using OptionalTensors = std::vector<std::optional<at::Tensor>>;

// Limits come from Python as seconds. Zero and negative ones have expired already; NaN is a mistake.
inline double checked_timeout(double seconds) {
  if (std::isnan(seconds)) throw LayoutError("timeout must be a number of seconds, found NaN");
  return std::max(seconds, 0.0);
}

// A core's destructor joins threads, for which Python may still be holding the GIL where it drops it. A forked
// child has none of these threads, and keeps what it cannot end.
template <typename Core>
std::shared_ptr<Core> owned(Core* core) {
  return {core, [origin = Origin()](Core* last) {
            if (origin.foreign()) return;
            std::optional<py::gil_scoped_release> release;
            if (PyGILState_Check() != 0) release.emplace();
            delete last;
          }};
}

inline py::dict stats_of(const c10::intrusive_ptr<c10d::Work>& work) {
  const auto* reshard = dynamic_cast<const ReshardWork*>(work.get());
  if (!reshard) throw LayoutError("stats are kept for works that a core's start() returned");
  const RunState& run = reshard->run();
  py::dict out;
  out["bytes_sent"] = run.program().bytes_sent;
  out["bytes_received"] = run.program().bytes_received;
  out["bytes_done"] = run.sent_bytes() + run.received_bytes();  // a GPU tells nothing until it is through
  out["seconds"] = run.seconds();
  return out;
}

// A class with what both have.
template <typename Core>
py::class_<Core, std::shared_ptr<Core>> bind_core(py::module_& m, const char* name) {
  py::class_<Core, std::shared_ptr<Core>> core(m, name);
  core.def("stats", [](Core&, const c10::intrusive_ptr<c10d::Work>& work) { return stats_of(work); })
      .def("abort", &Core::abort, py::arg("reason"), NoGil())
      .def("error", &Core::error, NoGil())
      .def("shutdown", &Core::shutdown, NoGil());
  return core;
}

}  // namespace meshcast
