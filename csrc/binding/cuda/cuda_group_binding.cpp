#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "binding/bind.h"
#include "binding/core_binding.h"
#include "c10d/c10d_store.h"
#include "cuda/device/nccl_device.h"
#include "cuda/device/nccl_library.h"
#include "cuda/group/gpu_group_core.h"

namespace meshcast {
namespace {

using Types = std::tuple<at::ScalarType, at::ScalarType, at::ScalarType>;

// staging: of a lane. link_rate, round_ns: as measured, 0 where they are not known.
RoundOptions round_options(int64_t staging, int64_t link_rate, int64_t round_ns) {
  RoundOptions out;
  out.staging_bytes = staging;
  out.link_rate = link_rate;
  out.measured_ns = round_ns;
  return out;
}

}  // namespace

void bind_cuda_group(py::module_& m) {
  m.def("nccl_version", [] { return nccl_version_text(NcclLibrary::get().version()); });
  m.def("nccl_unique_id", [] { return py::bytes(nccl_unique_id()); });

  m.def("nccl_blocks_left", &nccl_blocks_left, py::arg("device"), NoGil());
  m.def("cuda_ipc_obstacle", &cuda_ipc_obstacle, py::arg("device"), NoGil());

  m.def(
      "limit_cuda_staging", [](int device, int64_t nbytes) { ipc_staging(device).limit_to(nbytes); },
      py::arg("device"), py::arg("nbytes"));
  m.def(
      "cuda_staging",
      [](int device) {
        const StagingPool::Figures found = ipc_staging(device).figures();
        return std::map<std::string, int64_t>{
            {"limit", found.limit}, {"in_use", found.in_use},           {"spare", found.spare},
            {"peak", found.peak},   {"allocations", found.allocations}, {"returned", found.returned}};
      },
      py::arg("device"));

  py::class_<IpcMeeting, std::shared_ptr<IpcMeeting>>(m, "IpcMeeting")
      .def(py::init<>())
      .def_property_readonly("address", &IpcMeeting::address);

  py::class_<IpcProof, std::shared_ptr<IpcProof>>(m, "IpcProof")
      .def(py::init(&IpcDevice::prove), py::arg("device"), NoGil())
      .def_property_readonly("card", [](const IpcProof& self) { return py::bytes(self.card()); })
      .def(
          "check",
          [](IpcProof& self, const std::string& card, double timeout) {
            return self.check(card, deadline_after(checked_timeout(timeout)));
          },
          py::arg("card"), py::arg("timeout"), NoGil());

  bind_core<GpuGroupCore>(m, "GpuGroupCore")
      .def(py::init([](std::shared_ptr<TensorGroup> control, const c10::intrusive_ptr<c10d::Store>& store,
                       std::vector<int32_t> ranks, int32_t rank, std::string name, int device) {
             const py::gil_scoped_release construct_without_gil;
             return owned(new GpuGroupCore(std::move(control), store_of(store),
                                           {std::move(ranks), rank, std::move(name)}, device));
           }),
           py::arg("control"), py::arg("store"), py::arg("ranks"), py::arg("rank"), py::arg("name"),
           py::arg("device"))
      .def(
          "connect",
          [](GpuGroupCore& self, int32_t lane, const std::string& unique_id, int blocks, int64_t staging,
             int64_t link_rate, int64_t round_ns, double timeout) {
            const int64_t most = RoundOptions().staging_bytes;
            self.connect(lane, unique_id, blocks, round_options(std::min(most, staging), link_rate, round_ns),
                         checked_timeout(timeout));
          },
          py::arg("lane"), py::arg("unique_id"), py::arg("blocks"), py::arg("staging"), py::arg("link_rate"),
          py::arg("round_ns"), py::arg("timeout"), NoGil())
      .def(
          "connect_ipc",
          [](GpuGroupCore& self, int32_t lane, const std::shared_ptr<IpcMeeting>& meeting,
             const std::vector<std::string>& addresses, int64_t staging, int64_t link_rate, int64_t round_ns,
             double timeout) {
            self.connect_ipc(lane, *meeting, addresses, round_options(staging, link_rate, round_ns),
                             checked_timeout(timeout));
          },
          py::arg("lane"), py::arg("meeting"), py::arg("addresses"), py::arg("staging"), py::arg("link_rate"),
          py::arg("round_ns"), py::arg("timeout"), NoGil())
      .def(
          "start",
          [](GpuGroupCore& self, const AgreedPlan& agreed, int64_t ordinal, bool reverse, OptionalTensors src,
             OptionalTensors dst, double timeout, const std::vector<Types>& types, uintptr_t after,
             bool hop_by_hop) {
            std::vector<TensorTypes> by_tensor;
            for (const auto& [source, wire, destination] : types)
              by_tensor.push_back({source, wire, destination});
            return self.start(agreed,
                              {ordinal, reverse, std::move(src), std::move(dst), checked_timeout(timeout)},
                              by_tensor, after, hop_by_hop);
          },
          py::arg("agreed"), py::arg("ordinal"), py::arg("reverse"), py::arg("src"), py::arg("dst"),
          py::arg("timeout"), py::arg("types"), py::arg("after"), py::arg("hop_by_hop"), NoGil());
}

}  // namespace meshcast
