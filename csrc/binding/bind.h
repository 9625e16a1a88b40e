#pragma once

#include <exception>
#include <memory>

#include <pybind11/pybind11.h>

#include "common/error.h"

// The files of this folder are the only ones that know Python. Each adds its part of the module _C.
namespace meshcast {

namespace py = pybind11;

// meshcast::Error and its kinds become the classes of meshcast.errors, also where they pass through torch's
// bindings.
void bind_errors(pybind11::module_& m);

// The instance of its Python class.
pybind11::object instance_of(const Error& error);

// The reverse, for errors that Python keeps for a C++ caller: class, text and fields.
Error error_from(const pybind11::object& raised);

// An exception of Python that passes through C++ and back, where it is the same object again.
class PythonError : public Error {
 public:
  PythonError(const Error& error, std::shared_ptr<PyObject> raised)
      : Error(error), raised_(std::move(raised)) {}
  PyObject* raised() const { return raised_.get(); }

 private:
  std::shared_ptr<PyObject> raised_;
};

// The same for an exception that is no error of meshcast: it is none here either.
class PythonFailure : public std::runtime_error {
 public:
  PythonFailure(const std::string& text, std::shared_ptr<PyObject> raised)
      : std::runtime_error(text), raised_(std::move(raised)) {}
  PyObject* raised() const { return raised_.get(); }

 private:
  std::shared_ptr<PyObject> raised_;
};

// Layouts, topologies and plans. Includes no torch header, so that it compiles in seconds.
void bind_plan(pybind11::module_& m);

// Private groups and the registered c10d backend.
void bind_runtime(pybind11::module_& m);

// The messages of ranks through the store, and the shared memory of a host.
void bind_conversation(pybind11::module_& m);

// Private groups and how their ranks meet.
void bind_groups(pybind11::module_& m);

// The calls of private groups, and the record of them.
void bind_calls(pybind11::module_& m);
void bind_record(pybind11::module_& m);

// Changes to the graph of autograd that torch's Python cannot make.
void bind_autograd(pybind11::module_& m);

// The data plane over UCX. Only builds with UCX's headers have it.
void bind_ucx(pybind11::module_& m);

// Functions by which tests arm fault points. Only builds with MESHCAST_FAULT_POINTS have it.
void bind_faults(pybind11::module_& m);

// The kernels, as the submodule `cuda` that only builds with CUDA have. Pointers and strides come as numbers,
// so that it includes no torch header.
void bind_cuda(pybind11::module_& m);

// Private groups on GPUs, over NCCL. Only builds with CUDA have them.
void bind_cuda_group(pybind11::module_& m);

}  // namespace meshcast
