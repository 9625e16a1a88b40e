#include <exception>

#include <unistd.h>

#include "binding/bind.h"
#include "common/error.h"
#include "common/signals.h"

namespace meshcast {
namespace {

const char* class_name(ErrorKind kind) {
  switch (kind) {
    case ErrorKind::Layout: return "LayoutError";
    case ErrorKind::PlanMismatch: return "PlanMismatchError";
    case ErrorKind::DeadlineExceeded: return "DeadlineExceededError";
    case ErrorKind::PeerLost: return "PeerLostError";
    case ErrorKind::Aborted: return "AbortedError";
    case ErrorKind::Generic: break;
  }
  return "MeshcastError";
}

// Fields that do not apply are left out, so that Python sees its default, None.
py::dict fields_of(const Error& error) {
  const ErrorContext& context = error.context();
  py::dict fields;
  if (context.rank >= 0) fields["rank"] = context.rank;
  if (context.peer >= 0) fields["peer"] = context.peer;
  if (!context.op.empty()) fields["op"] = context.op;
  if (context.sequence >= 0) fields["sequence"] = context.sequence;
  if (!context.phase.empty()) fields["phase"] = context.phase;
  if (context.elapsed >= 0) fields["elapsed"] = context.elapsed;
  if (context.limit >= 0) fields["limit"] = context.limit;
  if (error.kind() == ErrorKind::PeerLost) {
    if (context.bytes_done >= 0) fields["bytes_done"] = context.bytes_done;
    if (context.bytes_expected >= 0) fields["bytes_expected"] = context.bytes_expected;
    if (!context.address.empty()) fields["address"] = context.address;
  }
  return fields;
}

// An exception from the handler of a signal that came in the meantime takes precedence over the error.
void raise(const Error& error) {
  try {
    const py::object instance = instance_of(error);
    PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(instance.ptr())), instance.ptr());
  } catch (py::error_already_set& raised) {
    if (raised.matches(PyExc_ImportError) || raised.matches(PyExc_AttributeError)) {
      // At interpreter exit modules can no longer be imported: the text still gets through.
      PyErr_SetString(PyExc_RuntimeError, error.what());
    } else {
      raised.restore();
    }
  }
}

// Handlers run in the main thread alone, which is the process's own.
void look_for_handlers() {
  if (gettid() != getpid() || !Py_IsInitialized()) return;
  const py::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() != 0) throw py::error_already_set();
}

}  // namespace

py::object instance_of(const Error& error) {
  const py::object type = py::module_::import("meshcast.errors").attr(class_name(error.kind()));
  // A peer's message may carry bytes that are not UTF-8; losing the error for that would be worse.
  const auto message = py::reinterpret_steal<py::str>(PyUnicode_DecodeUTF8(
      error.what(), static_cast<py::ssize_t>(std::char_traits<char>::length(error.what())), "replace"));
  return type(message, **fields_of(error));
}

Error error_from(const py::object& raised) {
  const auto name = py::type::of(raised).attr("__name__").cast<std::string>();
  ErrorKind kind = ErrorKind::Generic;
  for (const ErrorKind each : {ErrorKind::Layout, ErrorKind::PlanMismatch, ErrorKind::DeadlineExceeded,
                               ErrorKind::PeerLost, ErrorKind::Aborted}) {
    if (name == class_name(each)) kind = each;
  }
  const auto field = [&](const char* key, auto none) {
    const py::object value = py::getattr(raised, key, py::none());
    return value.is_none() ? none : value.cast<decltype(none)>();
  };
  ErrorContext context;
  context.rank = field("rank", context.rank);
  context.peer = field("peer", context.peer);
  context.op = field("op", context.op);
  context.sequence = field("sequence", context.sequence);
  context.phase = field("phase", context.phase);
  context.elapsed = field("elapsed", context.elapsed);
  context.limit = field("limit", context.limit);
  return {kind, py::str(raised).cast<std::string>(), context};
}

void bind_errors(py::module_&) {
  look_for_signals_by(look_for_handlers);
  // Registered with the pybind11 internals that torch shares, hence also asked when the error leaves
  // Work.wait().
  py::register_exception_translator([](std::exception_ptr pointer) {
    try {
      if (pointer) std::rethrow_exception(pointer);
    } catch (const PythonError& error) {
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.raised())), error.raised());
    } catch (const PythonFailure& error) {
      PyErr_SetObject(reinterpret_cast<PyObject*>(Py_TYPE(error.raised())), error.raised());
    } catch (const Error& error) {
      raise(error);
    }
  });
}

}  // namespace meshcast
