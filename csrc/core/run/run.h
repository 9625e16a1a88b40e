#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "common/sync.h"
#include "memory/reduce.h"
#include "memory/strided.h"
#include "run/carries.h"
#include "run/plan_order.h"
#include "run/program.h"
#include "run/run_digests.h"
#include "run/run_state.h"
#include "transport/transport.h"

namespace meshcast {

class InChannel;
class LocalInChannel;
class LocalTransport;
class OutChannel;

// The place where a send of a run waits to be issued.
struct SendTicket {
  OutChannel* channel = nullptr;
  int64_t position = 0;
};

// A local tensor as memory. data is null if the rank holds nothing of it.
struct TensorMemory {
  std::byte* data = nullptr;
  std::array<int64_t, kMaxDims> stride{};  // bytes
};

// What a run reads and writes, by problem; `keepalive` owns the memory and is dropped once the run has ended.
struct Buffers {
  std::vector<TensorMemory> source;
  std::vector<TensorMemory> destination;
  std::vector<ElementType> types;  // of the sources that are reduced; may be empty if none is
  std::vector<DigestNans> nans;    // of the tensors, if digests of arrived data are taken; else empty
  std::shared_ptr<void> keepalive;
};

// Transfers that one group can distinguish at a time: slots are smaller than this.
inline constexpr int32_t kSlots = 1 << 14;

// The key by which two ranks match a message. `position`: the messages of a lane between two ranks are numbered
// over all runs, with the same numbers at both ends; so keys do not repeat, however far one rank is ahead and
// however often a run is repeated. Slot, direction and number of the call keep messages from matching if ranks
// disagree, or if one refused a call and continued with the next.
//
// Direction 1 bit, slot 14, call 16, position 33.
inline uint64_t message_key(const RunLabel& label, int64_t position) {
  return (label.reverse ? uint64_t{1} << 63 : 0) | static_cast<uint64_t>(label.slot & (kSlots - 1)) << 49 |
         (static_cast<uint64_t>(label.ordinal) & 0xFFFF) << 33 |
         (static_cast<uint64_t>(position) & ((uint64_t{1} << 33) - 1));
}

// The same in the 31 bits that gloo offers: direction 1, slot 14, call 8, position 8. The last two may wrap
// around: at any moment the messages of a channel that are in flight are within 2 * kWindow of each other.
inline int32_t short_key(uint64_t key) {
  return static_cast<int32_t>((key >> 63) << 30 | (key >> 49 & (kSlots - 1)) << 16 | (key >> 33 & 0xFF) << 8 |
                              (key & 0xFF));
}

// One execution of a program. Threads of the engine report progress; any thread may wait. It ends when every
// operation is complete, or, once failed, when no transport request touches the tensors any longer.
class Run final : public RunState {
 public:
  Run(std::shared_ptr<const Program> program, Buffers buffers, RunLabel label, TimePoint deadline);

  StridedView view(const Part& part) const;
  const Part& part(int32_t index) const { return program_->parts[static_cast<size_t>(index)]; }

  // The bytes [offset, offset + nbytes) of a message in its packed form, which is its parts one after the
  // other: read from, or written to, the memory of the parts.
  void read(const SendOp& op, int64_t offset, int64_t nbytes, std::byte* out);
  void write(const RecvOp& op, int64_t offset, int64_t nbytes, const std::byte* in);

  // Makes a copy of the program; calls between() from time to time, without any lock.
  void copy(const CopyOp& op, const std::function<void()>& between);

  // The memory of a message if that is one contiguous piece; else null.
  const std::byte* packed(const SendOp& op);
  std::byte* packed(const RecvOp& op) const;

  // How data that arrives for `op` is written: past the caches if the run fills more memory than they hold,
  // unless it is read again at once, to be forwarded or for its digest.
  Write write_of(const RecvOp& op) const {
    return op.forwards.empty() && !(op.local && digests_.taken()) ? write_ : Write::Cached;
  }

  void pin();    // a request or a copy that touches the tensors begins ...
  void unpin();  // ... and ends
  void complete_ops(int64_t count, int64_t received_bytes, int64_t sent_bytes = 0);
  void fail(std::exception_ptr error) override;
  void force_end() override;  // after fail(): does not wait for pins

  bool failed() const;  // may be true before it has ended

  // Progresses messages while the caller waits, until `limit` at most, so that no other thread has to be woken
  // to wake this one.
  void drive(TimePoint limit) noexcept override;

  int64_t received_bytes() const override;
  int64_t sent_bytes() const override;
  std::optional<uint64_t> digest(size_t tensor) const override { return digests_.total(program(), tensor); }

  // Written by Engine::start before the run is known to any other thread: the transports that it uses; one
  // ticket for each send of the program, the channels that it sends to and receives from, and the position of
  // the first message to each peer of this host, as in Program::local_sends.
  std::weak_ptr<Transport> network;
  std::weak_ptr<LocalTransport> local;
  std::vector<SendTicket> send_tickets;
  std::vector<OutChannel*> out_channels;
  std::vector<InChannel*> in_channels;
  std::vector<LocalInChannel*> local_in_channels;
  std::vector<int64_t> local_positions;

  PlanOrder recv_order;
  PlanOrder send_order;
  Carries carries;

  // Combines the arrived values with this rank's own, in place.
  void reduce(const RecvOp& op, std::byte* arrived) const;

  // A send of a carried value is complete: its buffer may serve the next receive.
  void carried_sent(int32_t number);

  // Position of the message with this index to a peer of this host.
  int64_t local_position(const Target& target) const;

 private:
  void wake_driver() noexcept override;
  std::byte* in_one_piece(PartRange parts) const;
  void end_if_due(std::unique_lock<Mutex> lock, bool forced);

  void copy_in_parts(const CopyOp& op, StridedView from, StridedView to, int64_t offset,
                     const std::function<void()>& between);

  Buffers buffers_;
  RunDigests digests_;
  const Write write_;
  std::atomic<bool> driven_{false};  // its end wakes the driving thread

  // Guarded by mutex_.
  int64_t remaining_ = 0;
  int64_t pins_ = 0;
  int64_t received_bytes_ = 0;
  int64_t sent_bytes_ = 0;
};

}  // namespace meshcast
