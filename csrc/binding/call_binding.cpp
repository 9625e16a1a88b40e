#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <fmt/format.h>
#include <pybind11/functional.h>
#include <torch/csrc/autograd/python_variable.h>

#include "binding/call.h"
#include "common/of_process.h"
#include "common/signals.h"

namespace meshcast {
namespace {

// A range of torch.profiler; costs a comparison while no profiler runs.
class Profiled {
 public:
  template <typename Text>
  explicit Profiled(const Text& text) {
    if (guard_.isActive()) guard_.before("meshcast::" + text());
  }

 private:
  at::RecordFunction guard_{at::RecordScope::USER_SCOPE};
};

bool fits(const std::optional<at::Tensor>& shard, const ExpectedShard& expected) {
  if (!shard) return !expected.shape;
  if (!expected.shape || shard->numel() == 0) return false;
  return shard->sizes() == at::IntArrayRef(*expected.shape) && shard->scalar_type() == expected.dtype &&
         shard->is_cpu() && shard->layout() == at::kStrided && !shard->is_conj() && !shard->is_neg() &&
         !shard->unsafeGetTensorImpl()->is_python_dispatch();
}

bool fit_all(const OptionalTensors& shards, const std::vector<ExpectedShard>& expected) {
  if (shards.size() != expected.size()) return false;
  for (size_t i = 0; i < shards.size(); ++i)
    if (!fits(shards[i], expected[i])) return false;
  return true;
}

// Calls that have had no wait yet. A forked child has none of its parent's. The lock is never held in a wait.
struct Flying {
  std::mutex mutex;
  std::list<std::shared_ptr<Call>> calls;
  size_t limit = 64;  // of calls before a check which of them have ended

  std::vector<std::shared_ptr<Call>> all() {
    const std::lock_guard lock(mutex);
    return {calls.begin(), calls.end()};
  }
};

PerProcess<Flying> flying_of_process;

Flying& flying() { return flying_of_process.get(); }

// Such as "KeyboardInterrupt: text".
std::string name_of(const std::exception& raised) {
  const py::gil_scoped_acquire gil;
  py::object value;
  if (const auto* python = dynamic_cast<const py::error_already_set*>(&raised)) value = python->value();
  if (const auto* failure = dynamic_cast<const PythonFailure*>(&raised))
    value = py::reinterpret_borrow<py::object>(failure->raised());
  if (!value) return raised.what();
  const auto text = py::str(value).cast<std::string>();
  return py::type::of(value).attr("__name__").cast<std::string>() + (text.empty() ? "" : ": " + text);
}

}  // namespace

PythonTransfer::PythonTransfer(std::shared_ptr<Group> group, int32_t lane, bool is_shared, py::function compile,
                               Names names, py::object medium, std::vector<ExpectedShard> source,
                               std::vector<ExpectedShard> destination)
    : Transfer(std::move(group), lane, is_shared),
      op(std::move(names.op)),
      backward_op(op + " backward"),
      medium(medium.is_none() ? nullptr : kept(std::move(medium))),
      compile_(kept(std::move(compile))),
      what_(std::make_shared<const std::string>(std::move(names.what))),
      members_(std::move(names.members)),
      source_(std::move(source)),
      destination_(std::move(destination)) {}

bool PythonTransfer::fit(const OptionalTensors& source, const OptionalTensors& destination) const {
  return fit_all(source, source_) && fit_all(destination, destination_);
}

std::shared_ptr<Flight> PythonTransfer::new_flight(bool reverse) const {
  return meshcast::new_flight(reverse ? backward_op : op, members_, group->identity().rank, what_);
}

CompiledPlans PythonTransfer::compile() {
  return with_python([&] {
    const py::tuple made = borrowed(compile_)();
    CompiledPlans out;
    out.text = {made[0].cast<std::string>(), made[1].cast<std::string>()};
    out.forward = made[2].cast<std::shared_ptr<Plan>>();
    if (!made[3].is_none()) out.reverse = made[3].cast<std::shared_ptr<Plan>>();
    std::array<std::shared_ptr<PyObject>, 2> facts{kept(made[4]), kept(made[5])};
    const std::lock_guard lock(made_mutex_);
    descriptor_ = out.text.descriptor;
    facts_.swap(facts);
    for (size_t i = 0; i < 2; ++i)
      if (const auto& plan = i == 0 ? out.forward : out.reverse)
        bounds_.at(i) = static_cast<double>(plan->lower_bound_ns) / 1e9;
    return out;
  });
}

std::shared_ptr<PyObject> PythonTransfer::facts(bool reverse) const {
  const std::lock_guard lock(made_mutex_);
  return facts_.at(static_cast<size_t>(reverse));
}

std::string PythonTransfer::descriptor() const {
  const std::lock_guard lock(made_mutex_);
  return descriptor_;
}

std::shared_ptr<Traffic> PythonTransfer::traffic(bool reverse,
                                                 const std::function<std::vector<PeerTraffic>()>& moved) {
  const auto index = static_cast<size_t>(reverse);
  double bound = 0;
  {
    const std::lock_guard lock(made_mutex_);
    if (traffic_.at(index)) return traffic_.at(index);
    bound = bounds_.at(index);
  }
  const GroupIdentity& identity = group->identity();
  std::vector<Moved> messages;
  for (const PeerTraffic& each : moved()) {
    const int32_t peer = identity.ranks.at(static_cast<size_t>(each.peer));
    messages.push_back(
        {each.is_sent ? identity.rank : peer, each.is_sent ? peer : identity.rank, each.messages, each.nbytes});
  }
  auto made = std::make_shared<Traffic>(reverse ? backward_op : op, bound, identity.rank, std::move(messages));
  const std::lock_guard lock(made_mutex_);
  auto& kept_one = traffic_.at(index);
  if (!kept_one) kept_one.swap(made);
  return kept_one;
}

Call::Call(std::shared_ptr<PythonTransfer> transfer, std::shared_ptr<CallNumber> number, double timeout_seconds,
           bool driven, bool reverse)
    : Start(transfer, number, timeout_seconds, reverse, reverse ? transfer->backward_op : transfer->op),
      transfer(std::move(transfer)),
      call_number(std::move(number)),
      op(reverse ? this->transfer->backward_op : this->transfer->op),
      driven(driven),
      flight(this->transfer->new_flight(reverse)),
      is_reverse_(reverse) {}

void Call::submit() {
  const auto self = std::static_pointer_cast<Call>(shared_from_this());
  const Profiled range([&] { return op + " launch"; });
  group_->submit(self);
  flight->counted_as(lane, *ordinal, self);
  if (!driven) fly();
}

void Call::fly() {
  bool looks = false;
  {
    Flying& now = flying();
    const std::lock_guard lock(now.mutex);
    flies_ = now.calls.insert(now.calls.end(), std::static_pointer_cast<Call>(shared_from_this()));
    looks = now.calls.size() > now.limit;
  }
  if (looks) look_at_flying();
}

void Call::land() {
  if (driven || call_origin_.foreign()) return;
  Flying& now = flying();
  const std::lock_guard lock(now.mutex);
  if (flies_) now.calls.erase(*flies_);  // never the last reference: the caller has one
  flies_.reset();
}

void Call::settled() {
  const auto failed = error();
  if (number().run >= 0 || !failed) {
    std::shared_ptr<Traffic> traffic;
    if (!failed) traffic = transfer->traffic(is_reverse_, [&] { return moved(); });
    flight->settled(number().run, transfer->facts(is_reverse_), std::move(traffic));
  }
  if (failed) {
    note_failure(*flight, failed);
  } else if (transfer->note_agreed()) {
    observe([&](const py::object& told) { told.attr("agreed")(flight->rank, transfer->descriptor()); });
  }
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

void Call::when_settled(py::function call) {
  auto keeps = kept(call);
  const bool later = without_gil([&] {
    const std::lock_guard lock(calls_mutex_);
    if (was_settled_) return false;
    calls_.push_back(std::move(keeps));
    return true;
  });
  if (!later) call();
}

void Call::wait_for_all() {
  const Profiled range([&] { return op + " wait"; });
  const TimePoint waiting = Clock::now();
  try {
    const Profiled messages([&] {
      const auto traffic = flight->progress().traffic;
      return op + " " + (traffic ? traffic->text() : "waits for the other ranks");
    });
    wait();
    land();
  } catch (const Error&) {
    land();
    note_failure(*flight, std::current_exception());
    throw;
  } catch (const std::exception& raised) {  // of a handler of a signal, or of CUDA
    group_->abort(fmt::format("rank {} was interrupted in {} by {}", flight->rank, op, name_of(raised)));
    throw;
  }
  finish();
  if (flight->ended(waiting, sums().seconds)) note_end(*flight);
  if (group_->has_news())
    if (const auto news = group_->take_news()) throw Error(*news);
}

void Call::watch(const at::Tensor& source) {
  if (source.is_inference()) return;
  const c10::VariableVersion& counter = source.unsafeGetTensorImpl()->version_counter();
  const std::lock_guard lock(watch_mutex_);
  watched_.push_back({counter, counter.current_version(), source.sizes().vec()});
}

std::optional<Call::Watched> Call::changed() const {
  const std::lock_guard lock(watch_mutex_);
  for (const Watched& each : watched_)
    if (each.counter.current_version() != each.version) return each;
  return std::nullopt;
}

bool Call::wait_unchanged() {
  if (changed()) return false;
  wait_for_all();
  if (changed()) return false;
  const std::lock_guard lock(watch_mutex_);
  watched_.clear();
  return true;
}

bool Call::completes() {
  const bool completed = is_completed();
  if (completed && !ended_unchanged_ && !changed()) ended_unchanged_ = true;
  return completed;
}

// Other waiters continue once it is done.
void Call::finish() {
  const std::lock_guard lock(finish_mutex_);
  if (std::exchange(finished_, true)) return;
  const at::NoGradGuard no_grad;
  for (const auto& [to, from] : copied_) {
    to.copy_(from);
    if (from.is_cuda()) {  // made under the stream of the call, read under that of the wait
      const c10::impl::VirtualGuardImpl device(from.device().type());
      from.record_stream(device.getStream(from.device()));
    }
  }
  for (const at::Tensor& each : written_)
    if (!each.is_inference()) each.unsafeGetTensorImpl()->bump_version();
  copied_.clear();
  written_.clear();
}

void Call::count_unwaited() {
  const auto traffic = flight->progress().traffic;
  if (!traffic || !traffic->only_sends()) return;
  const Sums found = sums();
  found.done >= found.expected ? flight->ended_unwaited(found.seconds) : flight->failed_unwaited();
}

void look_at_flying() {
  for (const auto& call : flying().all()) {
    if (!call->is_completed()) continue;
    call->count_unwaited();
    call->land();
  }
  Flying& now = flying();
  const std::lock_guard lock(now.mutex);
  now.limit = 2 * now.calls.size() + 64;
}

void drain(const Group& group, TimePoint limit) {
  for (const auto& call : flying().all())
    while (call->transfer->group.get() == &group && !call->is_completed() && Clock::now() < limit)
      sleep_for(std::chrono::milliseconds(2));
  look_at_flying();
}

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

  void take_digests(std::vector<DigestNans> nans) { nans_ = std::move(nans); }

  std::optional<std::vector<std::optional<uint64_t>>> digests() const {
    if (!is_settled() || !work_ || nans_.empty()) return std::nullopt;
    std::vector<std::optional<uint64_t>> out;
    const RunState& run = run_of(work_);
    for (size_t i = 0; i < run.program().digests.size(); ++i) out.push_back(run.digest(i));
    return out;
  }

  py::object work() const override { return work_ ? py::cast(work_) : py::none(); }
  py::object figures() const override { return work_ ? py::object(stats_of(work_)) : py::none(); }
  std::shared_ptr<Refusal> retract(const std::string& why) override {
    return group_->retract(call(), why, timeout_seconds(),
                           [weak = weak_from_this()]() -> std::optional<int64_t> {
                             const auto self = std::static_pointer_cast<Start>(weak.lock());
                             return self ? self->generation() : std::nullopt;
                           });
  }

 private:
  void start(const std::shared_ptr<GroupCore>& core, AgreedPlan& agreed, CallId call, bool reverse,
             double timeout_seconds) override {
    work_ = dynamic_cast<TensorGroup&>(*core).start_tensors(
        agreed, {call.ordinal, reverse, source_, destination_, timeout_seconds, nans_});
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
  std::vector<DigestNans> nans_;
};

// Tensors that a medium, in Python, copies to memory that can be moved, or moves itself.
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
             auto made = std::make_shared<CallNumber>();
             made->ordinal = ordinal;
             made->run = run;
             made->agreed = std::move(agreed);
             made->core = core;
             return made;
           }),
           py::arg("ordinal") = -1, py::arg("run") = -1, py::arg("agreed") = nullptr, py::arg("core") = nullptr)
      .def_readonly("ordinal", &CallNumber::ordinal)
      .def_readonly("run", &CallNumber::run)
      .def_readonly("agreed", &CallNumber::agreed)
      .def_property_readonly("failed", [](const CallNumber& self) { return self.failed.load(); })
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

// The part of a DTensor on this rank. None if the object is no tensor, or has none.
std::optional<at::Tensor> local_of(py::handle object) {
  static PyObject* const name = PyUnicode_InternFromString("_local_tensor");
  if (!THPVariable_Check(object.ptr())) return std::nullopt;
  const auto local = py::reinterpret_steal<py::object>(PyObject_GetAttr(object.ptr(), name));
  if (!local) PyErr_Clear();
  if (!local || !THPVariable_Check(local.ptr())) return std::nullopt;
  return THPVariable_Unpack(local.ptr());
}

const void* storage_of(const at::Tensor& tensor) {
  return tensor.layout() == at::kStrided && tensor.has_storage() ? tensor.storage().data() : nullptr;
}

// Watches those that are tensors, and the local tensor of a DTensor. A source in the storage of `out` is not
// watched, since the call itself writes there.
void watch_sources(Call& call, const py::iterable& sources, py::handle out) {
  const auto own_of = [](py::handle object) {
    auto local = local_of(object);
    if (!local && THPVariable_Check(object.ptr())) local = THPVariable_Unpack(object.ptr());
    return local;
  };
  const auto target = own_of(out);
  const void* const written = target ? storage_of(*target) : nullptr;
  for (const py::handle source : sources) {
    const auto own = own_of(source);
    if (!own || (written && storage_of(*own) == written)) continue;
    const at::Tensor& whole = THPVariable_Unpack(source.ptr());
    if (!whole.is_same(*own)) call.watch(whole);
    call.watch(*own);
  }
}

// First address, and the one behind the last.
std::pair<const std::byte*, const std::byte*> extent_of(const at::Tensor& tensor) {
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto* const first = static_cast<const std::byte*>(tensor.const_data_ptr());
  return {first, first + (last + 1) * static_cast<int64_t>(tensor.element_size())};
}

bool overlap(const at::Tensor& a, const at::Tensor& b) {
  const auto [a_first, a_end] = extent_of(a);
  const auto [b_first, b_end] = extent_of(b);
  return a_first < b_end && b_first < a_end;
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

// Begins a call of DTensors; null where one of them needs more than to be moved, and nothing is begun.
std::shared_ptr<HostCall> started(const std::shared_ptr<PythonTransfer>& transfer, const py::sequence& sources,
                                  const py::sequence& results, bool are_given, double timeout, bool driven) {
  OptionalTensors from(sources.size());
  OptionalTensors to(results.size());
  for (size_t i = 0; i < from.size(); ++i)
    if (transfer->holds(i)) from[i] = local_of(sources[i]);
  for (size_t i = 0; i < to.size(); ++i)
    if (transfer->receives(i)) to[i] = local_of(results[i]);
  if (!transfer->fit(from, to)) return nullptr;
  for (auto& each : from) {
    // An alias keeps the memory even if its owner gets another.
    if (each) each = each->variable_data();
  }
  if (are_given) {
    for (size_t i = 0; i < to.size(); ++i)  // neighbours would read what already came in from others
      if (from[i] && to[i] && overlap(*from[i], *to[i])) return nullptr;
  }
  auto call = new_call<HostCall>(transfer, std::make_shared<CallNumber>(), timeout, driven, false);
  if (are_given) {
    for (size_t i = 0; i < to.size(); ++i) {
      if (!to[i]) continue;
      call->wrote(THPVariable_Unpack(py::object(results[i]).ptr()));
      call->wrote(*to[i]);
    }
  }
  if (!driven) watch_sources(*call, sources, are_given ? py::object(results[0]) : py::none());
  call->give(std::move(from), std::move(to));
  without_gil([&] { call->submit(); });
  return call;
}

void bind_call(py::module_& m) {
  py::class_<Call, std::shared_ptr<Call>>(m, "Call")
      .def("give", &Call::give, py::arg("src"), py::arg("dst"))
      .def("submit", &Call::submit, NoGil())
      .def("wait", &Call::wait_for_all, NoGil())
      .def("wait_unchanged", &Call::wait_unchanged, NoGil())
      .def("is_completed", &Call::completes, NoGil())
      .def_property_readonly("ended_unchanged", &Call::ended_unchanged)
      .def("watch", &watch_sources, py::arg("sources"), py::arg("out") = py::none())
      .def("changed",
           [](const Call& self) -> std::optional<std::tuple<std::vector<int64_t>, uint32_t, uint32_t>> {
             auto found = self.changed();
             if (!found) return std::nullopt;
             const uint32_t now = found->counter.current_version();
             return std::tuple(std::move(found->shape), found->version, now);
           })
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
          py::arg("transfer"), py::arg("timeout"), py::arg("driven"), py::arg("src"), py::arg("dst"))
      .def_static("started", &started, py::arg("transfer"), py::arg("sources"), py::arg("results"),
                  py::arg("are_given"), py::arg("timeout"), py::arg("driven"))
      .def(
          "take_digests",
          [](HostCall& self, const std::vector<std::tuple<int64_t, uint64_t, uint64_t>>& nans) {
            std::vector<DigestNans> all;
            for (const auto& [value_bytes, magnitude, limit] : nans)
              all.push_back({value_bytes, magnitude, limit});
            self.take_digests(std::move(all));
          },
          py::arg("nans"))
      .def("digests", &HostCall::digests);

  bind_call_of<MediumCall>(m, "MediumCall")
      .def_property("brought", &MediumCall::brought, &MediumCall::set_brought);
}

}  // namespace

void bind_calls(py::module_& m) {
  bind_transfers(m);
  bind_call(m);
}

}  // namespace meshcast
