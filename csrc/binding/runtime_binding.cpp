#include <algorithm>
#include <array>
#include <chrono>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include <pybind11/chrono.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include "binding/bind.h"
#include "binding/core_binding.h"
#include "c10d/c10d_store.h"
#include "c10d/c10d_transport.h"
#include "c10d/fresh_tensor.h"
#include "c10d/process_group/pending_work.h"
#include "c10d/process_group/process_group.h"
#include "c10d/tensor_group.h"
#include "c10d/tensor_memory.h"
#include "group/host_memory.h"
#include "memory/block_quantize.h"
#include "memory/changes.h"
#include "memory/digest.h"
#include "memory/large_blocks.h"
#include "plan/plan.h"
#include "run/executor.h"
#include "run/run_state.h"
#include "run/work_thread.h"
#include "transport/shm_pair.h"

namespace meshcast {
namespace {

auto call_python(py::function function) {
  return [function = kept(std::move(function))](const c10::intrusive_ptr<PendingWork>& work,
                                                const at::Tensor& bytes, int root, double timeout_seconds) {
    const py::gil_scoped_acquire gil;
    py::reinterpret_borrow<py::function>(function.get())(work, bytes, root, timeout_seconds);
  };
}

// `side`: has make(op), which returns a Backend, and possible().
GpuBackendMaker gpu_backend_maker(py::object side) {
  const auto object = kept(std::move(side));
  GpuBackendMaker out;
  out.make = [object](const char* op) {
    const py::gil_scoped_acquire gil;
    try {
      return py::reinterpret_borrow<py::object>(object.get())
          .attr("make")(op)
          .cast<c10::intrusive_ptr<c10d::Backend>>();
    } catch (py::error_already_set& error) {
      // Passes through torch's bindings and threads, which know C++'s own errors best.
      throw error_from(error.value());
    }
  };
  out.possible = [object] {
    const py::gil_scoped_acquire gil;
    return py::reinterpret_borrow<py::object>(object.get()).attr("possible")().cast<bool>();
  };
  return out;
}

Splitter splitter(py::function function) {
  return [function = kept(std::move(function))](const c10::intrusive_ptr<c10d::Store>& store,
                                                const std::vector<int>& ranks,
                                                const c10::intrusive_ptr<c10d::Backend::Options>& options) {
    const py::gil_scoped_acquire gil;
    try {
      return py::reinterpret_borrow<py::function>(function.get())(store, ranks, options)
          .cast<c10::intrusive_ptr<c10d::Backend>>();
    } catch (py::error_already_set& error) {
      throw error_from(error.value());
    }
  };
}

// A task of the executor that calls Python. Its exceptions are printed, as torch does for add_done_callback().
std::function<void()> python_task(py::function function) {
  return [function = kept(std::move(function))] {
    const py::gil_scoped_acquire gil;
    try {
      py::reinterpret_borrow<py::function>(function.get())();
    } catch (py::error_already_set& error) {
      error.discard_as_unraisable("a callback of meshcast");
    }
  };
}

// part: a tensor on the CPU, of as many dimensions as there are of what `op` is given.
StridedView view_of(const at::Tensor& part, size_t ndim, const char* op) {
  if (!part.is_cpu() || static_cast<size_t>(part.dim()) != ndim || ndim > kMaxDims) {
    throw LayoutError(std::string(op) + ": expected a tensor on the CPU with the dimensions of the whole");
  }
  StridedView view;
  view.data = static_cast<std::byte*>(part.data_ptr());
  view.ndim = static_cast<int>(ndim);
  view.element_bytes = part.element_size();
  for (size_t d = 0; d < ndim; ++d) {
    view.extent[d] = part.size(static_cast<int64_t>(d));
    view.stride[d] = part.stride(static_cast<int64_t>(d)) * view.element_bytes;
  }
  return view;
}

// part: its first element is at `low` of a tensor of this shape.
uint64_t digest_of(const at::Tensor& part, const std::vector<int64_t>& low, const std::vector<int64_t>& shape,
                   const DigestNans& nans) {
  const StridedView view = view_of(part, shape.size(), "digest");
  if (low.size() != shape.size()) throw LayoutError("digest: low and shape differ in length");
  std::array<int64_t, kMaxDims> step{};
  int64_t first = 0;
  int64_t elements = 1;
  for (size_t d = shape.size(); d-- > 0; elements *= shape[d]) {
    step[d] = elements;
    first += low[d] * elements;
  }
  return digest(view, first, step, nans);
}

// The same, cut into blocks of these sizes.
BlockedView blocks_of(const at::Tensor& part, const std::vector<int64_t>& low,
                      const std::vector<int64_t>& block) {
  BlockedView box;
  box.view = view_of(part, block.size(), "block_amax");
  box.type = element_type(part.scalar_type());
  const bool right =
      box.type == ElementType::Float32 || box.type == ElementType::Float16 || box.type == ElementType::BFloat16;
  if (!right || block.empty() || low.size() != block.size()) {
    throw LayoutError("block_amax: expected float32, float16 or bfloat16 of one dimension or more");
  }
  for (size_t d = 0; d < block.size(); ++d) {
    if (low[d] < 0 || block[d] < 1)
      throw LayoutError("block_amax: a block begins before 0, or has no elements");
    box.low[d] = low[d];
    box.block[d] = block[d];
  }
  return box;
}

BlockFormat block_format(const std::string& name) {
  if (name == "fp8_e4m3") return BlockFormat::Fp8E4m3;
  if (name == "mxfp8") return BlockFormat::MxFp8;
  if (name == "nvfp4") return BlockFormat::NvFp4;
  throw LayoutError("no format of blocks is called '" + name + "'");
}

// The memory of a dense tensor on the CPU of so many bytes.
std::byte* memory_of(const at::Tensor& tensor, int64_t nbytes) {
  if (!tensor.is_cpu() || !tensor.is_contiguous() || static_cast<int64_t>(tensor.nbytes()) != nbytes) {
    throw LayoutError("expected a dense tensor on the CPU of " + std::to_string(nbytes) + " bytes");
  }
  return static_cast<std::byte*>(tensor.data_ptr());
}

void quantize_blocks(const std::string& format, const at::Tensor& part, const std::vector<int64_t>& low,
                     const std::vector<int64_t>& block, const at::Tensor& amax, float tensor_amax,
                     const at::Tensor& out) {
  const BlockFormat kind = block_format(format);
  const BlockedView box = blocks_of(part, low, block);
  const bool packed = kind == BlockFormat::NvFp4;
  if (packed && (part.size(-1) % 2 != 0 || low.back() % 2 != 0 || block.back() % 2 != 0)) {
    throw LayoutError("nvfp4: two values share a byte, which the part cuts");
  }
  const auto* most = reinterpret_cast<const float*>(memory_of(amax, box.num_blocks() * int64_t{sizeof(float)}));
  block_values(kind, box, most, tensor_amax, memory_of(out, packed ? part.numel() / 2 : part.numel()));
}

void scale_blocks(const std::string& format, const at::Tensor& amax, float tensor_amax, const at::Tensor& out) {
  const BlockFormat kind = block_format(format);
  const int64_t n = amax.numel();
  const auto* most = reinterpret_cast<const float*>(memory_of(amax, n * int64_t{sizeof(float)}));
  block_scales(kind, most, n, tensor_amax,
               memory_of(out, n * (kind == BlockFormat::Fp8E4m3 ? int64_t{sizeof(float)} : 1)));
}

// Boxes of tensors on the CPU, and how many bytes they have.
std::vector<StridedView> boxes_of(const std::vector<at::Tensor>& boxes) {
  std::vector<StridedView> views;
  for (const at::Tensor& box : boxes) views.push_back(view_of(box, static_cast<size_t>(box.dim()), "changes"));
  return views;
}

int64_t bytes_of(const std::vector<StridedView>& boxes) {
  int64_t found = 0;
  for (const StridedView& box : boxes) found += box.nbytes();
  return found;
}

void keep_boxes(const std::vector<at::Tensor>& boxes, const at::Tensor& kept) {
  const std::vector<StridedView> views = boxes_of(boxes);
  std::byte* to = memory_of(kept, bytes_of(views));
  for (const StridedView& view : views) {
    pack(view, to);
    to += view.nbytes();
  }
}

int64_t encode_boxes(const std::vector<at::Tensor>& boxes, const at::Tensor& earlier,
                     const at::Tensor& stream) {
  const std::vector<StridedView> views = boxes_of(boxes);
  const int64_t nbytes = bytes_of(views);
  std::byte* const kept = memory_of(earlier, nbytes);
  return encode_changes(views, kept,
                        memory_of(stream, nbytes + kStreamHead * static_cast<int64_t>(views.size())));
}

void apply_boxes(const at::Tensor& stream, const std::vector<std::vector<at::Tensor>>& boxes) {
  std::vector<std::vector<StridedView>> views;
  for (const auto& places : boxes) {
    views.push_back(boxes_of(places));
    for (const at::Tensor& place : places) {
      if (place.sizes() != places[0].sizes() || place.element_size() != places[0].element_size())
        throw LayoutError("apply_changes: the places of a box have different shapes or types");
    }
    if (places.empty()) throw LayoutError("apply_changes: a box has no place");
  }
  apply_changes(memory_of(stream, static_cast<int64_t>(stream.nbytes())), static_cast<int64_t>(stream.nbytes()),
                views);
}

}  // namespace

void bind_runtime(py::module_& m) {
  py::module_::import("torch.distributed");  // registers Backend, Store and Work

  // A kept one ensures that a new group has a thread.
  py::class_<WorkThread, std::shared_ptr<WorkThread>>(m, "WorkThread").def(py::init([] {
    return owned(WorkThread::of_process());
  }));

  // Calls `function` on a thread that may block; see Executor.
  m.def(
      "run_callback",
      [](py::function function) { Executor::of_process().post(python_task(std::move(function))); },
      py::arg("function"));
  m.def(
      "finish_callbacks",
      [](double seconds) { Executor::of_process().finish(deadline_after(checked_timeout(seconds))); },
      py::arg("seconds"), NoGil());

  m.def("fresh_tensor", &fresh_tensor, py::arg("shape"), py::arg("dtype"));
  m.def("use_large_blocks", &use_large_blocks, py::arg("use"));
  m.def("kept_large_bytes", &kept_large_bytes);
  m.def(
      "digest",
      [](const at::Tensor& part, const std::vector<int64_t>& low, const std::vector<int64_t>& shape,
         int64_t value_bytes, uint64_t magnitude, uint64_t limit) {
        return digest_of(part, low, shape, {value_bytes, magnitude, limit});
      },
      py::arg("part"), py::arg("low"), py::arg("shape"), py::arg("value_bytes"), py::arg("magnitude"),
      py::arg("limit"), NoGil());
  m.def(
      "block_amax",
      [](const at::Tensor& part, const std::vector<int64_t>& low, const std::vector<int64_t>& block,
         const at::Tensor& out) {
        const BlockedView box = blocks_of(part, low, block);
        block_amax(box, reinterpret_cast<float*>(memory_of(out, box.num_blocks() * int64_t{sizeof(float)})));
      },
      py::arg("part"), py::arg("low"), py::arg("block"), py::arg("out"), NoGil());
  m.def("block_scales", &scale_blocks, py::arg("kind"), py::arg("amax"), py::arg("tensor_amax"), py::arg("out"),
        NoGil());
  m.def("block_values", &quantize_blocks, py::arg("kind"), py::arg("part"), py::arg("low"), py::arg("block"),
        py::arg("amax"), py::arg("tensor_amax"), py::arg("out"), NoGil());
  m.def("nvfp4_tensor_scale", &nvfp4_tensor_scale, py::arg("tensor_amax"));
  m.attr("STREAM_HEAD") = kStreamHead;
  m.def("keep_boxes", &keep_boxes, py::arg("boxes"), py::arg("kept"), NoGil());
  m.def("encode_changes", &encode_boxes, py::arg("boxes"), py::arg("earlier"), py::arg("stream"), NoGil());
  m.def("apply_changes", &apply_boxes, py::arg("stream"), py::arg("boxes"), NoGil());

  py::class_<AgreedPlan, std::shared_ptr<AgreedPlan>>(m, "AgreedPlan")
      .def_property_readonly("slot", &AgreedPlan::slot)
      .def_property_readonly("descriptor",
                             [](const AgreedPlan& self) { return self.direction(false).text->descriptor; })
      .def("next_run", &AgreedPlan::next_run)
      .def_property_readonly_static("REVERSE_LANE", [](const py::object&) { return AgreedPlan::kReverseLane; });

  py::class_<Transport, std::shared_ptr<Transport>>(m, "Transport")
      .def("lost", &Transport::lost, py::arg("peer"), NoGil());
  py::class_<ProbingTransport, Transport, std::shared_ptr<ProbingTransport>>(m, "ProbingTransport");
  m.def(
      "gloo_transport",
      [](std::vector<c10::intrusive_ptr<c10d::Backend>> rails, std::vector<int32_t> first_rail, int rank) {
        return owned(make_c10d_transport(std::move(rails), std::move(first_rail), rank));
      },
      py::arg("rails"), py::arg("first_rail"), py::arg("rank"), NoGil());
  bind_core<TensorGroup>(m, "GroupCore")
      .def(py::init([](std::shared_ptr<Transport> network, const c10::intrusive_ptr<c10d::Store>& store,
                       std::vector<int32_t> ranks, int32_t rank, std::string name, HostMemory* memory) {
             const py::gil_scoped_release construct_without_gil;
             return owned(new TensorGroup(std::move(network), store_of(store),
                                          {std::move(ranks), rank, std::move(name)},
                                          memory ? memory->take() : LocalRanks{}));
           }),
           py::arg("network"), py::arg("store"), py::arg("ranks"), py::arg("rank"), py::arg("name"),
           py::arg("memory") = nullptr)
      .def_property_readonly("slots_taken", &TensorGroup::slots_taken)
      .def(
          "start",
          [](TensorGroup& self, const AgreedPlan& agreed, int64_t ordinal, bool reverse, OptionalTensors src,
             OptionalTensors dst, double timeout) {
            return self.start_tensors(
                agreed, {ordinal, reverse, std::move(src), std::move(dst), checked_timeout(timeout)});
          },
          py::arg("agreed"), py::arg("ordinal"), py::arg("reverse"), py::arg("src"), py::arg("dst"),
          py::arg("timeout"), NoGil());

  py::class_<PendingWork, c10d::Work, c10::intrusive_ptr<PendingWork>>(m, "PendingWork")
      .def("settle", &PendingWork::settle, py::arg("work"), NoGil())
      .def(
          "fail",
          [](PendingWork& self, const py::object& error) {
            const auto cause = std::make_exception_ptr(error_from(error));
            const py::gil_scoped_release no_gil;
            self.fail(cause);
          },
          py::arg("error"));

  py::class_<PointToPoint, std::shared_ptr<PointToPoint>>(m, "PointToPoint")
      .def(py::init<std::vector<int32_t>, int>(), py::arg("ranks"), py::arg("rank"))
      .def(
          "meet_by",
          [](PointToPoint& self, py::function meet) {
            self.meet_by([meet = kept(std::move(meet))](int peer) {
              const py::gil_scoped_acquire gil;
              py::reinterpret_borrow<py::function>(meet.get())(peer);
            });
          },
          py::arg("meet"))
      .def("connect", &PointToPoint::connect, py::arg("peer"), py::arg("transport"), NoGil())
      .def(
          "refuse",
          [](PointToPoint& self, int peer, const py::object& error) {
            const auto cause = std::make_exception_ptr(error_from(error));
            const py::gil_scoped_release no_gil;
            self.refuse(peer, cause);
          },
          py::arg("peer"), py::arg("error"))
      .def("awaits", &PointToPoint::awaits, NoGil())
      .def("shutdown", &PointToPoint::shutdown, NoGil());

  py::class_<ShmPairRendezvous, std::shared_ptr<ShmPairRendezvous>>(m, "PairMemory")
      .def(py::init([] { return owned(new ShmPairRendezvous()); }))
      .def_property_readonly("address", &ShmPairRendezvous::address)
      .def(
          "meet",
          [](ShmPairRendezvous& self, const PointToPoint& messages, int32_t rank, int32_t peer,
             const std::string& address, double deadline) {
            return owned(self.meet(rank, peer, address, time_point(deadline), [&] { messages.check(); }));
          },
          py::arg("messages"), py::arg("rank"), py::arg("peer"), py::arg("address"), py::arg("deadline"),
          NoGil());

  py::class_<ProcessGroupMeshcast, c10d::Backend, c10::intrusive_ptr<ProcessGroupMeshcast>>(
      m, "ProcessGroupMeshcast")
      .def(py::init([](c10::intrusive_ptr<c10d::Backend> inner, int rank, int size, py::function multicast,
                       int64_t at_least, std::shared_ptr<PointToPoint> point_to_point, py::object cuda,
                       py::function split) {
             return c10::make_intrusive<ProcessGroupMeshcast>(
                 std::move(inner), rank, size, Multicast{call_python(std::move(multicast)), at_least},
                 std::move(point_to_point), gpu_backend_maker(std::move(cuda)), splitter(std::move(split)),
                 unlocked);
           }),
           py::arg("inner"), py::arg("rank"), py::arg("size"), py::arg("multicast"), py::arg("at_least"),
           py::arg("point_to_point").none(true), py::arg("cuda"), py::arg("split"))
      .def_property_readonly(
          "key", [](const ProcessGroupMeshcast& self) { return reinterpret_cast<uintptr_t>(&self); })
      .def_property_readonly("inner", &ProcessGroupMeshcast::inner)
      .def_property_readonly("point_to_point", &ProcessGroupMeshcast::point_to_point)
      .def_property_readonly("inner_cuda", &ProcessGroupMeshcast::inner_cuda)
      .def_property_readonly("timeout",
                             [](ProcessGroupMeshcast& self) { return self.getBackendOptions()->timeout; });
}

}  // namespace meshcast
