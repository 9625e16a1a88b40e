#pragma once

#include <algorithm>
#include <cmath>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "binding/bind.h"
#include "c10d/tensor_group.h"
#include "common/forks.h"
#include "group/meeting.h"

// The common part of the bindings of a private group's two cores. Every method that may block or free tensors
// runs without the GIL; their threads take it only in a future's callback that is Python's.
namespace meshcast {

using NoGil = py::call_guard<py::gil_scoped_release>;
using OptionalTensors = std::vector<std::optional<at::Tensor>>;

// A Python object that a thread of ours may keep and release, also while the interpreter ends.
inline std::shared_ptr<PyObject> kept(py::object object) {
  return {object.release().ptr(), [](PyObject* kept_object) {
            if (!Py_IsInitialized()) return;
            const py::gil_scoped_acquire gil;
            Py_DECREF(kept_object);
          }};
}

// For calls of Python from any thread. Its exception is thrown as one that C++ knows, and keeps the object.
[[noreturn]] inline void throw_as_error(py::error_already_set& raised) {
  const py::object value = raised.value();
  const auto name = py::type::of(value).attr("__name__").cast<std::string>();
  if (name == "Shortage") throw MeetAgainError(error_from(value.attr("error")));
  if (py::isinstance(value, py::module_::import("meshcast.errors").attr("MeshcastError")))
    throw PythonError(error_from(value), kept(value));
  throw PythonFailure(py::str(value).cast<std::string>(), kept(value));
}

template <typename Call>
auto with_python(const Call& call) {
  const py::gil_scoped_acquire gil;
  try {
    return call();
  } catch (py::error_already_set& raised) {
    throw_as_error(raised);
  }
}

inline py::object borrowed(const std::shared_ptr<PyObject>& object) {
  return py::reinterpret_borrow<py::object>(object.get());
}

inline py::object as_python(const std::shared_ptr<GroupCore>& core) {
  return py::cast(std::dynamic_pointer_cast<TensorGroup>(core));
}

// Locks of ours are never waited for with the GIL held: their holder may need it.
template <typename Call>
auto without_gil(const Call& call) {
  const py::gil_scoped_release no_gil;
  return call();
}

// As an instance of its Python class; None for none.
inline py::object as_exception(const std::exception_ptr& error) {
  if (!error) return py::none();
  try {
    std::rethrow_exception(error);
  } catch (const PythonError& raised) {
    return py::reinterpret_borrow<py::object>(raised.raised());
  } catch (const PythonFailure& raised) {
    return py::reinterpret_borrow<py::object>(raised.raised());
  } catch (const Error& raised) {
    return instance_of(raised);
  } catch (const std::exception& raised) {
    return instance_of(Error(ErrorKind::Generic, raised.what()));
  }
}

// Limits come from Python as seconds. Zero and negative ones have expired already; NaN is a mistake.
inline double checked_timeout(double seconds) {
  if (std::isnan(seconds)) throw LayoutError("timeout must be a number of seconds, found NaN");
  return std::max(seconds, 0.0);
}

// Without the lock of the interpreter, whether this thread holds that or not.
inline void unlocked(const std::function<void()>& call) {
  if (!Py_IsInitialized() || PyGILState_Check() == 0) return call();
  const py::gil_scoped_release no_gil;
  call();
}

// An object that has threads, or uses them: its destructor may join or wait for them, while Python may hold the
// GIL when it drops the object. A forked child has none of these threads, and keeps objects that it cannot end.
template <typename T>
std::shared_ptr<T> owned(std::shared_ptr<T> thing) {
  T* const raw = thing.get();
  return {raw, [thing = std::move(thing), origin = Origin()](T*) mutable {
            if (origin.foreign()) {
              new std::shared_ptr<T>(std::move(thing));
              return;
            }
            unlocked([&] { thing.reset(); });
          }};
}

template <typename T>
std::shared_ptr<T> owned(T* thing) {
  return owned(std::shared_ptr<T>(thing));
}

inline const RunState& run_of(const c10::intrusive_ptr<c10d::Work>& work) {
  const auto* reshard = dynamic_cast<const ReshardWork*>(work.get());
  if (!reshard) throw LayoutError("stats are kept for works that a core's start() returned");
  return reshard->run();
}

// The traffic of one run of a work's program. peer: in the group.
struct PeerTraffic {
  int32_t peer = 0;
  bool is_sent = false;  // to the peer
  int64_t messages = 0;
  int64_t nbytes = 0;
};

inline std::vector<PeerTraffic> traffic_of(const c10::intrusive_ptr<c10d::Work>& work) {
  std::map<std::pair<int32_t, bool>, std::pair<int64_t, int64_t>> found;
  const auto add = [&found](int32_t peer, bool sent, int64_t nbytes) {
    auto& [messages, bytes] = found[{peer, sent}];
    ++messages;
    bytes += nbytes;
  };
  const Program& program = run_of(work).program();
  for (const SendOp& send : program.sends)
    for (const Target& target : send.targets) add(target.peer, true, send.nbytes);
  for (const RecvOp& recv : program.recvs) add(recv.peer, false, recv.nbytes);
  std::vector<PeerTraffic> out;
  for (const auto& [key, value] : found) out.push_back({key.first, key.second, value.first, value.second});
  return out;
}

inline std::vector<std::tuple<int32_t, bool, int64_t, int64_t>> traffic_tuples(
    const c10::intrusive_ptr<c10d::Work>& work) {
  std::vector<std::tuple<int32_t, bool, int64_t, int64_t>> out;
  for (const auto& [peer, is_sent, messages, nbytes] : traffic_of(work))
    out.emplace_back(peer, is_sent, messages, nbytes);
  return out;
}

inline py::dict stats_of(const c10::intrusive_ptr<c10d::Work>& work) {
  const RunState& run = run_of(work);
  py::dict out;
  out["bytes_sent"] = run.program().bytes_sent;
  out["bytes_received"] = run.program().bytes_received;
  out["bytes_done"] = run.sent_bytes() + run.received_bytes();  // a GPU reports nothing before it has finished
  out["seconds"] = run.seconds();
  return out;
}

// By time.monotonic(), which is the same clock.
inline TimePoint time_point(double seconds) {
  return TimePoint(std::chrono::duration_cast<Clock::duration>(std::chrono::duration<double>(seconds)));
}
inline double seconds_of(TimePoint time) {
  return std::chrono::duration<double>(time.time_since_epoch()).count();
}

// A class with what both have.
template <typename Core>
py::class_<Core, std::shared_ptr<Core>> bind_core(py::module_& m, const char* name) {
  py::class_<Core, std::shared_ptr<Core>> core(m, name);
  core.def("stats", [](Core&, const c10::intrusive_ptr<c10d::Work>& work) { return stats_of(work); })
      .def("traffic", [](Core&, const c10::intrusive_ptr<c10d::Work>& work) { return traffic_tuples(work); })
      .def("abort", &Core::abort, py::arg("reason"), NoGil())
      .def("error", &Core::error, NoGil())
      .def("shutdown", &Core::shutdown, NoGil());
  return core;
}

}  // namespace meshcast
