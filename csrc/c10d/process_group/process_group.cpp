#include "c10d/process_group/process_group.h"

#include <exception>
#include <utility>

#include <fmt/format.h>

#include "common/error.h"

namespace meshcast {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;

namespace {

// The element types of gloo; it refuses others with its own text.
bool known_to_gloo(at::ScalarType type) {
  switch (type) {
    case at::kFloat:
    case at::kDouble:
    case at::kHalf:
    case at::kBFloat16:
    case at::kChar:
    case at::kByte:
    case at::kBool:
    case at::kInt:
    case at::kLong: return true;
    default: return false;
  }
}

}  // namespace

// The devices of a call's tensors. All lists are checked: collectives differ in which of them are empty on a
// rank that only sends or only receives.
struct ProcessGroupMeshcast::Devices {
  bool cuda = false;
  bool other = false;

  void add(const at::Tensor& tensor) {
    if (tensor.defined()) (tensor.is_cuda() ? cuda : other) = true;
  }
  void add(const Tensors& tensors) {
    for (const auto& tensor : tensors) add(tensor);
  }
  void add(const std::vector<Tensors>& lists) {
    for (const auto& tensors : lists) add(tensors);
  }
};

template <class... Lists>
ProcessGroupMeshcast::Devices ProcessGroupMeshcast::devices_of(const Lists&... lists) {
  Devices found;
  (found.add(lists), ...);
  return found;
}

ProcessGroupMeshcast::ProcessGroupMeshcast(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size,
                                           Multicast multicast, std::shared_ptr<PointToPoint> point_to_point,
                                           GpuBackendMaker cuda, Splitter splitter, Unlocked unlocked)
    : Backend(rank, size),
      inner_(std::move(inner)),
      point_to_point_(std::move(point_to_point)),
      splitter_(std::move(splitter)),
      unlocked_(std::move(unlocked)),
      cuda_(std::move(cuda)),
      multicast_(std::move(multicast)) {}

ProcessGroupMeshcast::~ProcessGroupMeshcast() {
  if (origin_.foreign()) {  // gloo would end what the parent uses, and wait for threads of its
    static_cast<void>(inner_.release());
    new std::shared_ptr(point_to_point_);
    return;
  }
  unlocked_([this] {
    if (point_to_point_) point_to_point_->shutdown();
    inner_.reset();
  });
}

template <class Call>
c10::intrusive_ptr<Work> ProcessGroupMeshcast::run(const char* op, Devices devices, const Call& call) {
  origin_.check();
  if (!devices.cuda) return batch_.started(call(*inner_));
  if (devices.other) {
    ErrorContext context;
    context.rank = rank_;
    context.op = op;
    throw Error(
        ErrorKind::Layout,
        fmt::format("rank {} of the group: {}: some tensors of the call are on cuda, some are not; all of "
                    "one call must be on one kind of device",
                    rank_, op),
        context);
  }
  const auto gpu = cuda_.get(op, *this);
  batch_.enter(gpu);
  return call(*gpu);
}

void ProcessGroupMeshcast::startCoalescing() {
  if (cuda_.possible()) {
    batch_.open();
  } else {
    inner_->startCoalescing();
  }
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::endCoalescing() {
  return cuda_.possible() ? batch_.close(rank_) : inner_->endCoalescing();
}

c10::intrusive_ptr<c10d::Backend> ProcessGroupMeshcast::split(const c10::intrusive_ptr<c10d::Store>& store,
                                                              const std::vector<int>& ranks,
                                                              const c10::intrusive_ptr<Options>& options) {
  if (store != split_store_) {
    auto made = splitter_(store, ranks, options);
    split_store_ = store;
    split_ = c10::weak_intrusive_ptr<c10d::Backend>(made);
    return made;
  }
  return split_.lock();
}

void ProcessGroupMeshcast::setTimeout(std::chrono::milliseconds timeout) {
  inner_->setTimeout(timeout);
  cuda_.set_timeout(timeout);
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
void ProcessGroupMeshcast::addEphemeralTimeout(const std::chrono::milliseconds& timeout) {
  inner_->addEphemeralTimeout(timeout);
  if (cuda_.possible()) cuda_.get("add_ephemeral_timeout", *this)->addEphemeralTimeout(timeout);
}
#endif

void ProcessGroupMeshcast::registerOnCompletionHook(
    std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) {
  if (!cuda_.possible()) return inner_->registerOnCompletionHook(std::move(hook));
  cuda_.get("register_on_completion_hook", *this)->registerOnCompletionHook(decltype(hook){hook});
  onCompletionHook_ = std::move(hook);  // torch asks the owner whether there is one
}

void ProcessGroupMeshcast::waitForPendingWorks() {
  if (const auto gpu = cuda_.made()) return gpu->waitForPendingWorks();
  inner_->waitForPendingWorks();
}

void ProcessGroupMeshcast::enableCollectivesTiming() {
  inner_->enableCollectivesTiming();
  if (cuda_.possible()) cuda_.get("enable_collectives_timing", *this)->enableCollectivesTiming();
}

#ifdef C10D_BACKEND_HAS_RECONFIGURE
// Where the inner backend fails, nothing has changed here either.
c10::intrusive_ptr<Work> ProcessGroupMeshcast::reconfigure(const c10d::ReconfigureOptions& opts) {
  origin_.check();
  auto work = inner_->reconfigure(opts);
  rank_ = inner_->getRank();
  size_ = inner_->getSize();
  own_calls_ = 0;  // the inner backend's count begins at 0 too, on old members and new ones
  reconfigured_ = true;
  cuda_.reconfigured();
  if (point_to_point_) point_to_point_->abort();
  return work;
}
#endif

uint64_t ProcessGroupMeshcast::getSequenceNumberForGroup() {
  const auto gpu = reconfigured_ ? nullptr : cuda_.made();
  return inner_->getSequenceNumberForGroup() + own_calls_ + (gpu ? gpu->getSequenceNumberForGroup() : 0);
}

// NCCL first: work on a GPU may block a thread that gloo's end would wait for.
void ProcessGroupMeshcast::abort() {
  if (origin_.foreign()) return;
  std::exception_ptr problem;
  try {
    cuda_.abort();
  } catch (...) {
    problem = std::current_exception();  // gloo must still end
  }
  if (point_to_point_) point_to_point_->abort();
  inner_->abort();
  if (problem) std::rethrow_exception(problem);
}

void ProcessGroupMeshcast::shutdown() {
  if (origin_.foreign()) return;
  std::exception_ptr problem;
  try {
    cuda_.shutdown();
  } catch (...) {
    problem = std::current_exception();
  }
  if (point_to_point_) point_to_point_->shutdown();
  inner_->shutdown();
  if (problem) std::rethrow_exception(problem);
}

bool ProcessGroupMeshcast::takes_multicast(const Tensors& tensors) const {
  if (!multicast_.start || reconfigured_ || size_ < 2 || tensors.size() != 1) return false;
  const at::Tensor& tensor = tensors.front();
  // Only what is the same on all ranks may decide. Elements are sent in the order of memory, as gloo sends
  // them.
  return tensor.layout() == at::kStrided && tensor.device().is_cpu() && known_to_gloo(tensor.scalar_type()) &&
         static_cast<int64_t>(tensor.nbytes()) >= multicast_.at_least;
}

// gloo of torch before 2.14 has no getError and throws; a group that can still be asked has no error to report.
c10d::ErrorType ProcessGroupMeshcast::getError() {
  const auto gpu = cuda_.made();
  return gpu ? gpu->getError() : c10d::ErrorType::SUCCESS;
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  origin_.check();
  if (!takes_multicast(tensors) || opts.rootRank < 0 || opts.rootRank >= size_)
    return run("broadcast", devices_of(tensors),
               [&](Backend& backend) { return backend.broadcast(tensors, opts); });
  ++own_calls_;
  const auto work =
      c10::make_intrusive<PendingWork>(rank_, c10d::OpType::BROADCAST, "meshcast:broadcast", tensors);
  const at::Tensor& tensor = tensors.front();
  // Without autograd: a parameter may be a leaf.
  const at::Tensor bytes = tensor.detach().as_strided({tensor.numel()}, {1}).view(at::kByte);
  const auto limit = opts.timeout.count() > 0 ? opts.timeout : inner_timeout();
  multicast_.start(work, bytes, static_cast<int>(opts.rootRank), std::chrono::duration<double>(limit).count());
  return batch_.started(work);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return run("all_reduce", devices_of(tensors),
             [&](Backend& backend) { return backend.allreduce(tensors, opts); });
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::allreduce_sparse(Tensors& tensors,
                                                                const c10d::AllreduceOptions& opts) {
  return run("all_reduce", devices_of(tensors),
             [&](Backend& backend) { return backend.allreduce_sparse(tensors, opts); });
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return run("all_reduce", devices_of(tensors),
             [&](Backend& backend) { return backend.allreduce_coalesced(tensors, opts); });
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return run("reduce", devices_of(tensors), [&](Backend& backend) { return backend.reduce(tensors, opts); });
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& opts) {
  return run("all_gather", devices_of(outputs, inputs),
             [&](Backend& backend) { return backend.allgather(outputs, inputs, opts); });
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                               const c10d::AllgatherOptions& opts) {
  return run("all_gather_into_tensor", devices_of(output, input),
             [&](Backend& backend) { return backend._allgather_base(output, input, opts); });
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::allgather_coalesced(std::vector<Tensors>& outputs,
                                                                   Tensors& inputs,
                                                                   const c10d::AllgatherOptions& opts) {
  return run("all_gather", devices_of(outputs, inputs),
             [&](Backend& backend) { return backend.allgather_coalesced(outputs, inputs, opts); });
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return run("all_gather_into_tensor", devices_of(outputs, inputs),
             [&](Backend& backend) { return backend.allgather_into_tensor_coalesced(outputs, inputs, opts); });
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                      const c10d::GatherOptions& opts) {
  return run("gather", devices_of(outputs, inputs),
             [&](Backend& backend) { return backend.gather(outputs, inputs, opts); });
}

#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
c10::intrusive_ptr<Work> ProcessGroupMeshcast::gather_single(at::Tensor& output, at::Tensor& input,
                                                             const c10d::GatherOptions& opts) {
  return run("gather_single", devices_of(output, input),
             [&](Backend& backend) { return backend.gather_single(output, input, opts); });
}
#endif

c10::intrusive_ptr<Work> ProcessGroupMeshcast::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                       const c10d::ScatterOptions& opts) {
  return run("scatter", devices_of(outputs, inputs),
             [&](Backend& backend) { return backend.scatter(outputs, inputs, opts); });
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                              const c10d::ReduceScatterOptions& opts) {
  return run("reduce_scatter", devices_of(outputs, inputs),
             [&](Backend& backend) { return backend.reduce_scatter(outputs, inputs, opts); });
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                    const c10d::ReduceScatterOptions& opts) {
  return run("reduce_scatter_tensor", devices_of(output, input),
             [&](Backend& backend) { return backend._reduce_scatter_base(output, input, opts); });
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  return run("reduce_scatter_tensor", devices_of(outputs, inputs),
             [&](Backend& backend) { return backend.reduce_scatter_tensor_coalesced(outputs, inputs, opts); });
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                             std::vector<int64_t>& output_splits,
                                                             std::vector<int64_t>& input_splits,
                                                             const c10d::AllToAllOptions& opts) {
  return run("all_to_all_single", devices_of(output, input), [&](Backend& backend) {
    return backend.alltoall_base(output, input, output_splits, input_splits, opts);
  });
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::alltoall(Tensors& outputs, Tensors& inputs,
                                                        const c10d::AllToAllOptions& opts) {
  return run("all_to_all", devices_of(outputs, inputs),
             [&](Backend& backend) { return backend.alltoall(outputs, inputs, opts); });
}

// The inner backend refuses what point-to-point messages would refuse, with its own text.
bool ProcessGroupMeshcast::takes_point_to_point(const Tensors& tensors, int peer, int tag) const {
  if (!point_to_point_ || reconfigured_ || tensors.size() != 1 || tag < 0) return false;
  const at::Tensor& tensor = tensors.front();
  return tensor.device().is_cpu() && tensor.layout() == at::kStrided && tensor.is_contiguous() &&
         (peer == PointToPoint::kAnybody || (peer >= 0 && peer < size_ && peer != rank_));
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::send(Tensors& tensors, int peer, int tag) {
  if (peer >= 0 && takes_point_to_point(tensors, peer, tag)) {
    ++own_calls_;
    return batch_.started(point_to_point_->send(tensors.front(), peer, tag, inner_timeout()));
  }
  return run("send", devices_of(tensors), [&](Backend& backend) { return backend.send(tensors, peer, tag); });
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::recv(Tensors& tensors, int peer, int tag) {
  if (peer >= 0 && takes_point_to_point(tensors, peer, tag)) {
    ++own_calls_;
    return batch_.started(point_to_point_->recv(tensors.front(), peer, tag, inner_timeout()));
  }
  return run("recv", devices_of(tensors), [&](Backend& backend) { return backend.recv(tensors, peer, tag); });
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::recvAnysource(Tensors& tensors, int tag) {
  if (takes_point_to_point(tensors, PointToPoint::kAnybody, tag)) {
    ++own_calls_;
    return batch_.started(point_to_point_->recv(tensors.front(), PointToPoint::kAnybody, tag, inner_timeout()));
  }
  return run("recv", devices_of(tensors),
             [&](Backend& backend) { return backend.recvAnysource(tensors, tag); });
}

// torch keeps the device of a barrier to itself. One that names GPUs, or of a group that is bound to one, is
// NCCL's; any other is gloo's, which synchronizes the ranks, too.
c10::intrusive_ptr<Work> ProcessGroupMeshcast::barrier(const c10d::BarrierOptions& opts) {
  const auto bound = getBoundDeviceId();
  const bool names_gpu = !opts.device_ids.empty() || (bound && bound->is_cuda());
  Devices devices;
  devices.cuda = names_gpu && cuda_.possible();
  return run("barrier", devices, [&](Backend& backend) { return backend.barrier(opts); });
}

void ProcessGroupMeshcast::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  origin_.check();
  inner_->monitoredBarrier(opts, wait_all_ranks);
}

}  // namespace meshcast
