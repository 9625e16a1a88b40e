#include "backend/process_group.h"

#include <utility>

namespace meshcast {

using c10d::Work;
using Tensors = std::vector<at::Tensor>;

namespace {

// The element types of gloo; others it refuses in its own words.
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

ProcessGroupMeshcast::ProcessGroupMeshcast(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size,
                                           Multicast multicast)
    : Backend(rank, size), inner_(std::move(inner)), multicast_(std::move(multicast)) {}

bool ProcessGroupMeshcast::takes_multicast(const Tensors& tensors) const {
  if (!multicast_.start || size_ < 2 || tensors.size() != 1) return false;
  const at::Tensor& tensor = tensors.front();
  // Only what is the same on all ranks may decide. Elements are sent in the order of memory, as gloo sends
  // them.
  return tensor.layout() == at::kStrided && tensor.device().is_cpu() && known_to_gloo(tensor.scalar_type()) &&
         static_cast<int64_t>(tensor.nbytes()) >= multicast_.at_least;
}

// gloo of torch before 2.14 has no getError and throws; a group that can still be asked has no error to tell.
c10d::ErrorType ProcessGroupMeshcast::getError() { return c10d::ErrorType::SUCCESS; }

c10::intrusive_ptr<Work> ProcessGroupMeshcast::broadcast(Tensors& tensors, const c10d::BroadcastOptions& opts) {
  bin_->empty();
  if (!takes_multicast(tensors) || opts.rootRank < 0 || opts.rootRank >= size_)
    return inner_->broadcast(tensors, opts);
  ++multicasts_;
  const auto work =
      c10::make_intrusive<PendingWork>(rank_, c10d::OpType::BROADCAST, "meshcast:broadcast", tensors, bin_);
  const at::Tensor& tensor = tensors.front();
  // Without autograd: a parameter may be a leaf.
  const at::Tensor bytes = tensor.detach().as_strided({tensor.numel()}, {1}).view(at::kByte);
  const auto limit = opts.timeout.count() > 0 ? opts.timeout : getBackendOptions()->timeout;
  multicast_.start(work, bytes, static_cast<int>(opts.rootRank), std::chrono::duration<double>(limit).count());
  return work;
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::allreduce(Tensors& tensors, const c10d::AllreduceOptions& opts) {
  return inner_->allreduce(tensors, opts);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::allreduce_sparse(Tensors& tensors,
                                                                const c10d::AllreduceOptions& opts) {
  return inner_->allreduce_sparse(tensors, opts);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::allreduce_coalesced(
    Tensors& tensors, const c10d::AllreduceCoalescedOptions& opts) {
  return inner_->allreduce_coalesced(tensors, opts);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::reduce(Tensors& tensors, const c10d::ReduceOptions& opts) {
  return inner_->reduce(tensors, opts);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::allgather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                         const c10d::AllgatherOptions& opts) {
  return inner_->allgather(outputs, inputs, opts);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::_allgather_base(at::Tensor& output, at::Tensor& input,
                                                               const c10d::AllgatherOptions& opts) {
  return inner_->_allgather_base(output, input, opts);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::allgather_coalesced(std::vector<Tensors>& outputs,
                                                                   Tensors& inputs,
                                                                   const c10d::AllgatherOptions& opts) {
  return inner_->allgather_coalesced(outputs, inputs, opts);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::allgather_into_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::AllgatherOptions& opts) {
  return inner_->allgather_into_tensor_coalesced(outputs, inputs, opts);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::gather(std::vector<Tensors>& outputs, Tensors& inputs,
                                                      const c10d::GatherOptions& opts) {
  return inner_->gather(outputs, inputs, opts);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                       const c10d::ScatterOptions& opts) {
  return inner_->scatter(outputs, inputs, opts);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::reduce_scatter(Tensors& outputs, std::vector<Tensors>& inputs,
                                                              const c10d::ReduceScatterOptions& opts) {
  return inner_->reduce_scatter(outputs, inputs, opts);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::_reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                                    const c10d::ReduceScatterOptions& opts) {
  return inner_->_reduce_scatter_base(output, input, opts);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::reduce_scatter_tensor_coalesced(
    Tensors& outputs, Tensors& inputs, const c10d::ReduceScatterOptions& opts) {
  return inner_->reduce_scatter_tensor_coalesced(outputs, inputs, opts);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::alltoall_base(at::Tensor& output, at::Tensor& input,
                                                             std::vector<int64_t>& output_splits,
                                                             std::vector<int64_t>& input_splits,
                                                             const c10d::AllToAllOptions& opts) {
  return inner_->alltoall_base(output, input, output_splits, input_splits, opts);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::alltoall(Tensors& outputs, Tensors& inputs,
                                                        const c10d::AllToAllOptions& opts) {
  return inner_->alltoall(outputs, inputs, opts);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::send(Tensors& tensors, int peer, int tag) {
  return inner_->send(tensors, peer, tag);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::recv(Tensors& tensors, int peer, int tag) {
  return inner_->recv(tensors, peer, tag);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::recvAnysource(Tensors& tensors, int tag) {
  return inner_->recvAnysource(tensors, tag);
}

c10::intrusive_ptr<Work> ProcessGroupMeshcast::barrier(const c10d::BarrierOptions& opts) {
  return inner_->barrier(opts);
}

void ProcessGroupMeshcast::monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) {
  inner_->monitoredBarrier(opts, wait_all_ranks);
}

}  // namespace meshcast
