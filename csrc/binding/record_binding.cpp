#include <atomic>
#include <unordered_map>

#include "binding/call.h"
#include "common/signals.h"

namespace meshcast {
namespace {

// The Python side of the record: knows which frames are its own, logs, writes the record to a file. Guarded by
// the GIL. Two of its methods are kept: each call asks one, and new code the other.
PyObject* observer = nullptr;
PyObject* observer_is_ours = nullptr;
PyObject* observer_is_verbose = nullptr;
std::atomic<bool> is_verbose{false};

py::object called(PyObject* method) {
  PyObject* const result = PyObject_CallNoArgs(method);
  if (!result) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(result);
}

// Code that calls have passed, by address: of a program, with what a flight keeps of it, or ours, without.
// Guarded by the GIL. Entries are kept alive, so no address is used again meanwhile.
struct Passed {
  py::object code;
  std::shared_ptr<void> of_program;
};
using AllPassed = std::unordered_map<PyCodeObject*, Passed>;
constexpr size_t kMostPassed = 4096;  // programs that make code as they run have no end of it

const Passed& passed(AllPassed& all, PyCodeObject* code, PyFrameObject* frame) {
  if (const auto found = all.find(code); found != all.end()) return found->second;
  const py::object is_ours = py::reinterpret_borrow<py::object>(observer_is_ours)(
      py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(frame)));
  const py::object kept_code = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(code));
  if (all.size() >= kMostPassed) all.clear();
  Passed made{kept_code, is_ours.is(py::bool_(true)) ? nullptr : kept(kept_code)};
  return all[code] = std::move(made);
}

int offset_in(PyFrameObject* frame) {
#if PY_VERSION_HEX >= 0x030b0000
  return PyFrame_GetLasti(frame);
#else
  return frame->f_lasti * 2;
#endif
}

// The innermost line outside of meshcast and torch in this thread; empty in a thread without one. A line costs
// more the further down it is in its function, so it is looked up when it is shown.
Flight::Site site_of_program() {
  static auto& all = *new AllPassed;  // for as long as the process runs
  py::object frame = py::reinterpret_borrow<py::object>(reinterpret_cast<PyObject*>(PyEval_GetFrame()));
  while (frame) {
    auto* const at = reinterpret_cast<PyFrameObject*>(frame.ptr());
    PyCodeObject* const code = PyFrame_GetCode(at);
    const py::object held = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(code));
    if (const auto& program = passed(all, code, at).of_program) return {program, -1, offset_in(at)};
    frame = py::reinterpret_steal<py::object>(reinterpret_cast<PyObject*>(PyFrame_GetBack(at)));
  }
  return {};
}

py::object shown(const Flight::Site& site) {
  if (!site.code) return py::none();
  auto* const code = static_cast<PyObject*>(site.code.get());
  const int line =
      site.offset < 0 ? site.line : PyCode_Addr2Line(reinterpret_cast<PyCodeObject*>(code), site.offset);
  return py::make_tuple(py::reinterpret_borrow<py::object>(code), line);
}

py::object shown(const std::shared_ptr<void>& object) {
  return object ? py::reinterpret_borrow<py::object>(static_cast<PyObject*>(object.get())) : py::none();
}

template <typename Value>
py::object or_none(const std::optional<Value>& value) {
  return value ? py::cast(*value) : py::none();
}

py::dict sums_of(const CallSums& sums, bool is_pair) {
  py::dict out;
  out["calls"] = sums.calls;
  out["failed"] = sums.failed;
  out["retries"] = sums.retries;
  out["seconds"] = sums.seconds;
  out["waited"] = sums.waited;
  out["bound"] = sums.bound;
  out["moving_seconds"] = sums.moving_seconds;
  out["messages"] = sums.messages;
  if (is_pair) {
    out["bytes"] = sums.bytes_sent;
  } else {
    out["bytes_sent"] = sums.bytes_sent;
    out["bytes_received"] = sums.bytes_received;
  }
  return out;
}

void fail(Flight& flight, const py::object& error) {
  Flight::Failure failure;
  failure.text =
      py::type::of(error).attr("__name__").cast<std::string>() + ": " + py::str(error).cast<std::string>();
  const py::object peer = py::getattr(error, "peer", py::none());
  const py::object phase = py::getattr(error, "phase", py::none());
  if (!peer.is_none()) failure.peer = peer.cast<int32_t>();
  if (!phase.is_none()) failure.phase = phase.cast<std::string>();
  const std::string text = failure.text;
  if (!without_gil([&] { return flight.failed(std::move(failure)); })) return;
  observe([&](const py::object& told) { told.attr("failed")(flight.rank, flight.op, text); });
}

}  // namespace

void observe(const std::function<void(const py::object&)>& tell) {
  if (!Py_IsInitialized()) return;
  const py::gil_scoped_acquire gil;
  if (!observer) return;
  try {
    tell(py::reinterpret_borrow<py::object>(observer));
  } catch (py::error_already_set& error) {
    error.discard_as_unraisable("the record of calls");
  }
}

std::shared_ptr<Flight> new_flight(const std::string& op, const std::shared_ptr<const Members>& group,
                                   int32_t rank, const std::shared_ptr<const std::string>& what,
                                   const py::object& given) {
  Flight::Site site;
  observe([&](const py::object& told) {
    if (given.is_none()) {
      site = site_of_program();
    } else {
      const py::tuple pair = given;
      site = {kept(pair[0]), pair[1].cast<int>()};
    }
    is_verbose = called(observer_is_verbose).is(py::bool_(true));
    if (is_verbose) told.attr("called")(rank, op, group->name);
  });
  return Flight::add(op, group, rank, what, std::move(site));
}

void note_failure(Flight& flight, const std::exception_ptr& error) {
  if (!Py_IsInitialized()) return;
  const py::gil_scoped_acquire gil;
  try {
    fail(flight, as_exception(error));
  } catch (py::error_already_set& raised) {
    raised.discard_as_unraisable("the record of calls");
  }
}

void note_end(const Flight& flight) {
  if (!is_verbose) return;
  observe([&](const py::object& told) {
    told.attr("ended")(flight.rank, flight.op, flight.group->name, flight.progress().seconds.value_or(0));
  });
}

void bind_record(py::module_& m) {
  py::class_<Members, std::shared_ptr<Members>>(m, "Members")
      .def(py::init([](std::string name, std::vector<int32_t> ranks, std::string within) {
             return std::make_shared<Members>(Members{std::move(name), std::move(ranks), std::move(within)});
           }),
           py::arg("name"), py::arg("ranks") = std::vector<int32_t>(), py::arg("within") = "")
      .def_readonly("name", &Members::name)
      .def_readonly("within", &Members::within)
      .def_property_readonly("ranks", [](const Members& self) { return py::tuple(py::cast(self.ranks)); });

  py::class_<Traffic, std::shared_ptr<Traffic>>(m, "Traffic")
      .def(py::init([](std::string op, double bound, int32_t rank,
                       const std::vector<std::tuple<int32_t, int32_t, int64_t, int64_t>>& moved) {
             std::vector<Moved> messages;
             for (const auto& [sender, receiver, count, nbytes] : moved)
               messages.push_back({sender, receiver, count, nbytes});
             return std::make_shared<Traffic>(std::move(op), bound, rank, std::move(messages));
           }),
           py::arg("op"), py::arg("bound") = 0.0, py::arg("rank") = -1,
           py::arg("moved") = std::vector<std::tuple<int32_t, int32_t, int64_t, int64_t>>())
      .def("ended", &Traffic::ended, py::arg("seconds"), py::arg("waited"), NoGil())
      .def("failed", &Traffic::failed, NoGil())
      .def("again", &Traffic::again, NoGil())
      .def("text", &Traffic::text);

  py::class_<Flight, std::shared_ptr<Flight>>(m, "Flight")
      .def(
          py::init([](const std::string& op, const std::shared_ptr<Members>& group, int32_t rank,
                      std::string what, std::optional<int32_t> lane, int64_t position, const py::object& site) {
            auto made = new_flight(op, group, rank, std::make_shared<const std::string>(std::move(what)), site);
            if (lane) made->counted_as(*lane, position, {});
            return made;
          }),
          py::arg("op"), py::arg("group"), py::arg("rank"), py::arg("what") = "", py::arg("lane") = py::none(),
          py::arg("position") = 0, py::arg("site") = py::none())
      .def("ended",
           [](Flight& self) {
             if (without_gil([&] { return self.ended(std::nullopt, std::nullopt); })) note_end(self);
           })
      .def("failed", &fail, py::arg("error"))
      .def("again", &Flight::again, NoGil())
      .def_readonly("op", &Flight::op)
      .def_readonly("group", &Flight::group)
      .def_readonly("rank", &Flight::rank)
      .def_readonly("begun", &Flight::begun)
      .def_property_readonly("what", [](const Flight& self) { return *self.what; })
      .def_property_readonly("site", [](const Flight& self) { return shown(self.site); })
      .def("progress", [](const Flight& self) {
        const auto [found, completed] = without_gil([&] {
          auto progress = self.progress();
          const auto call = progress.call.lock();
          return std::pair(std::move(progress), call && call->is_completed());
        });
        py::dict out;
        const char* const unfinished = completed ? "not waited for" : "unfinished";
        out["state"] = found.failure ? "failed" : found.seconds ? "ended" : unfinished;
        out["lane"] = or_none(found.lane);
        out["position"] = or_none(found.position);
        out["run"] = or_none(found.run);
        out["seconds"] = or_none(found.seconds);
        out["plan"] = shown(found.facts);
        out["error"] = found.failure ? py::cast(found.failure->text) : py::none();
        out["peer"] = found.failure ? or_none(found.failure->peer) : py::none();
        out["phase"] = found.failure ? or_none(found.failure->phase) : py::none();
        return out;
      });

  m.def("also_catch", &also_catch, py::arg("signal"));
  m.def("count_signals_by", &count_signals_by, py::arg("eventfd"));
  m.def(
      "notify_of_long_waits",
      [](double seconds) {
        notify_of_long_waits(
            [](const LongWait& wait) {
              observe([&](const py::object& told) {
                told.attr("waits")(wait.rank, wait.call, wait.state, wait.ranks, wait.seconds);
              });
            },
            seconds);
      },
      py::arg("seconds"));
  m.def("observe_by", [](py::object told) {
    observer_is_ours =
        told.attr("is_ours").cast<py::object>().release().ptr();  // for as long as the process runs
    observer_is_verbose = told.attr("is_verbose").cast<py::object>().release().ptr();
    observer = told.release().ptr();
  });
  m.def("flights", [] {
    const auto found = without_gil([] { return Record::of_process().flights(); });
    py::list out;
    for (const auto& each : found) out.append(std::const_pointer_cast<Flight>(each));
    return out;
  });
  m.def(
      "calls_begun", [] { return Record::of_process().begun(); }, NoGil());
  m.def("counted", [] {
    const auto found = without_gil([] {
      look_at_flying();
      return Record::of_process().counted();
    });
    py::dict calls;
    py::dict pairs;
    for (const auto& [op, sums] : found.calls) calls[py::str(op)] = sums_of(sums, false);
    for (const auto& [pair, sums] : found.pairs) pairs[py::cast(pair)] = sums_of(sums, true);
    return py::make_tuple(std::move(calls), std::move(pairs));
  });
}

}  // namespace meshcast
