#pragma once

#include <condition_variable>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include <torch/csrc/distributed/c10d/Work.hpp>

#include "c10d/tensor_group.h"
#include "cuda/device/cuda_device.h"
#include "cuda/device/ipc_device.h"
#include "group/agreed_plan.h"
#include "group/bulletin.h"
#include "group/group_base.h"
#include "rounds/round_engine.h"
#include "rounds/round_table.h"

namespace meshcast {

// The types of one tensor of a call: at its source, on the wire, and at its destination. Its plan counts with
// `wire`, which is one of the others.
struct TensorTypes {
  at::ScalarType source;
  at::ScalarType wire;
  at::ScalarType destination;
};

// The GPU side of a private group: for each lane a communicator of NCCL, or connections over CUDA IPC, all on
// one GPU of this rank. Agreement on calls stays with the group itself, `control`; a failure here ends that
// too, and the other way round, since they share the board with the first cause. Thread-safe; no method may be
// called with the GIL held.
class GpuGroupCore final : public GroupBase {
 public:
  // `store`: that of the control group's board.
  GpuGroupCore(std::shared_ptr<GroupCore> control, const std::shared_ptr<Store>& store, GroupIdentity identity,
               int device);
  ~GpuGroupCore() override;

  // Makes the communicator of a lane together with all ranks of the group, which call this in one order with
  // one `unique_id`, `blocks` of NcclMeeting and `options` of its rounds. Blocks.
  // Throws DeadlineExceeded, Aborted with the first cause, or an error of NCCL.
  void connect(int32_t lane, const std::string& unique_id, int blocks, const RoundOptions& options,
               double timeout_seconds);

  // The same over CUDA IPC, for ranks that are all on this host. `addresses`: of all ranks' meetings.
  void connect_ipc(int32_t lane, IpcMeeting& meeting, const std::vector<std::string>& addresses,
                   const RoundOptions& options, double timeout_seconds);

  // Enqueues the transfer behind `after`, an event of this GPU, and returns. Waits for other ranks only while
  // NCCL connects them, at the first calls; over CUDA IPC a thread enqueues it later, and the wait() of its
  // Work waits for other ranks, not this call. `types`: by problem, the same on all ranks; empty where nothing
  // is cast. `hop_by_hop`: no two messages of a rank in one direction share a round, which shows what a round
  // costs; the same in all starts of a plan. Throws LayoutError where a tensor does not fit the plan, before
  // anything is enqueued, and AbortedError with the first cause where the group has failed.
  c10::intrusive_ptr<c10d::Work> start(const AgreedPlan& agreed, StartArgs args,
                                       const std::vector<TensorTypes>& types, RoundDevice::Event after,
                                       bool hop_by_hop);

  void shutdown();  // any state, idempotent

 private:
  struct Lane {
    std::shared_ptr<CudaDevice> device;
    std::shared_ptr<RoundEngine> engine;
    RoundOptions options;  // of its transport; one for all lanes of a group
  };
  class WatchedLanes;

  using Connect = std::function<std::shared_ptr<CudaDevice>(int32_t rank, TimePoint deadline,
                                                            const std::function<void()>& checkpoint)>;

  void add_lane(int32_t lane, double timeout_seconds, const RoundOptions& options, const Connect& connect);
  std::vector<std::shared_ptr<RoundEngine>> engines() const;
  std::exception_ptr failure() const override;
  void fail(const std::exception_ptr& error);
  Lane lane_of(int32_t number) const;
  Error connect_error(ErrorKind kind, const std::string& text, double limit) const;
  void poll_loop();
  enum class Next : uint8_t { Soon, Rest, Call };  // when to poll again
  Next poll_once();

  const std::shared_ptr<GroupCore> control_;
  const std::shared_ptr<RecycleBin> bin_ = std::make_shared<RecycleBin>();
  const int device_;
  Bulletin bulletin_;
  const std::unique_ptr<Watched> watched_;  // the lanes as the watcher sees them

  mutable std::mutex mutex_;
  std::map<int32_t, Lane> lanes_;
  std::exception_ptr error_;
  bool shut_down_ = false;

  std::mutex poll_mutex_;
  std::condition_variable poll_changed_;
  uint64_t begun_ = 0;  // runs so far
  bool poll_stopping_ = false;
  TimePoint last_rest_;  // of the poller alone
  std::thread poller_;
};

// For the first rank of a group to make and all others to be given. Throws Error where NCCL is missing.
std::string nccl_unique_id();

}  // namespace meshcast
