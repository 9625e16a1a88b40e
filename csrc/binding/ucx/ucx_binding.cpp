#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/stl.h>

#include "binding/bind.h"
#include "binding/core_binding.h"
#include "ucx/plane.h"

namespace meshcast {

using Breaks = std::map<uint64_t, uint32_t>;
using Member = std::tuple<uint64_t, std::vector<std::string>, Breaks>;  // the fields of ucx::Address

void bind_ucx(py::module_& m) {
  py::class_<ucx::Plane, std::shared_ptr<ucx::Plane>>(m, "UcxPlane")
      .def(py::init([](std::string library, std::vector<std::string> devices, double peer_seconds, bool rdma) {
             const py::gil_scoped_release loading_takes_long;
             return owned(ucx::Plane::of_process({std::move(library), std::move(devices), peer_seconds, rdma}));
           }),
           py::arg("library"), py::arg("devices"), py::arg("peer_seconds"), py::arg("rdma"))
      .def_property_readonly("version", &ucx::Plane::version)
      .def_property_readonly_static("WIRE", [](const py::object&) { return ucx::Plane::wire_version(); })
      .def("address",
           [](const ucx::Plane& self) {
             const ucx::Address address = self.address();
             std::vector<py::bytes> rails(address.rails.begin(), address.rails.end());
             return std::make_tuple(address.process, std::move(rails), address.breaks);
           })
      .def(
          "join",
          [](ucx::Plane& self, uint64_t id, const std::vector<Member>& members, int rank,
             std::vector<int32_t> first_rail) {
            std::vector<ucx::Address> addresses;
            addresses.reserve(members.size());
            for (const auto& [process, rails, breaks] : members) addresses.push_back({process, rails, breaks});
            return owned(self.join(id, std::move(addresses), rank, std::move(first_rail)));
          },
          py::arg("number"), py::arg("members"), py::arg("rank"), py::arg("first_rail"),
          py::call_guard<py::gil_scoped_release>())
      .def(
          "watch",
          [](ucx::Plane& self, const Member& member) {
            const auto& [process, rails, breaks] = member;
            // It keeps the plane, and goes where Python drops it.
            const auto watch =
                owned(std::make_shared<std::function<std::string()>>(self.watch({process, rails, breaks})));
            return py::cpp_function([watch] { return (*watch)(); }, py::call_guard<py::gil_scoped_release>());
          },
          py::arg("member"));
}

}  // namespace meshcast
