#include <vector>

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_cpp_function.h>

#include "binding/bind.h"

namespace meshcast {
namespace {

// The edges of a node with these numbers lead nowhere from now on: autograd asks the node for no gradient over
// them, and what lies behind them is let go of.
void cut_edges(const py::object& node, const std::vector<size_t>& numbers) {
  if (!torch::autograd::THPCppFunction_Check(node.ptr())) {
    throw LayoutError("cut_edges: expected a node that C++ has made, found " +
                      py::repr(node).cast<std::string>());
  }
  auto& edges = reinterpret_cast<torch::autograd::THPCppFunction*>(node.ptr())->cdata->next_edges();
  for (const size_t number : numbers) edges.at(number) = {};
}

}  // namespace

void bind_autograd(py::module_& m) { m.def("cut_edges", &cut_edges, py::arg("node"), py::arg("numbers")); }

}  // namespace meshcast
