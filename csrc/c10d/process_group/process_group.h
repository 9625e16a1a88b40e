#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/headeronly/version.h>

#include "c10d/process_group/call_batch.h"
#include "c10d/process_group/lazy_backend.h"
#include "c10d/process_group/pending_work.h"
#include "c10d/process_group/point_to_point.h"
#include "common/forks.h"

namespace meshcast {

// The function for broadcasts that are worth a multicast.
struct Multicast {
  // Starts to bring `bytes`, contiguous memory of equal length on all ranks, from rank `root` of the group to
  // the others, and settles `work` when that has begun. Returns at once.
  std::function<void(const c10::intrusive_ptr<PendingWork>& work, const at::Tensor& bytes, int root,
                     double timeout_seconds)>
      start;
  int64_t at_least = 0;  // bytes; smaller broadcasts are the inner backend's
};

// Makes the backend of a part of a group, whose ranks in it are given; null on ranks outside. Collective over
// all of it.
using Splitter = std::function<c10::intrusive_ptr<c10d::Backend>(
    const c10::intrusive_ptr<c10d::Store>& store, const std::vector<int>& ranks,
    const c10::intrusive_ptr<c10d::Backend::Options>& options)>;

// Calls a function that may join threads, which may wait for the lock of an interpreter to free its tensor: a
// holder of that lock has to release it meanwhile.
using Unlocked = std::function<void(const std::function<void()>& ends)>;

// The c10d backend "meshcast": an inner backend does every ordinary collective except a large broadcast, so
// that switching a script to it changes nothing else: gloo for tensors on the CPU, NCCL for those on GPUs,
// selected call by call, since torch makes one backend for both and does not say which device asks. The one for
// GPUs is made when a tensor there first needs it. Point-to-point messages on the CPU have a way of their own
// where the group uses UCX (point_to_point.h). Reshards do not pass through here: they use private groups
// (group_core.h), which this backend's owner ends together with it.
// Collectives are overridden by the names that all supported torch releases know. Additions of later ones are
// between #if, as the headers of the others lack them.
class ProcessGroupMeshcast final : public c10d::Backend {
 public:
  ProcessGroupMeshcast(c10::intrusive_ptr<c10d::Backend> inner, int rank, int size, Multicast multicast,
                       std::shared_ptr<PointToPoint> point_to_point, GpuBackendMaker cuda, Splitter splitter,
                       Unlocked unlocked);
  ~ProcessGroupMeshcast() override;

  const c10::intrusive_ptr<c10d::Backend>& inner() const { return inner_; }
  const std::shared_ptr<PointToPoint>& point_to_point() const { return point_to_point_; }
  c10::intrusive_ptr<c10d::Backend> inner_cuda() const { return cuda_.made(); }  // null until it is needed

  const std::string getBackendName() const override { return "meshcast"; }
  c10::intrusive_ptr<Options> getBackendOptions() override { return inner_->getBackendOptions(); }
  // Where a GPU may be used, for both devices: torch asks without saying which. Elsewhere as gloo.
  bool supportsCoalescing() const override { return cuda_.possible() || inner_->supportsCoalescing(); }
  void startCoalescing() override;
  c10::intrusive_ptr<c10d::Work> endCoalescing() override;
  // torch asks for each kind of device, with one store for all: they get one backend, as in the whole group.
  bool supportsSplitting() const override { return true; }
  c10::intrusive_ptr<c10d::Backend> split(const c10::intrusive_ptr<c10d::Store>& store,
                                          const std::vector<int>& ranks,
                                          const c10::intrusive_ptr<Options>& options) override;
  void setTimeout(std::chrono::milliseconds timeout) override;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  void addEphemeralTimeout(const std::chrono::milliseconds& timeout) override;
#endif
  // Where a GPU may be used these make the backend for GPUs; gloo has no such hooks, and raises that.
  void registerOnCompletionHook(std::function<void(std::shared_ptr<c10d::WorkInfo>)>&& hook) override;
  void waitForPendingWorks() override;
  void enableCollectivesTiming() override;
#ifdef C10D_BACKEND_HAS_RECONFIGURE
  // New members and ranks for the group: the inner backend meets them, and carries all calls from then on.
  bool supportsReconfigure() const override { return inner_->supportsReconfigure(); }
  c10d::ReconfigureHandle get_reconfigure_handle() const override { return inner_->get_reconfigure_handle(); }
  c10::intrusive_ptr<c10d::Work> reconfigure(const c10d::ReconfigureOptions& opts) override;
#endif
  // Numbers start at 0 on every rank, as gloo's and NCCL's do; torch before 2.15 still calls it.
  void setSequenceNumberForGroup() override {}
  // Counts both devices together: the same on all ranks, as long as they make the same calls.
  uint64_t getSequenceNumberForGroup() override;
  c10d::ErrorType getError() override;
  void abort() override;
  void shutdown() override;

  c10::intrusive_ptr<c10d::Work> broadcast(std::vector<at::Tensor>& tensors,
                                           const c10d::BroadcastOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& tensors,
                                           const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce_sparse(std::vector<at::Tensor>& tensors,
                                                  const c10d::AllreduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allreduce_coalesced(std::vector<at::Tensor>& tensors,
                                                     const c10d::AllreduceCoalescedOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce(std::vector<at::Tensor>& tensors,
                                        const c10d::ReduceOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather(std::vector<std::vector<at::Tensor>>& outputs,
                                           std::vector<at::Tensor>& inputs,
                                           const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _allgather_base(at::Tensor& output, at::Tensor& input,
                                                 const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_coalesced(std::vector<std::vector<at::Tensor>>& outputs,
                                                     std::vector<at::Tensor>& inputs,
                                                     const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(std::vector<at::Tensor>& outputs,
                                                                 std::vector<at::Tensor>& inputs,
                                                                 const c10d::AllgatherOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> gather(std::vector<std::vector<at::Tensor>>& outputs,
                                        std::vector<at::Tensor>& inputs,
                                        const c10d::GatherOptions& opts) override;
#if TORCH_VERSION_MAJOR > 2 || TORCH_VERSION_MINOR >= 14
  c10::intrusive_ptr<c10d::Work> gather_single(at::Tensor& output, at::Tensor& input,
                                               const c10d::GatherOptions& opts) override;
#endif
  c10::intrusive_ptr<c10d::Work> scatter(std::vector<at::Tensor>& outputs,
                                         std::vector<std::vector<at::Tensor>>& inputs,
                                         const c10d::ScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter(std::vector<at::Tensor>& outputs,
                                                std::vector<std::vector<at::Tensor>>& inputs,
                                                const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> _reduce_scatter_base(at::Tensor& output, at::Tensor& input,
                                                      const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> reduce_scatter_tensor_coalesced(
      std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
      const c10d::ReduceScatterOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall_base(at::Tensor& output, at::Tensor& input,
                                               std::vector<int64_t>& output_splits,
                                               std::vector<int64_t>& input_splits,
                                               const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> alltoall(std::vector<at::Tensor>& outputs, std::vector<at::Tensor>& inputs,
                                          const c10d::AllToAllOptions& opts) override;
  c10::intrusive_ptr<c10d::Work> send(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> recv(std::vector<at::Tensor>& tensors, int peer, int tag) override;
  c10::intrusive_ptr<c10d::Work> recvAnysource(std::vector<at::Tensor>& tensors, int tag) override;
  c10::intrusive_ptr<c10d::Work> barrier(const c10d::BarrierOptions& opts) override;
  void monitoredBarrier(const c10d::BarrierOptions& opts, bool wait_all_ranks) override;

 private:
  struct Devices;
  template <class... Lists>
  static Devices devices_of(const Lists&... lists);
  bool takes_multicast(const std::vector<at::Tensor>& tensors) const;
  bool takes_point_to_point(const std::vector<at::Tensor>& tensors, int peer, int tag) const;
  // Lets the inner backend of the right device make the call. Throws Layout for tensors on several kinds.
  template <class Call>
  c10::intrusive_ptr<c10d::Work> run(const char* op, Devices devices, const Call& call);
  std::chrono::milliseconds inner_timeout() { return inner_->getBackendOptions()->timeout; }

  const Origin origin_;
  c10::intrusive_ptr<c10d::Backend> inner_;             // never another one
  const std::shared_ptr<PointToPoint> point_to_point_;  // null where gloo carries the messages
  const Splitter splitter_;
  c10::intrusive_ptr<c10d::Store> split_store_;  // of the last split
  c10::weak_intrusive_ptr<c10d::Backend> split_{c10::intrusive_ptr<c10d::Backend>()};
  const Unlocked unlocked_;
  LazyBackend cuda_;
  CallBatch batch_;
  const Multicast multicast_;
  std::atomic<uint64_t> own_calls_ = 0;     // those that the inner backend did not count
  std::atomic<bool> reconfigured_ = false;  // to members that have not met outside the inner backend
};

}  // namespace meshcast
