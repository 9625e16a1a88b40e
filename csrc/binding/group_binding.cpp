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
  void meets(bool prepares) override {
    with_python([&] { borrowed(connector_).attr("meets")(prepares); });
  }
  void has_met() override {
    with_python([&] { borrowed(connector_).attr("has_met")(); });
  }

 private:
  const std::shared_ptr<PyObject> connector_;
  std::mutex mutex_;
  std::shared_ptr<Store> store_;
};

// What abort() and close() of a Python object raise is printed.
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
  m.attr("CHANGED") = kChanged;
  m.def("stats", &stats_of, py::arg("work"));
  m.def("traffic", &traffic_tuples, py::arg("work"));

  py::class_<Group, std::shared_ptr<Group>>(m, "Group")
      .def(py::init([](std::vector<int32_t> ranks, int32_t rank, std::string name, py::object connector,
                       std::shared_ptr<KnownOffers> known, size_t kept) {
             return owned(new Group({std::move(ranks), rank, std::move(name)},
                                    std::make_shared<PythonConnector>(std::move(connector)), std::move(known),
                                    kept));
           }),
           py::arg("ranks"), py::arg("rank"), py::arg("name"), py::arg("connector"), py::arg("known"),
           py::arg("kept"))
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
      .def("is_awaited", &Group::is_awaited, NoGil())
      .def("is_up", &Group::is_up, NoGil())
      .def("was_used", &Group::was_used, NoGil())
      .def("is_untouched", &Group::is_untouched, NoGil())
      .def_property_readonly("life", &Group::life)
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
