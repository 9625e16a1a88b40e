#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "binding/bind.h"
#include "binding/core_binding.h"
#include "c10d/c10d_store.h"
#include "group/conversation.h"
#include "group/host_memory.h"
#include "group/meeting.h"
#include "transport/shm_budget.h"

namespace meshcast {
namespace {

using Found = std::optional<std::pair<int32_t, std::string>>;  // a lost rank, and why that is known

// function() on a thread that does not hold the lock of the interpreter; null for None. Its exceptions pass
// through the caller.
template <typename Result>
std::function<Result()> python_function(py::object function) {
  if (function.is_none()) return {};
  return [function = kept(std::move(function))] {
    const py::gil_scoped_acquire gil;
    const auto result = py::reinterpret_borrow<py::object>(function.get())();
    if constexpr (!std::is_void_v<Result>) return result.template cast<Result>();
  };
}

// As it is written in Python: None waits for ever.
TimePoint deadline_of(std::optional<double> seconds) {
  return seconds ? time_point(*seconds) : TimePoint::max();
}

Clock::duration length_of(double seconds) { return time_point(seconds).time_since_epoch(); }

Found found(const std::optional<LostRank>& lost) {
  return lost ? Found(std::pair(lost->rank, lost->why)) : std::nullopt;
}

HostMemory::FindLost find_lost(py::object function) {
  return [find = python_function<Found>(std::move(function))]() -> std::optional<LostRank> {
    const auto lost = find();
    return lost ? std::optional(LostRank{lost->first, lost->second}) : std::nullopt;
  };
}

}  // namespace

void bind_conversation(py::module_& m) {
  using Ranks = std::vector<int32_t>;
  py::class_<Conversation, std::shared_ptr<Conversation>>(m, "Conversation")
      .def(py::init([](c10::intrusive_ptr<c10d::Store> store, int32_t rank, size_t ranks) {
             return std::make_shared<Conversation>(store_of(std::move(store)), rank, ranks);
           }),
           py::arg("store"), py::arg("rank"), py::arg("ranks"))
      .def_property_readonly("rank", &Conversation::rank)
      .def("say", &Conversation::say, py::arg("topic"), py::arg("text"), NoGil())
      .def("forget", &Conversation::forget, py::arg("topic"), NoGil())
      .def("heard", &Conversation::heard, py::arg("topic"), py::arg("rank"), NoGil())
      .def("silent", &Conversation::silent, py::arg("topic"), py::arg("ranks"), NoGil())
      .def(
          "hear",
          [](Conversation& self, const std::string& topic, const Ranks& ranks, std::optional<double> deadline,
             std::string late, std::string op, std::string phase, py::object check, double every) {
            const auto checked = python_function<void>(std::move(check));
            const py::gil_scoped_release no_gil;
            return self.hear(topic, ranks, deadline_of(deadline),
                             {std::move(late), std::move(op), std::move(phase)}, checked, length_of(every));
          },
          py::arg("topic"), py::arg("ranks"), py::arg("deadline"), py::arg("late"), py::arg("op"),
          py::arg("phase"), py::arg("check") = py::none(), py::arg("every") = 0.0)
      .def("count", &Conversation::count, py::arg("topic"), py::arg("more"), NoGil())
      .def("verdict", &Conversation::verdict, py::arg("topic"), py::arg("proposal") = "", NoGil())
      .def(
          "await_verdict",
          [](Conversation& self, const std::string& topic, std::optional<double> deadline, py::object check,
             double every) {
            const auto checked = python_function<void>(std::move(check));
            const py::gil_scoped_release no_gil;
            return self.await_verdict(topic, deadline_of(deadline), checked, length_of(every));
          },
          py::arg("topic"), py::arg("deadline"), py::arg("check") = py::none(), py::arg("every") = 0.0)
      .def("erase", &Conversation::erase, py::arg("topic"), NoGil());

  py::class_<Watches, std::shared_ptr<Watches>>(m, "Watches")
      .def(py::init([](std::shared_ptr<KnownOffers> known, py::function watch) {
             return std::make_shared<Watches>(
                 std::move(known), [watch = kept(std::move(watch))](const std::string& said) -> Watch {
                   const py::gil_scoped_acquire gil;
                   return python_function<std::string>(py::reinterpret_borrow<py::object>(watch.get())(said));
                 });
           }),
           py::arg("known"), py::arg("watch"))
      .def(
          "lost",
          [](Watches& self, Conversation& conversation, const std::string& topic, const Ranks& ranks,
             bool each) { return found(self.lost(conversation, topic, ranks, each)); },
          py::arg("conversation"), py::arg("topic"), py::arg("ranks"), py::arg("each") = false, NoGil())
      .def(
          "lost_soon",
          [](Watches& self, const Ranks& ranks, int32_t rank) { return found(self.lost_soon(ranks, rank)); },
          py::arg("ranks"), py::arg("rank"), NoGil());

  py::class_<HostMemory, std::shared_ptr<HostMemory>>(m, "HostMemory")
      .def(py::init([](uint32_t ranks, const std::string& off) { return owned(new HostMemory(ranks, off)); }),
           py::arg("ranks"), py::arg("off"))
      .def_property_readonly("offer", &HostMemory::offer)
      .def_property_readonly("obstacle", &HostMemory::obstacle)
      .def(
          "meet",
          [](HostMemory& self, Conversation& conversation, const Ranks& group,
             const std::map<int32_t, std::string>& offers, double deadline, py::object lost) {
            const auto find = find_lost(std::move(lost));
            const py::gil_scoped_release no_gil;
            self.meet(conversation, group, offers, time_point(deadline), find);
          },
          py::arg("conversation"), py::arg("group"), py::arg("offers"), py::arg("deadline"), py::arg("lost"))
      .def(
          "settle",
          [](HostMemory& self, Conversation& conversation, double deadline, py::object lost) {
            const auto find = find_lost(std::move(lost));
            const py::gil_scoped_release no_gil;
            self.settle(conversation, time_point(deadline), find);
          },
          py::arg("conversation"), py::arg("deadline"), py::arg("lost"))
      .def_static("set_budget", &set_shm_budget, py::arg("nbytes"));
}

}  // namespace meshcast
