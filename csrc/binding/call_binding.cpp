#include <array>

#include <pybind11/functional.h>

#include "binding/call.h"
#include "common/signals.h"

namespace meshcast {
namespace {

// Keeps what the transfer needs to be compiled.
class KeptAgreement final : public Agreement {
 public:
  KeptAgreement(std::shared_ptr<Transfer> transfer, TimePoint deadline, std::shared_ptr<PyObject> keeps)
      : Agreement(std::move(transfer), deadline), keeps_(std::move(keeps)) {}

 private:
  const std::shared_ptr<PyObject> keeps_;
};

// Tensors on CPUs, which the group itself moves.
class HostCall final : public Call {
 public:
  using Call::Call;

  py::object work() const override { return work_ ? py::cast(work_) : py::none(); }
  py::object figures() const override { return work_ ? py::object(stats_of(work_)) : py::none(); }
  std::shared_ptr<Refusal> retract(const std::string& why) override {
    return group_->retract(call(), why, timeout_seconds(),
                           [weak = weak_from_this()]() -> std::optional<int64_t> {
                             const auto self = std::static_pointer_cast<Start>(weak.lock());
                             return self ? self->life() : std::nullopt;
                           });
  }

 private:
  void start(const std::shared_ptr<GroupCore>& core, AgreedPlan& agreed, CallId call, bool reverse,
             double timeout_seconds) override {
    work_ = dynamic_cast<TensorGroup&>(*core).start_tensors(
        agreed, {call.ordinal, reverse, source_, destination_, timeout_seconds});
  }
  void wait_for_work() override { work_->wait(); }
  bool has_ended() override { return work_->isCompleted(); }
  bool has_succeeded() override { return work_->isSuccess(); }
  std::vector<PeerTraffic> moved() const override { return traffic_of(work_); }
  Sums sums() const override {
    const RunState& run = run_of(work_);
    const Program& program = run.program();
    return {program.bytes_sent + program.bytes_received, run.sent_bytes() + run.received_bytes(),
            run.seconds()};
  }

  c10::intrusive_ptr<c10d::Work> work_;
};

// Tensors that a medium, in Python, brings to where they are moved, or moves.
class MediumCall final : public Call {
 public:
  using Call::Call;

  py::object brought() const { return brought_ ? borrowed(brought_) : py::none(); }
  void set_brought(py::object thing) { brought_ = kept(std::move(thing)); }

  py::object work() const override { return work_ ? borrowed(work_) : py::none(); }
  py::object figures() const override { return statistics_ ? borrowed(statistics_)() : py::none(); }

 private:
  py::object medium(const char* name) const { return borrowed(transfer->medium).attr(name); }
  py::object self() { return py::cast(owned(std::static_pointer_cast<MediumCall>(shared_from_this()))); }

  bool is_brought() override {
    try {
      return with_python([&] { return medium("ready")(self()).cast<bool>(); });
    } catch (const std::exception&) {
      return false;  // start() finds out why
    }
  }
  void connect(const std::shared_ptr<GroupCore>& core, CallId call) override {
    with_python([&] { medium("connect")(as_python(core), self(), call.ordinal); });
  }
  void start(const std::shared_ptr<GroupCore>& core, AgreedPlan& agreed, CallId call, bool reverse,
             double timeout_seconds) override {
    with_python([&] {
      using py::literals::operator""_a;
      const py::tuple made = medium("begin")(
          as_python(core), self(), agreed.shared_from_this(), "ordinal"_a = call.ordinal, "reverse"_a = reverse,
          "src"_a = source_, "dst"_a = destination_, "timeout"_a = timeout_seconds);
      work_ = kept(made[0]);
      statistics_ = kept(made[1]);
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
    Call::release();
    brought_.reset();
  }
  std::vector<PeerTraffic> moved() const override {
    return with_python([&] {
      std::vector<PeerTraffic> out;
      for (const py::handle each : borrowed(statistics_).attr("traffic")()) {
        const auto [peer, is_sent, messages, nbytes] = each.cast<std::tuple<int32_t, bool, int64_t, int64_t>>();
        out.push_back({peer, is_sent, messages, nbytes});
      }
      return out;
    });
  }
  Sums sums() const override {
    return with_python([&] {
      const py::dict found = borrowed(statistics_)();
      return Sums{found["bytes_sent"].cast<int64_t>() + found["bytes_received"].cast<int64_t>(),
                  found["bytes_done"].cast<int64_t>(), found["seconds"].cast<double>()};
    });
  }

  std::shared_ptr<PyObject> brought_;
  std::shared_ptr<PyObject> work_;
  std::shared_ptr<PyObject> statistics_;
};

using Shapes = std::vector<std::pair<std::optional<std::vector<int64_t>>, at::ScalarType>>;

std::vector<ExpectedShard> expected_of(Shapes shapes) {
  std::vector<ExpectedShard> out;
  for (auto& [shape, dtype] : shapes) out.push_back({std::move(shape), dtype});
  return out;
}

void bind_transfers(py::module_& m) {
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
      .def(py::init([](std::shared_ptr<Group> group, int32_t lane, bool is_shared, py::function compile,
                       std::string op, std::string what, std::shared_ptr<Members> members, py::object medium,
                       Shapes source, Shapes destination) {
             return owned(new PythonTransfer(std::move(group), lane, is_shared, std::move(compile),
                                             {std::move(op), std::move(what), std::move(members)},
                                             std::move(medium), expected_of(std::move(source)),
                                             expected_of(std::move(destination))));
           }),
           py::arg("group"), py::arg("lane"), py::arg("is_shared"), py::arg("plans"), py::arg("op"),
           py::arg("what"), py::arg("members"), py::arg("medium"), py::arg("source"), py::arg("destination"))
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
      .def("failure",
           [](const PythonTransfer& self) {
             return as_exception(without_gil([&] {
               const auto closed = self.closed();
               return closed ? closed : self.failure();
             }));
           })
      .def("new_flight", &PythonTransfer::new_flight, py::arg("reverse"));
}

template <typename Kind>
std::shared_ptr<Kind> new_call(const std::shared_ptr<PythonTransfer>& transfer,
                               std::shared_ptr<CallNumber> number, double timeout, bool driven, bool reverse) {
  return owned(new Kind(transfer, std::move(number), checked_timeout(timeout), driven, reverse));
}

template <typename Kind>
py::class_<Kind, Call, std::shared_ptr<Kind>> bind_call_of(py::module_& m, const char* name) {
  return py::class_<Kind, Call, std::shared_ptr<Kind>>(m, name).def(
      py::init(&new_call<Kind>), py::arg("transfer"), py::arg("number"), py::arg("timeout"), py::arg("driven"),
      py::arg("reverse"));
}

void bind_call(py::module_& m) {
  py::class_<Call, std::shared_ptr<Call>>(m, "Call")
      .def("give", &Call::give, py::arg("src"), py::arg("dst"))
      .def("submit", &Call::submit, NoGil())
      .def("wait", &Call::wait_for_all, NoGil())
      .def("is_completed", &Call::is_completed, NoGil())
      .def("is_settled", &Call::is_settled, NoGil())
      .def("make_final", &Call::make_final, NoGil())
      .def("when_settled", &Call::when_settled, py::arg("call"))
      .def("retract", &Call::retract, py::arg("why"), NoGil())
      .def("copy_at_end", &Call::copy_at_end, py::arg("to"), py::arg("source"))
      .def("wrote", &Call::wrote, py::arg("tensor"))
      .def("figures", &Call::figures)
      .def("remaining",
           [](const Call& self) {
             return std::max(std::chrono::duration<double>(self.deadline - Clock::now()).count(), 0.0);
           })
      .def_property_readonly("op", [](const Call& self) { return self.op; })
      .def_readonly("driven", &Call::driven)
      .def_readonly("flight", &Call::flight)
      .def_readonly("number", &Call::call_number)
      .def_property_readonly("timeout", &Call::timeout_seconds)
      .def_property_readonly("deadline", [](const Call& self) { return seconds_of(self.deadline); })
      .def_property_readonly("work", &Call::work)
      .def_property_readonly(
          "error", [](const Call& self) { return as_exception(without_gil([&] { return self.error(); })); });

  bind_call_of<HostCall>(m, "HostCall")
      .def_static(
          "of_fitting",
          [](const std::shared_ptr<PythonTransfer>& transfer, double timeout, bool driven,
             OptionalTensors source, OptionalTensors destination) -> std::shared_ptr<HostCall> {
            if (!transfer->fit(source, destination)) return nullptr;
            auto made = new_call<HostCall>(transfer, std::make_shared<CallNumber>(), timeout, driven, false);
            made->give(std::move(source), std::move(destination));
            return made;
          },
          py::arg("transfer"), py::arg("timeout"), py::arg("driven"), py::arg("src"), py::arg("dst"));

  bind_call_of<MediumCall>(m, "MediumCall")
      .def_property("brought", &MediumCall::brought, &MediumCall::set_brought);
}

}  // namespace

void bind_calls(py::module_& m) {
  bind_transfers(m);
  bind_call(m);
}

}  // namespace meshcast
