#pragma once

#include <array>
#include <atomic>
#include <exception>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "binding/core_binding.h"
#include "group/record.h"
#include "group/transfer.h"

// The calls of a private group as Python makes them. One call of this module checks, counts, begins and records
// a compiled reshard; another waits for it.
namespace meshcast {

// The Python side of the record. Any thread; each prints its own failures.
void observe(const std::function<void(const py::object&)>& tell);  // tell(observer), if there is one
std::shared_ptr<Flight> new_flight(const std::string& op, const std::shared_ptr<const Members>& group,
                                   int32_t rank, const std::shared_ptr<const std::string>& what,
                                   const py::object& site = py::none());
void note_end(const Flight& flight);
void note_failure(Flight& flight, const std::exception_ptr& error);

// The expected form of a shard; no shape if the rank is in no mesh of that side.
struct ExpectedShard {
  std::optional<std::vector<int64_t>> shape;
  at::ScalarType dtype;
};

// A transfer that Python compiles.
class PythonTransfer final : public Transfer {
 public:
  struct Names {
    std::string op;
    std::string what;  // the moved object, in words
    std::shared_ptr<const Members> members;
  };

  // compile: returns op, descriptor, plan and that of the backward, and the facts of both plans for the record.
  // medium: moves tensors that are not on CPUs; None.
  PythonTransfer(std::shared_ptr<Group> group, int32_t lane, bool is_shared, py::function compile, Names names,
                 py::object medium, std::vector<ExpectedShard> source, std::vector<ExpectedShard> destination);

  // True if the shards are as expected, on CPUs, and can be moved as they are. If not, the caller finds out
  // why.
  bool fit(const OptionalTensors& source, const OptionalTensors& destination) const;
  // True if this rank has a shard of that tensor at either end.
  bool holds(size_t index) const { return index < source_.size() && source_[index].shape.has_value(); }
  bool receives(size_t index) const {
    return index < destination_.size() && destination_[index].shape.has_value();
  }
  std::shared_ptr<Flight> new_flight(bool reverse) const;  // with the lock of the interpreter
  std::shared_ptr<PyObject> facts(bool reverse) const;     // null before it is compiled
  // The traffic of one direction, made from `moved` if it has none yet.
  std::shared_ptr<Traffic> traffic(bool reverse, const std::function<std::vector<PeerTraffic>()>& moved);
  bool note_agreed() { return !agreed_.exchange(true); }  // true the first time
  std::string descriptor() const;

  const std::string op;
  const std::string backward_op;
  const std::shared_ptr<PyObject> medium;  // null for CPUs

 private:
  CompiledPlans compile() override;

  const std::shared_ptr<PyObject> compile_;
  const std::shared_ptr<const std::string> what_;
  const std::shared_ptr<const Members> members_;
  const std::vector<ExpectedShard> source_;
  const std::vector<ExpectedShard> destination_;
  mutable std::mutex made_mutex_;  // never held in a wait
  std::string descriptor_;
  std::array<std::shared_ptr<PyObject>, 2> facts_;
  std::array<double, 2> bounds_{};  // seconds
  std::array<std::shared_ptr<Traffic>, 2> traffic_;
  std::atomic<bool> agreed_{false};
};

// One start of a transfer with its entry in the record.
class Call : public Start {
 public:
  // driven: its caller waits at once, and helps to move. With the lock of the interpreter.
  Call(std::shared_ptr<PythonTransfer> transfer, std::shared_ptr<CallNumber> number, double timeout_seconds,
       bool driven, bool reverse);

  void give(OptionalTensors source, OptionalTensors destination) {
    source_ = std::move(source);
    destination_ = std::move(destination);
  }
  void submit();
  // Waits as Start, then does the last steps, the first time. Throws errors that are left from earlier calls.
  void wait_for_all();
  // Last steps, given before any wait: `from`, of another type, is copied to `to`; autograd learns that
  // `tensor` was written.
  void copy_at_end(at::Tensor to, at::Tensor from) { copied_.emplace_back(std::move(to), std::move(from)); }
  void wrote(at::Tensor tensor) { written_.push_back(std::move(tensor)); }
  // A source, whose memory is not kept: a wait reports whether it was changed meanwhile. A tensor made in
  // inference mode does not count writes.
  struct Watched {
    c10::VariableVersion counter;  // of the tensor and all of its views
    uint32_t version = 0;          // when it was given
    std::vector<int64_t> shape;
  };
  void watch(const at::Tensor& source);
  // The first such source that was changed.
  std::optional<Watched> changed() const;
  // wait_for_all(), and watches no longer. False if a source was changed before the end, after which it does
  // not wait, or in the wait.
  bool wait_unchanged();
  bool completes();                                          // is_completed(), and sets ended_unchanged()
  bool ended_unchanged() const { return ended_unchanged_; }  // as completes() has found
  // On the thread that settles it; at once where it is settled.
  void when_settled(py::function call);
  // Null where nothing of the source can be read after the call was made.
  virtual std::shared_ptr<Refusal> retract(const std::string& /*why*/) { return nullptr; }
  virtual py::object work() const = 0;     // None before it was started
  virtual py::object figures() const = 0;  // None before it was started
  void count_unwaited();                   // once it has ended, if it only sends
  void land();                             // it has ended: nothing waits for it when its group closes

  const std::shared_ptr<PythonTransfer> transfer;
  const std::shared_ptr<CallNumber> call_number;
  const std::string& op;
  const bool driven;
  const std::shared_ptr<Flight> flight;

 protected:
  struct Sums {
    int64_t expected = 0;
    int64_t done = 0;
    double seconds = 0;
  };
  virtual std::vector<PeerTraffic> moved() const = 0;  // once it was started
  virtual Sums sums() const = 0;                       // once it was started
  void began_again() override { flight->again(); }
  void settled() override;
  void release() override {
    source_.clear();
    destination_.clear();
  }

  OptionalTensors source_;
  OptionalTensors destination_;

 private:
  void finish();
  void fly();

  const Origin call_origin_;
  const bool is_reverse_;
  std::optional<std::list<std::shared_ptr<Call>>::iterator> flies_;  // among the calls without a wait
  std::vector<std::pair<at::Tensor, at::Tensor>> copied_;
  std::vector<at::Tensor> written_;
  mutable std::mutex watch_mutex_;  // never held in a wait
  std::vector<Watched> watched_;
  std::atomic<bool> ended_unchanged_{false};
  std::mutex finish_mutex_;
  bool finished_ = false;
  std::mutex calls_mutex_;
  bool was_settled_ = false;
  std::vector<std::shared_ptr<PyObject>> calls_;
};

// Waits, up to `limit`, for the calls of the group that have had no wait: a rank that only sends returns from
// its call before its peers have the data.
void drain(const Group& group, TimePoint limit);

// Counts and drops those of these calls that have ended.
void look_at_flying();

}  // namespace meshcast
