#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <ATen/core/Tensor.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/Store.hpp>
#include <torch/csrc/distributed/c10d/Work.hpp>

#include "c10d/agreement.h"
#include "c10d/reshard_work.h"
#include "c10d/start_args.h"
#include "c10d/watcher.h"
#include "plan/plan.h"
#include "run/engine.h"
#include "run/slot_pool.h"
#include "transport/local_transport.h"

namespace meshcast {

// The ranks that share this process's memory and how, if they do.
struct LocalRanks {
  std::shared_ptr<LocalTransport> transport;
  std::vector<int32_t> ranks;  // global, ascending, this one included; the same on all of them
};

// The group's connections: a backend for each network interface, and by which of them each rank (by its number
// in the group) sends its first message to another; see make_c10d_transport.
struct Rails {
  std::vector<c10::intrusive_ptr<c10d::Backend>> backends;
  std::vector<int32_t> first_rail;
};

// One private group: the ranks that take part in a transfer, with connections of their own that no user
// operation shares. Owns the engine that runs programs and the watcher that ends them when something breaks.
// Thread-safe. No method may be called with the GIL held; start() never blocks on another rank.
class GroupCore {
 public:
  GroupCore(Rails rails, const c10::intrusive_ptr<c10d::Store>& store, GroupIdentity identity,
            LocalRanks local = {});
  ~GroupCore();

  // Returns the slot for `descriptor`, which it keeps until release_slot(); see agreement.h. Blocks. Throws
  // LayoutError on all ranks where all slots are taken.
  int32_t agree_on(CallId call, const std::string& descriptor, double timeout_seconds);

  // Nothing will be started under this slot here any more. Does not block.
  void release_slot(int32_t slot);
  int32_t slots_taken() const { return slots_.taken(); }  // 0 on all ranks but the first

  // Tells the ranks that wait for this call that this rank refused its own arguments.
  void reject(CallId call, const std::string& message);

  // Throws LayoutError where a tensor does not fit the plan, before anything is enqueued, and AbortedError
  // with the first cause where the group has failed.
  c10::intrusive_ptr<c10d::Work> start(const std::shared_ptr<const Plan>& plan, StartArgs args);

  void abort(const std::string& reason);
  std::optional<std::string> error() const;  // the first cause
  void shutdown();                           // any state, idempotent

 private:
  // A plan projected on this rank, with what the tensors must look like.
  struct Compiled {
    std::shared_ptr<const Plan> plan;
    std::shared_ptr<const Program> program;
    ExpectedTensors tensors;
  };

  std::shared_ptr<const Compiled> compile(const std::shared_ptr<const Plan>& plan);
  std::shared_ptr<Run> start_run(const std::shared_ptr<const Program>& program, Buffers buffers, RunLabel label,
                                 TimePoint deadline, bool driven);
  void refuse_if_failed() const;
  Error raise_context(ErrorKind kind, const std::string& text) const;

  class WatchedEngine;

  const GroupIdentity identity_;
  const std::vector<int32_t> local_ranks_;
  Bulletin agreement_bulletin_;
  const std::shared_ptr<RecycleBin> bin_;
  std::unique_ptr<Engine> engine_;
  const std::unique_ptr<Watched> watched_;  // the engine as the watcher sees it
  std::unique_ptr<Watcher> watcher_;

  mutable std::mutex mutex_;
  std::list<std::shared_ptr<const Compiled>> compiled_;  // most recently used first
  bool shut_down_ = false;

  std::mutex agree_mutex_;  // one agreement at a time
  std::optional<CallId> last_agreed_;
  SlotPool slots_;  // of the group's first rank, which gives the slots
};

}  // namespace meshcast
