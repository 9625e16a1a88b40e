#pragma once

#include <atomic>
#include <cstdint>
#include <deque>
#include <exception>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/sync.h"
#include "group/agreed_plan.h"
#include "group/agreement.h"
#include "group/group_base.h"
#include "group/store.h"
#include "plan/plan.h"
#include "run/engine.h"
#include "run/slot_pool.h"
#include "transport/local_transport.h"
#include "transport/transport.h"

namespace meshcast {

// The ranks that share memory with this process, and their transport; empty and null if there are none.
struct LocalRanks {
  std::shared_ptr<LocalTransport> transport;
  std::vector<int32_t> ranks;  // global, ascending, this one included; the same on all of them
};

// Names the call of a start.
struct StartedCall {
  int64_t ordinal = 0;  // in its lane; a backward has that of its forward
  bool reverse = false;
  double timeout_seconds = 0;
};

// One private group: the ranks that take part in a transfer, with connections that no operation of a user
// shares. Owns the engine that runs programs and the watcher that ends them when something breaks. Thread-safe;
// start() blocks on other ranks only behind a refused call, to its own limit at most.
class GroupCore : public GroupBase {
 public:
  // network: between hosts; a rank of it is a position in the group.
  GroupCore(std::shared_ptr<Transport> network, const std::shared_ptr<Store>& store, GroupIdentity identity,
            LocalRanks local = {});
  ~GroupCore() override;

  // Agrees with all ranks on a plan and the plan of its backward, which may be null, under `text`; see
  // agreement.h. Blocks. Throws PlanMismatch if ranks differ, LayoutError on all ranks if all slots are taken.
  std::shared_ptr<AgreedPlan> agree_on(CallId call, const PlanText& text, std::shared_ptr<const Plan> plan,
                                       std::shared_ptr<const Plan> reverse, double timeout_seconds);
  int32_t slots_taken() const { return slots_->taken(); }  // 0 on all ranks but the first

  // Notifies the ranks that wait for this call that this rank refused its own arguments. If the store does not
  // answer, they wait to their limits.
  void reject(CallId call, const std::string& message);

  // The same at any time: ranks to which the call is not new may be in it by now, with bytes in flight. Then it
  // ends their calls, and this generation of the group. Blocks for a fraction of a second. agreed: this rank
  // has agreed on the call, so others may be in it.
  void refuse(CallId call, const std::string& message, bool agreed);

  // Whether another rank waits for this one in a call, as far as the store knows.
  bool awaited_in(CallId call);

  // Returns the buffers that a run reads and writes in this direction. May throw; the group is then unchanged.
  using BuffersFor = std::function<Buffers(const PlanDirection& direction)>;
  // Throws what `buffers_for` throws, before anything is enqueued, and AbortedError with the first cause if the
  // group has failed.
  std::shared_ptr<Run> start(const AgreedPlan& agreed, const StartedCall& call, const BuffersFor& buffers_for);

  void shutdown();  // any state, idempotent
  // The boards with the keys of this rank, to be erased once no rank can read them.
  std::vector<std::shared_ptr<BoardStore>> boards() const;

 protected:
  std::weak_ptr<Watcher> watcher() const { return watcher_; }

 private:
  std::exception_ptr failure() const override { return engine_->error(); }
  // The parts of agree_on() and start() that may run out of memory.
  std::shared_ptr<AgreedPlan> agree_whole(CallId call, const PlanText& text, std::shared_ptr<const Plan> plan,
                                          std::shared_ptr<const Plan> reverse, double timeout_seconds);
  std::shared_ptr<Run> start_whole(const AgreedPlan& agreed, const StartedCall& call,
                                   const BuffersFor& buffers_for);

  int32_t agree_in_time(CallId call, const PlanText& text, int32_t offered_slot, double timeout_seconds);
  [[noreturn]] void store_failed(CallId call, const PlanText& text, const std::string& what);
  void note_posted(CallId call, std::string digest, bool rejected);
  void say_rejected(CallId call, const std::string& why);
  void erase_read();
  void raise_if_told(CallId call);  // if a peer has left and notified this rank of the cause
  void adopt_told_refusal();        // for a call in which this rank needs nothing from that peer

  class WatchedEngine;

  const std::shared_ptr<Transport> network_;
  const std::vector<int32_t> local_ranks_;
  Bulletin agreement_bulletin_;
  std::unique_ptr<Engine> engine_;
  const std::unique_ptr<Watched> watched_;  // the engine as the watcher sees it

  std::atomic<bool> shut_down_{false};

  Mutex agree_mutex_;  // one agreement at a time
  struct Posted {
    CallId call;
    std::string digest;  // of the descriptor, see Bulletin::agreeing; "" for a rejection
    bool rejected = false;
    bool agreed = false;
  };
  void erase(const Posted& each);
  std::deque<Posted> posted_;              // what this rank has on the board, the oldest first
  const std::shared_ptr<SlotPool> slots_;  // of the group's first rank, which gives the slots
};

}  // namespace meshcast
