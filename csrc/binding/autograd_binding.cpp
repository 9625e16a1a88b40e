#include <vector>

#include <pybind11/stl.h>
#include <torch/csrc/autograd/python_cpp_function.h>

#include "binding/bind.h"

namespace meshcast {
namespace {

torch::autograd::Node* node_of(const py::handle& node) {
  if (!torch::autograd::THPCppFunction_Check(node.ptr())) return nullptr;
  return reinterpret_cast<torch::autograd::THPCppFunction*>(node.ptr())->cdata.get();
}

// The edges of a node with these numbers lead nowhere from now on: autograd asks the node for no gradient over
// them.
void cut_edges(const py::object& node, const std::vector<size_t>& numbers) {
  torch::autograd::Node* found = node_of(node);
  if (found == nullptr) {
    throw LayoutError("cut_edges: expected a node that C++ has made, found " +
                      py::repr(node).cast<std::string>());
  }
  for (const size_t number : numbers) found->next_edges().at(number) = {};
}

// Frees the values that these nodes have saved for their backward, as a backward does that keeps no graph.
// Nodes that Python has made keep theirs.
void release_saved(const py::list& nodes) {
  for (const py::handle& node : nodes) {
    if (torch::autograd::Node* found = node_of(node)) found->release_variables();
  }
}

}  // namespace

void bind_autograd(py::module_& m) {
  m.def("cut_edges", &cut_edges, py::arg("node"), py::arg("numbers"));
  m.def("release_saved", &release_saved, py::arg("nodes"));
}

}  // namespace meshcast
