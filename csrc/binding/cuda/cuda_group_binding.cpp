#include <algorithm>
#include <cmath>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "binding/bind.h"
#include "cuda/device/nccl_library.h"
#include "cuda/group/cuda_work.h"
#include "cuda/group/gpu_group_core.h"

namespace py = pybind11;

namespace meshcast {
namespace {

using OptionalTensors = std::vector<std::optional<at::Tensor>>;
using Types = std::tuple<at::ScalarType, at::ScalarType, at::ScalarType>;

double checked_timeout(double seconds) {
  if (std::isnan(seconds)) throw LayoutError("timeout must be a number of seconds, found NaN");
  return std::max(seconds, 0.0);
}

py::dict stats_of(const c10::intrusive_ptr<c10d::Work>& work) {
  const auto* reshard = dynamic_cast<const CudaWork*>(work.get());
  if (!reshard) throw LayoutError("stats are kept for works that GpuGroupCore.start returned");
  const RoundRun& run = reshard->run();
  py::dict out;
  out["bytes_sent"] = run.rounds().program->bytes_sent;
  out["bytes_received"] = run.rounds().program->bytes_received;
  out["seconds"] = run.seconds();
  return out;
}

}  // namespace

// As in bind_runtime: what may block or free tensors runs without the GIL, and no thread below takes it.
void bind_cuda_group(py::module_& m) {
  using NoGil = py::call_guard<py::gil_scoped_release>;

  m.def("nccl_version", [] { return nccl_version_text(NcclLibrary::get().version()); });
  m.def("nccl_unique_id", [] { return py::bytes(nccl_unique_id()); });

  m.def("cuda_ipc_obstacle", &cuda_ipc_obstacle, py::arg("device"), NoGil());

  py::class_<IpcMeeting, std::shared_ptr<IpcMeeting>>(m, "IpcMeeting")
      .def(py::init<>())
      .def_property_readonly("address", &IpcMeeting::address);

  py::class_<GpuGroupCore, std::shared_ptr<GpuGroupCore>>(m, "GpuGroupCore")
      .def(py::init([](std::shared_ptr<GroupCore> control, const c10::intrusive_ptr<c10d::Store>& store,
                       std::vector<int32_t> ranks, int32_t rank, std::string name, int device) {
             const py::gil_scoped_release construct_without_gil;
             return std::shared_ptr<GpuGroupCore>(
                 new GpuGroupCore(std::move(control), store, {std::move(ranks), rank, std::move(name)}, device),
                 [](GpuGroupCore* group) {
                   std::optional<py::gil_scoped_release> release;
                   if (PyGILState_Check() != 0) release.emplace();
                   delete group;
                 });
           }),
           py::arg("control"), py::arg("store"), py::arg("ranks"), py::arg("rank"), py::arg("name"),
           py::arg("device"))
      .def(
          "connect",
          [](GpuGroupCore& self, int32_t lane, const std::string& unique_id, double timeout) {
            self.connect(lane, unique_id, checked_timeout(timeout));
          },
          py::arg("lane"), py::arg("unique_id"), py::arg("timeout"), NoGil())
      .def(
          "connect_ipc",
          [](GpuGroupCore& self, int32_t lane, const std::shared_ptr<IpcMeeting>& meeting,
             const std::vector<std::string>& addresses,
             double timeout) { self.connect_ipc(lane, *meeting, addresses, checked_timeout(timeout)); },
          py::arg("lane"), py::arg("meeting"), py::arg("addresses"), py::arg("timeout"), NoGil())
      .def(
          "start",
          [](GpuGroupCore& self, const std::shared_ptr<Plan>& plan, int32_t slot, bool reverse, int32_t lane,
             int64_t ordinal, std::string descriptor, OptionalTensors src, OptionalTensors dst, double timeout,
             std::string op, const std::vector<Types>& types, uintptr_t after) {
            RunLabel label{slot, reverse, lane, ordinal, std::move(descriptor), std::move(op)};
            std::vector<TensorTypes> by_tensor;
            for (const auto& [source, wire, destination] : types)
              by_tensor.push_back({source, wire, destination});
            return self.start(plan,
                              {std::move(label), std::move(src), std::move(dst), checked_timeout(timeout)},
                              by_tensor, after);
          },
          py::arg("plan"), py::kw_only(), py::arg("slot"), py::arg("reverse"), py::arg("lane"),
          py::arg("ordinal"), py::arg("descriptor"), py::arg("src"), py::arg("dst"), py::arg("timeout"),
          py::arg("op"), py::arg("types"), py::arg("after"), NoGil())
      .def("stats", [](GpuGroupCore&, const c10::intrusive_ptr<c10d::Work>& work) { return stats_of(work); })
      .def("abort", &GpuGroupCore::abort, py::arg("reason"), NoGil())
      .def("error", &GpuGroupCore::error, NoGil())
      .def("shutdown", &GpuGroupCore::shutdown, NoGil());
}

}  // namespace meshcast
