#include "run/run.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "common/fault_point.h"
#include "common/sync.h"
#include "run/channel.h"
#include "run/local_channel.h"
#include "transport/progress.h"

namespace meshcast {
namespace {

// The size of a core's own caches (L2 of today's server processors: 0.5 to 2 MiB).
constexpr int64_t kCacheBytes = int64_t{2} << 20;

// Bytes of a local copy after which other work gets its turn: some milliseconds. With digests: so few that they
// are still in the core's own cache.
constexpr int64_t kPartBytes = 16 << 20;
constexpr int64_t kDigestedBytes = 128 << 10;

// Passes the parts of [offset, offset + nbytes) of a message to `visit`: part, view, offset in it, bytes.
template <typename Visit>
void visit_parts(const Run& run, PartRange parts, int64_t offset, int64_t nbytes, const Visit& visit) {
  for (int32_t i = parts.begin; i < parts.end && nbytes > 0; ++i) {
    const Part& part = run.part(i);
    const StridedView view = run.view(part);
    const int64_t size = view.nbytes();
    if (offset < size) {
      const int64_t here = std::min(nbytes, size - offset);
      visit(part, view, offset, here);
      nbytes -= here;
      offset = 0;
    } else {
      offset -= size;
    }
  }
}

int32_t sends_ahead(const Program& program) {
  if (program.relayed) return kSendsAhead;
  return program.sends_longest ? std::max(program.network_sends, 1) : kDirectSendsAhead;
}

}  // namespace

Run::Run(std::shared_ptr<const Program> program, Buffers buffers, RunLabel label, TimePoint deadline)
    : RunState(std::move(program), std::move(label), deadline),
      recv_order(program_->network_recvs, program_->relayed ? kRecvsAhead : program_->network_recvs),
      send_order(program_->network_sends, sends_ahead(*program_)),
      carries(*program_),
      buffers_(std::move(buffers)),
      digests_(std::move(buffers_.nans)),
      write_(program_->bytes_received > kCacheBytes ? Write::Streamed : Write::Cached),
      remaining_(
          static_cast<int64_t>(program_->recvs.size() + program_->sends.size() + program_->copies.size())) {
  if (remaining_ == 0) end_if_due(std::unique_lock(mutex_), false);
}

StridedView Run::view(const Part& part) const {
  const auto& memories = part.side == Side::Source ? buffers_.source : buffers_.destination;
  const TensorMemory& memory = memories[static_cast<size_t>(part.tensor)];
  return part_view(part, program_->places, memory.stride, part.element_bytes, memory.data);
}

int64_t Run::local_position(const Target& target) const {
  const auto& sends = program_->local_sends;
  const auto it =
      std::find_if(sends.begin(), sends.end(), [&](const auto& s) { return s.peer == target.peer; });
  return local_positions[static_cast<size_t>(it - sends.begin())] + target.index;
}

void Run::reduce(const RecvOp& op, std::byte* arrived) const {
  for (int32_t i = op.own.begin; i < op.own.end; ++i) {
    const StridedView own = view(part(i));
    const ElementType type = buffers_.types[static_cast<size_t>(part(i).tensor)];
    combine(own, arrived, type, op.reduce);
    if (op.divisor > 1) divide(arrived, own.nbytes(), type, op.divisor);
    arrived += own.nbytes();
  }
}

void Run::carried_sent(int32_t number) {
  if (!carries.sent(number)) return;
  for (InChannel* channel : in_channels) channel->resume();
  for (LocalInChannel* channel : local_in_channels) channel->resume();
}

void Run::read(const SendOp& op, int64_t offset, int64_t nbytes, std::byte* out) {
  if (op.carry >= 0) {
    std::memcpy(out, carries.data(op.carry) + offset, static_cast<size_t>(nbytes));
    return;
  }
  visit_parts(*this, op.parts, offset, nbytes,
              [&](const Part&, const StridedView& view, int64_t from, int64_t n) {
                pack_range(view, from, n, out);
                out += n;
              });
}

void Run::write(const RecvOp& op, int64_t offset, int64_t nbytes, const std::byte* in) {
  visit_parts(*this, op.parts, offset, nbytes,
              [&](const Part& part, const StridedView& view, int64_t from, int64_t n) {
                unpack_range(in, view, from, n, write_of(op));
                in += n;
                if (!digests_.taken()) return;
                // A cut element counts with its last byte: only pieces through shared memory count, and they
                // arrive in order.
                const int64_t each = view.element_bytes;
                digests_.add(*program_, part, view, from / each * each, (from + n) / each * each);
              });
}

void Run::copy(const CopyOp& op, const std::function<void()>& between) {
  copy_in_parts(op, view(op.from), view(op.to), 0, between);
}

// Copies in parts, with between() after each. offset: the distance of their first element from that of the
// whole copy, in positions of the tensor.
void Run::copy_in_parts(const CopyOp& op, StridedView from, StridedView to, int64_t offset,
                        const std::function<void()>& between) {
  const bool digested = digests_.taken();
  const int64_t nbytes = to.nbytes();
  if (nbytes <= (digested ? kDigestedBytes : kPartBytes)) {
    meshcast::copy(from, to, digested ? Write::Cached : write_);
    if (digested) {
      Part part = op.to;
      part.first += offset;
      digests_.add(*program_, part, to, 0, nbytes);
    }
    between();
    return;
  }
  size_t d = 0;
  while (to.extent[d] == 1) ++d;
  const int64_t half = to.extent[d] / 2;
  StridedView rest_from = from;
  StridedView rest_to = to;
  from.extent[d] = to.extent[d] = half;
  rest_from.extent[d] = rest_to.extent[d] = rest_to.extent[d] - half;
  rest_from.data += half * from.stride[d];
  rest_to.data += half * to.stride[d];
  const int64_t step = program_->digests[static_cast<size_t>(op.to.tensor)].step[d];
  copy_in_parts(op, from, to, offset, between);
  copy_in_parts(op, rest_from, rest_to, offset + half * step, between);
}

const std::byte* Run::packed(const SendOp& op) {
  return op.carry >= 0 ? carries.data(op.carry) : in_one_piece(op.parts);
}

std::byte* Run::packed(const RecvOp& op) const { return in_one_piece(op.parts); }

std::byte* Run::in_one_piece(PartRange parts) const {
  if (parts.end - parts.begin != 1) return nullptr;
  const StridedView whole = view(part(parts.begin));
  return whole.contiguous() ? whole.data : nullptr;
}

void Run::pin() {
  const std::lock_guard lock(mutex_);
  ++pins_;
}

void Run::unpin() {
  std::unique_lock lock(mutex_);
  --pins_;
  end_if_due(std::move(lock), false);
}

void Run::complete_ops(int64_t count, int64_t received_bytes, int64_t sent_bytes) {
  std::unique_lock lock(mutex_);
  remaining_ -= count;
  received_bytes_ += received_bytes;
  sent_bytes_ += sent_bytes;
  end_if_due(std::move(lock), false);
}

void Run::fail(std::exception_ptr error) {
  std::unique_lock lock(mutex_);
  if (ended_ || error_) return;
  error_ = std::move(error);
  end_if_due(std::move(lock), false);
}

void Run::force_end() {
  std::unique_lock lock(mutex_);
  end_if_due(std::move(lock), true);
}

void Run::end_if_due(std::unique_lock<Mutex> lock, bool forced) {
  const bool complete = remaining_ == 0 && pins_ == 0 && !error_;
  const bool given_up = error_ && (pins_ == 0 || forced);
  if (ended_ || !(complete || given_up)) return;
  if (complete) MC_FAULT_POINT("complete");
  // After a forced end, a request may still write: the run then keeps the memory, and the request keeps the
  // run.
  end(std::move(lock), forced ? nullptr : std::move(buffers_.keepalive));
}

bool Run::failed() const {
  const std::lock_guard lock(mutex_);
  return error_ != nullptr;
}

void Run::drive(TimePoint limit) noexcept {
  if (ended()) return;
  driven_ = true;  // set before ended() is read, so that one side sees the end
  const auto far = network.lock();
  const auto near = local.lock();
  meshcast::drive(
      {far ? far->source() : nullptr, near ? near->source() : nullptr}, [this] { return ended(); },
      std::min(limit, deadline()));
}

void Run::wake_driver() noexcept {
  if (!driven_) return;
  const auto far = network.lock();
  const auto near = local.lock();
  Source* const source = far ? far->source() : nullptr;  // both share one Progress
  meshcast::wake_driver(source || !near ? source : near->source());
}

int64_t Run::received_bytes() const {
  const std::lock_guard lock(mutex_);
  return received_bytes_;
}

int64_t Run::sent_bytes() const {
  const std::lock_guard lock(mutex_);
  return sent_bytes_;
}

}  // namespace meshcast
