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

// Calls of Python from threads of any kind. What it raises is thrown as what C++ knows, and keeps the object.
[[noreturn]] void throw_as_error(py::error_already_set& raised) {
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

py::object borrowed(const std::shared_ptr<PyObject>& object) {
  return py::reinterpret_borrow<py::object>(object.get());
}

py::object as_python(const std::shared_ptr<GroupCore>& core) {
  return py::cast(std::dynamic_pointer_cast<TensorGroup>(core));
}

// Locks of ours are never waited for with the lock of the interpreter: who has one may need that.
template <typename Call>
auto without_gil(const Call& call) {
  const py::gil_scoped_release no_gil;
  return call();
}

// As an instance of its class; None for none.
py::object as_exception(const std::exception_ptr& error) {
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

class PythonTransfer final : public Transfer {
 public:
  PythonTransfer(std::shared_ptr<Group> group, int32_t lane, bool is_shared, py::function compile)
      : Transfer(std::move(group), lane, is_shared), compile_(kept(std::move(compile))) {}

 private:
  CompiledPlans compile() override {
    return with_python([&] {
      const py::tuple made = borrowed(compile_)();
      CompiledPlans out;
      out.text = {made[0].cast<std::string>(), made[1].cast<std::string>()};
      out.forward = made[2].cast<std::shared_ptr<Plan>>();
      if (!made[3].is_none()) out.reverse = made[3].cast<std::shared_ptr<Plan>>();
      return out;
    });
  }

  const std::shared_ptr<PyObject> compile_;
};

// Keeps what the transfer needs to be compiled.
class KeptAgreement final : public Agreement {
 public:
  KeptAgreement(std::shared_ptr<Transfer> transfer, TimePoint deadline, std::shared_ptr<PyObject> keeps)
      : Agreement(std::move(transfer), deadline), keeps_(std::move(keeps)) {}

 private:
  const std::shared_ptr<PyObject> keeps_;
};

// A start with callbacks of Python.
class BoundStart : public Start {
 public:
  using Start::Start;

  // On the thread that settles it; at once where it is settled.
  void when_settled(py::function call) {
    auto keeps = kept(call);
    const bool later = without_gil([&] {
      const std::lock_guard lock(calls_mutex_);
      if (was_settled_) return false;
      calls_.push_back(std::move(keeps));
      return true;
    });
    if (!later) call();
  }
  virtual py::object work() const = 0;  // None before it was started
  int begun_again() const { return begun_again_; }

 protected:
  void began_again() override { ++begun_again_; }
  void settled() override {
    std::vector<std::shared_ptr<PyObject>> calls;
    {
      const std::lock_guard lock(calls_mutex_);
      was_settled_ = true;
      calls.swap(calls_);
    }
    if (calls.empty() || !Py_IsInitialized()) return;
    const py::gil_scoped_acquire gil;
    for (const auto& each : calls) {
      try {
        borrowed(each)();
      } catch (py::error_already_set& error) {
        error.discard_as_unraisable("what follows the start of a call");
      }
    }
  }

 private:
  std::atomic<int> begun_again_{0};
  std::mutex calls_mutex_;
  bool was_settled_ = false;
  std::vector<std::shared_ptr<PyObject>> calls_;
};

// Tensors on CPUs, which the group itself moves.
class HostStart final : public BoundStart {
 public:
  HostStart(std::shared_ptr<Transfer> transfer, std::shared_ptr<CallNumber> number, double timeout_seconds,
            bool reverse, std::string op, OptionalTensors source, OptionalTensors destination)
      : BoundStart(std::move(transfer), std::move(number), timeout_seconds, reverse, std::move(op)),
        source_(std::move(source)),
        destination_(std::move(destination)) {}

  py::object work() const override { return work_ ? py::cast(work_) : py::none(); }

 private:
  void start(const std::shared_ptr<GroupCore>& core, AgreedPlan& agreed, CallId call, bool reverse,
             double timeout_seconds) override {
    work_ = dynamic_cast<TensorGroup&>(*core).start_tensors(
        agreed, {call.ordinal, reverse, source_, destination_, timeout_seconds});
  }
  void wait_for_work() override { work_->wait(); }
  bool has_ended() override { return work_->isCompleted(); }
  bool has_succeeded() override { return work_->isSuccess(); }
  void release() override {
    source_.clear();
    destination_.clear();
  }

  OptionalTensors source_;
  OptionalTensors destination_;
  c10::intrusive_ptr<c10d::Work> work_;
};

// Tensors that something else brings to where they are moved, or moves.
class PythonStart final : public BoundStart {
 public:
  // ready(); connect(core, ordinal); begin(core, agreed, ordinal, reverse, timeout), which returns the work.
  PythonStart(std::shared_ptr<Transfer> transfer, std::shared_ptr<CallNumber> number, double timeout_seconds,
              bool reverse, std::string op, py::function ready, py::function connect, py::function begin)
      : BoundStart(std::move(transfer), std::move(number), timeout_seconds, reverse, std::move(op)),
        ready_(kept(std::move(ready))),
        connect_(kept(std::move(connect))),
        begin_(kept(std::move(begin))) {}

  py::object work() const override { return work_ ? borrowed(work_) : py::none(); }

 private:
  bool is_brought() override {
    try {
      return with_python([&] { return borrowed(ready_)().cast<bool>(); });
    } catch (const std::exception&) {
      return false;  // begin() finds out why
    }
  }
  void connect(const std::shared_ptr<GroupCore>& core, CallId call) override {
    with_python([&] { borrowed(connect_)(as_python(core), call.ordinal); });
  }
  void start(const std::shared_ptr<GroupCore>& core, AgreedPlan& agreed, CallId call, bool reverse,
             double timeout_seconds) override {
    work_ = with_python([&] {
      return kept(
          borrowed(begin_)(as_python(core), agreed.shared_from_this(), call.ordinal, reverse, timeout_seconds));
    });
  }
  void wait_for_work() override {
    with_python([&] { borrowed(work_).attr("wait")(); });
  }
  bool has_ended() override {
    return with_python([&] { return borrowed(work_).attr("is_completed")().cast<bool>(); });
  }
  bool has_succeeded() override {
    try {
      wait_for_work();  // does not block
      return true;
    } catch (const std::exception&) {
      return false;
    }
  }
  void release() override {
    ready_.reset();
    connect_.reset();
    begin_.reset();
  }

  std::shared_ptr<PyObject> ready_;
  std::shared_ptr<PyObject> connect_;
  std::shared_ptr<PyObject> begin_;
  std::shared_ptr<PyObject> work_;
};

void bind_starts(py::module_& m) {
  py::class_<CallNumber, std::shared_ptr<CallNumber>>(m, "CallNumber")
      .def(py::init([](int64_t ordinal, int64_t run, std::shared_ptr<AgreedPlan> agreed,
                       const std::shared_ptr<TensorGroup>& core) {
             return std::make_shared<CallNumber>(CallNumber{ordinal, run, std::move(agreed), core});
           }),
           py::arg("ordinal") = -1, py::arg("run") = -1, py::arg("agreed") = nullptr, py::arg("core") = nullptr)
      .def_readonly("ordinal", &CallNumber::ordinal)
      .def_readonly("run", &CallNumber::run)
      .def_readonly("agreed", &CallNumber::agreed)
      .def_property_readonly("core", [](const CallNumber& self) { return as_python(self.core.lock()); });

  py::class_<PythonTransfer, std::shared_ptr<PythonTransfer>>(m, "Transfer")
      .def(py::init([](std::shared_ptr<Group> group, int32_t lane, bool is_shared, py::function compile) {
             return owned(new PythonTransfer(std::move(group), lane, is_shared, std::move(compile)));
           }),
           py::arg("group"), py::arg("lane"), py::arg("is_shared"), py::arg("plans"))
      .def(
          "agree_ahead",
          [](const std::shared_ptr<PythonTransfer>& self, double timeout, py::object keep) {
            auto agreement = std::make_shared<KeptAgreement>(self, deadline_after(checked_timeout(timeout)),
                                                             kept(std::move(keep)));
            without_gil([&] {
              self->group->submit(agreement);
              agreement.reset();
            });
          },
          py::arg("timeout"), py::arg("keep"))
      .def(
          "close",
          [](PythonTransfer& self, const py::object& error) {
            self.close(std::make_exception_ptr(PythonError(error_from(error), kept(error))));
          },
          py::arg("error"))
      .def(
          "wait_until_tried",
          [](PythonTransfer& self, double seconds) {
            return wait_in_slices(deadline_after(seconds),
                                  [&](TimePoint slice) { return self.wait_until_tried(slice); });
          },
          py::arg("seconds"), NoGil())
      .def("failure", [](const PythonTransfer& self) {
        return as_exception(without_gil([&] {
          const auto closed = self.closed();
          return closed ? closed : self.failure();
        }));
      });

  py::class_<BoundStart, std::shared_ptr<BoundStart>>(m, "Start")
      .def("wait", &BoundStart::wait, NoGil())
      .def("is_completed", &BoundStart::is_completed, NoGil())
      .def("is_settled", &BoundStart::is_settled, NoGil())
      .def("make_final", &BoundStart::make_final, NoGil())
      .def("when_settled", &BoundStart::when_settled, py::arg("call"))
      .def(
          "submit",
          [](const std::shared_ptr<BoundStart>& self, const std::shared_ptr<Group>& group) {
            group->submit(self);
          },
          py::arg("group"), NoGil())
      .def(
          "retract",
          [](const std::shared_ptr<BoundStart>& self, const std::shared_ptr<Group>& group,
             const std::string& why) {
            return group->retract(self->call(), why, self->timeout_seconds(),
                                  [weak = std::weak_ptr<Start>(
                                       std::static_pointer_cast<Start>(self))]() -> std::optional<int64_t> {
                                    const auto start = weak.lock();
                                    return start ? start->life() : std::nullopt;
                                  });
          },
          py::arg("group"), py::arg("why"), NoGil())
      .def_property_readonly("ordinal", [](const BoundStart& self) { return self.ordinal; })
      .def_property_readonly("lane", [](const BoundStart& self) { return self.lane; })
      .def_property_readonly("run", [](const BoundStart& self) { return self.number().run; })
      .def_property_readonly("begun_again", &BoundStart::begun_again)
      .def_property_readonly("work", &BoundStart::work)
      .def_property_readonly("error", [](const BoundStart& self) {
        return as_exception(without_gil([&] { return self.error(); }));
      });

  py::class_<HostStart, BoundStart, std::shared_ptr<HostStart>>(m, "HostStart")
      .def(py::init([](const std::shared_ptr<PythonTransfer>& transfer, std::shared_ptr<CallNumber> number,
                       double timeout, bool reverse, std::string op, OptionalTensors source,
                       OptionalTensors destination) {
             return owned(new HostStart(transfer, std::move(number), checked_timeout(timeout), reverse,
                                        std::move(op), std::move(source), std::move(destination)));
           }),
           py::arg("transfer"), py::arg("number"), py::arg("timeout"), py::arg("reverse"), py::arg("op"),
           py::arg("src"), py::arg("dst"));

  py::class_<PythonStart, BoundStart, std::shared_ptr<PythonStart>>(m, "PythonStart")
      .def(py::init([](const std::shared_ptr<PythonTransfer>& transfer, std::shared_ptr<CallNumber> number,
                       double timeout, bool reverse, std::string op, py::function ready, py::function connect,
                       py::function begin) {
             return owned(new PythonStart(transfer, std::move(number), checked_timeout(timeout), reverse,
                                          std::move(op), std::move(ready), std::move(connect),
                                          std::move(begin)));
           }),
           py::arg("transfer"), py::arg("number"), py::arg("timeout"), py::arg("reverse"), py::arg("op"),
           py::arg("ready"), py::arg("connect"), py::arg("begin"));
}

}  // namespace

void bind_groups(py::module_& m) {
  py::class_<KnownOffers, std::shared_ptr<KnownOffers>>(m, "KnownOffers")
      .def(py::init<>())
      .def("add", &KnownOffers::add, py::arg("offers"), NoGil());
  py::class_<Refusal, std::shared_ptr<Refusal>>(m, "Refusal").def("wait", &Refusal::wait, NoGil());
  m.attr("CHANGED") = kChanged;
  m.def("stats", &stats_of, py::arg("work"));
  m.def("traffic", &traffic_of, py::arg("work"));

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
      .def("has_news", &Group::has_news)
      .def("take_news",
           [](Group& self) -> py::object {
             const auto news = without_gil([&] { return self.take_news(); });
             return news ? instance_of(*news) : py::none();
           })
      .def("cause", &Group::cause, NoGil())
      .def("posted_cause", &Group::posted_cause, NoGil())
      .def("abort", &Group::abort, py::arg("reason"), NoGil())
      .def(
          "close", [](Group& self, double limit) { self.close(time_point(limit)); }, py::arg("limit"), NoGil());
  bind_starts(m);
}

}  // namespace meshcast
