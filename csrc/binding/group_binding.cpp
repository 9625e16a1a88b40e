#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/functional.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "binding/bind.h"
#include "binding/call.h"
#include "binding/core_binding.h"
#include "c10d/c10d_store.h"
#include "c10d/tensor_group.h"
#include "common/signals.h"
#include "group/group.h"
#include "group/meeting.h"
#include "group/open_refusals.h"
#include "group/transfer.h"
#include "plan/plan.h"

namespace meshcast {
namespace {

class PythonJoining final : public Joining {
 public:
  explicit PythonJoining(py::object joining) : joining_(kept(std::move(joining))) {}

  std::string offer() override {
    return with_python([&] { return borrowed(joining_).attr("offer")().cast<std::string>(); });
  }
  Watch watch(const std::string& offer) override {
    return with_python([&]() -> Watch {
      const py::object watch = borrowed(joining_).attr("watch")(offer);
      if (watch.is_none()) return {};
      return
          [watch = kept(watch)] { return with_python([&] { return borrowed(watch)().cast<std::string>(); }); };
    });
  }
  std::shared_ptr<GroupCore> connect(const std::map<int32_t, std::string>& offers, TimePoint deadline,
                                     const std::function<std::optional<LostRank>()>& lost) override {
    const auto asked = [&lost]() -> std::optional<std::pair<int32_t, std::string>> {
      const py::gil_scoped_release no_gil;
      const auto found = lost();
      return found ? std::optional(std::pair(found->rank, found->why)) : std::nullopt;
    };
    return with_python([&]() -> std::shared_ptr<GroupCore> {
      return borrowed(joining_)
          .attr("connect")(offers, seconds_of(deadline), py::cpp_function(asked))
          .cast<std::shared_ptr<TensorGroup>>();
    });
  }

 private:
  const std::shared_ptr<PyObject> joining_;
};

class PythonConnector final : public Connector {
 public:
  explicit PythonConnector(py::object connector) : connector_(kept(std::move(connector))) {}

  std::shared_ptr<Store> store() override {
    {
      const std::lock_guard lock(mutex_);
      if (store_) return store_;
    }
    auto made = with_python(
        [&] { return store_of(borrowed(connector_).attr("store")().cast<c10::intrusive_ptr<c10d::Store>>()); });
    const std::lock_guard lock(mutex_);
    if (!store_) store_ = std::move(made);
    return store_;
  }
  std::unique_ptr<Joining> join(const std::string& prefix) override {
    return with_python(
        [&] { return std::make_unique<PythonJoining>(borrowed(connector_).attr("join")(prefix)); });
  }
  std::optional<Error> shortage(const std::exception& failure) override {
    return with_python([&]() -> std::optional<Error> {
      const py::object found = borrowed(connector_).attr("shortage")(std::string(failure.what()));
      if (found.is_none()) return std::nullopt;
      return error_from(found);
    });
  }

 private:
  const std::shared_ptr<PyObject> connector_;
  std::mutex mutex_;
  std::shared_ptr<Store> store_;
};

// store, group_of: callables of Python.
class PythonSite final : public OpenRefusals::Site {
 public:
  PythonSite(py::object store, py::object group_of)
      : open_store_(kept(std::move(store))), group_of_(kept(std::move(group_of))) {}

  std::shared_ptr<Store> store() override {
    return with_python(
        [&] { return store_of(borrowed(open_store_)().cast<c10::intrusive_ptr<c10d::Store>>()); });
  }
  std::shared_ptr<Group> group_of(const std::vector<int32_t>& ranks) override {
    return with_python([&] { return borrowed(group_of_)(ranks).cast<std::shared_ptr<Group>>(); });
  }

 private:
  const std::shared_ptr<PyObject> open_store_;
  const std::shared_ptr<PyObject> group_of_;
};

// Exceptions from abort() and close() of a Python object are printed.
class PythonAttachment final : public Attachment {
 public:
  explicit PythonAttachment(py::object thing) : thing_(kept(std::move(thing))) {}

  py::object thing() const { return borrowed(thing_); }
  void abort(const std::string& reason) override {
    call([&] { borrowed(thing_).attr("abort")(reason); });
  }
  void close() override {
    call([&] { borrowed(thing_).attr("close")(); });
  }

 private:
  template <typename Call>
  static void call(const Call& body) {
    if (!Py_IsInitialized()) return;
    const py::gil_scoped_acquire gil;
    try {
      body();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("what is attached to a group");
    }
  }

  const std::shared_ptr<PyObject> thing_;
};

}  // namespace

void bind_groups(py::module_& m) {
  py::class_<KnownOffers, std::shared_ptr<KnownOffers>>(m, "KnownOffers")
      .def(py::init<>())
      .def("add", &KnownOffers::add, py::arg("offers"), NoGil());
  py::class_<Refusal, std::shared_ptr<Refusal>>(m, "Refusal").def("wait", &Refusal::wait, NoGil());
  py::class_<OpenRefusals, std::shared_ptr<OpenRefusals>>(m, "OpenRefusals")
      .def(py::init([](std::vector<int32_t> ranks, int32_t rank, py::object store, py::object group_of) {
             return owned(new OpenRefusals(
                 std::move(ranks), rank, std::make_shared<PythonSite>(std::move(store), std::move(group_of))));
           }),
           py::arg("ranks"), py::arg("rank"), py::arg("store"), py::arg("group_of"))
      .def_static(
          "refuse",
          [](const std::string& why, std::vector<int32_t> known, bool prepares, double timeout,
             const std::vector<std::shared_ptr<OpenRefusals>>& where) {
            OpenRefusals::refuse(
                std::make_shared<OpenRefusal>(why, std::move(known), prepares, checked_timeout(timeout)),
                where);
          },
          py::arg("why"), py::arg("known"), py::arg("prepares"), py::arg("timeout"), py::arg("where"), NoGil())
      .def("close", &OpenRefusals::close, NoGil());
  m.attr("CHANGED") = kChanged;
  m.def("stats", &stats_of, py::arg("work"));
  m.def("traffic", &traffic_tuples, py::arg("work"));

  py::class_<Group, std::shared_ptr<Group>>(m, "Group")
      .def(py::init([](std::vector<int32_t> ranks, int32_t rank, std::string name, py::object connector,
                       std::shared_ptr<KnownOffers> known, size_t kept, std::shared_ptr<OpenRefusals> open) {
             const auto group = std::make_shared<Group>(GroupIdentity{std::move(ranks), rank, std::move(name)},
                                                        std::make_shared<PythonConnector>(std::move(connector)),
                                                        std::move(known), kept, open);
             open->know(group);
             return owned(group);
           }),
           py::arg("ranks"), py::arg("rank"), py::arg("name"), py::arg("connector"), py::arg("known"),
           py::arg("kept"), py::arg("refusals"))
      .def(
          "connect", [](Group& self, double timeout) { self.connect(checked_timeout(timeout)); },
          py::arg("timeout"), NoGil())
      .def("give_up_if_stuck", &Group::give_up_if_stuck, NoGil())
      .def(
          "refuse",
          [](Group& self, int32_t lane, std::optional<int64_t> ordinal, const std::string& why,
             double timeout) { return self.refuse(lane, ordinal, why, checked_timeout(timeout)); },
          py::arg("lane"), py::arg("ordinal"), py::arg("why"), py::arg("timeout"), NoGil())
      .def("next_ordinal", &Group::next_ordinal, py::arg("lane"), NoGil())
      .def_property_readonly("generation", &Group::generation)
      .def_property_readonly(
          "core", [](const Group& self) { return as_python(without_gil([&] { return self.core(); })); })
      .def(
          "attached",
          [](const Group& self, const std::string& key) -> py::object {
            const auto found =
                std::dynamic_pointer_cast<PythonAttachment>(without_gil([&] { return self.attached(key); }));
            return found ? found->thing() : py::none();
          },
          py::arg("key"))
      .def(
          "attach",
          [](Group& self, const std::string& key, py::object thing) {
            auto made = std::make_shared<PythonAttachment>(std::move(thing));
            without_gil([&] { self.attach(key, std::move(made)); });
          },
          py::arg("key"), py::arg("thing"))
      .def("cause", &Group::cause, NoGil())
      .def("posted_cause", &Group::posted_cause, NoGil())
      .def("abort", &Group::abort, py::arg("reason"), NoGil())
      .def(
          "close",
          [](Group& self, double limit) {
            drain(self, time_point(limit));
            self.close(time_point(limit));
          },
          py::arg("limit"), NoGil());
}

}  // namespace meshcast
