#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "layout/layout.h"
#include "memory/reduce.h"
#include "memory/strided.h"

namespace meshcast {

// Elements of one view into another of equal extents, cast where the types differ. The views do not overlap.
struct BoxMove {
  StridedView from;
  StridedView to;
  ElementType from_type = ElementType::None;
  ElementType to_type = ElementType::None;
};

// carried = op(own, carried), then divided where divisor > 1; `carried` is packed like `own`.
struct BoxReduce {
  StridedView own;
  std::byte* carried = nullptr;
  ElementType type = ElementType::None;
  ReduceOp op = ReduceOp::None;
  int32_t divisor = 1;
};

enum class GroupState : uint8_t { Success, InProgress, Failed };

// The report of a transport. `text` names the failure; `remote`: another rank failed, not this one; `peer`:
// which, group-local, where the transport knows.
struct GroupOutcome {
  GroupState state = GroupState::Success;
  bool remote = false;
  std::string text;
  int32_t peer = -1;
};

// The functions of CUDA and of a transport between GPUs (NCCL, or CUDA IPC inside a host) that rounds need, on
// one GPU and one communicator of one lane. Everything is enqueued and returns at once; the communicator does
// not block either, so a call of it may be in progress when it returns. No two threads are inside at a time,
// except in reached() and free_event(). Calls of CUDA that fail throw Error.
class RoundDevice {
 public:
  using Stream = std::uintptr_t;
  using Event = std::uintptr_t;

  virtual ~RoundDevice() = default;

  virtual const char* transport() const { return "NCCL"; }  // in messages

  // True if every group is in progress until the hosts of its peers are in it, too. Runs are then enqueued by a
  // thread of the engine, so that no caller waits for another rank's call.
  virtual bool meets_hosts() const { return false; }

  virtual Stream kernel_stream() = 0;  // both of high priority, and not the caller's
  virtual Stream transfer_stream() = 0;
  virtual Event make_event() = 0;
  virtual void free_event(Event event) noexcept = 0;
  virtual void record(Event event, Stream stream) = 0;
  virtual void wait(Stream stream, Event event) = 0;
  virtual bool reached(Event event) = 0;  // all that it recorded is over

  // Aligned to kStagingAlignment; freed when nothing on the GPU touches it any longer.
  virtual std::shared_ptr<std::byte> allocate(int64_t nbytes) = 0;

  // To be called while no group is under way. The memory at `staging`, which allocate() returned (null: none),
  // is about to be dropped: peers that have it mapped close it. rest() returns whether one has yet to do so.
  virtual void retire(const std::byte* /*staging*/) {}
  virtual bool rest() { return false; }

  virtual void move_boxes(Stream stream, std::span<const BoxMove> boxes) = 0;
  virtual void reduce_boxes(Stream stream, std::span<const BoxReduce> boxes) = 0;

  virtual GroupOutcome group_start() = 0;
  virtual GroupOutcome send(const std::byte* data, int64_t nbytes, int32_t peer, Stream stream) = 0;
  virtual GroupOutcome recv(std::byte* data, int64_t nbytes, int32_t peer, Stream stream) = 0;
  virtual GroupOutcome group_end() = 0;
  virtual GroupOutcome async_error() = 0;

  // Ends all groups, also those on the GPU, and the communicator; nothing of the transport is called
  // afterwards.
  virtual void abort() noexcept = 0;
};

}  // namespace meshcast
