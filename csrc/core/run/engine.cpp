#include "run/engine.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <new>
#include <system_error>
#include <utility>

#include <fmt/format.h>

#include "common/error.h"

namespace meshcast {
namespace {

// Messages up to this size are packed and issued by the caller of start(), and so many bytes of local copies
// are made by it: waking a thread would cost more.
constexpr int64_t kInlineBytes = 64 * 1024;

bool copies_are_small(const Program& program) {
  int64_t nbytes = 0;
  for (const CopyOp& op : program.copies) {
    int64_t here = op.to.element_bytes;
    for (int d = 0; d < op.to.ndim; ++d) here *= op.to.extent[static_cast<size_t>(d)];
    nbytes += here;
    if (nbytes > kInlineBytes) return false;
  }
  return true;
}

void make_copies(Run& run, const std::function<void()>& between) {
  const auto& copies = run.program().copies;
  for (const CopyOp& op : copies) run.copy(op, between);
  run.complete_ops(static_cast<int64_t>(copies.size()), 0);
}

// A start that lacks memory or a thread: nobody further up could say for what.
std::exception_ptr cause_of_start(const std::exception_ptr& error) {
  const auto named = [](const std::exception& found) {
    return std::make_exception_ptr(
        Error(ErrorKind::Generic, fmt::format("a call could not be started: {}", found.what())));
  };
  try {
    std::rethrow_exception(error);
  } catch (const std::bad_alloc& found) {
    return named(found);
  } catch (const std::system_error& found) {
    return named(found);
  } catch (...) {
    return error;
  }
}

}  // namespace

Engine::Engine(std::shared_ptr<Transport> transport, ChannelFailure failure,
               std::shared_ptr<LocalTransport> local)
    : transport_(std::move(transport)),
      failure_(std::move(failure)),
      local_(std::move(local)),
      work_(WorkThread::of_process()) {}

Engine::~Engine() {
  shutdown(std::make_exception_ptr(TransportError(TransportError::Cause::Aborted, "shut down")));
}

std::shared_ptr<Run> Engine::start(std::shared_ptr<const Program> program, Buffers buffers, RunLabel label,
                                   TimePoint deadline) {
  auto run = std::make_shared<Run>(std::move(program), std::move(buffers), std::move(label), deadline);
  const Entered inside(admission_);
  if (!inside) std::rethrow_exception(error());
  try {
    hand_out(run);
  } catch (...) {
    const auto cause = cause_of_start(std::current_exception());
    fail(cause);
    std::rethrow_exception(cause);
  }
  return run;
}

void Engine::hand_out(const std::shared_ptr<Run>& run) {
  // Phase 1: the operations by peer, in plan order.
  const Program* program = &run->program();
  const int32_t lane = run->label().lane;

  std::map<int, std::vector<const RecvOp*>> recvs;
  std::map<int, std::vector<const RecvOp*>> local_recvs;
  std::map<int, std::vector<const SendOp*>> sends;
  std::map<int, std::vector<size_t>> send_index;
  for (const RecvOp& op : program->recvs) (op.local ? local_recvs : recvs)[op.peer].push_back(&op);
  for (size_t i = 0; i < program->sends.size(); ++i) {
    const SendOp& op = program->sends[i];
    if (op.local) continue;
    sends[op.targets.front().peer].push_back(&op);
    send_index[op.targets.front().peer].push_back(i);
  }

  // Phase 2: all of them into their channels, under one lock. Nothing is posted yet, but another run that ends
  // may post them at once.
  std::shared_ptr<LocalTransport> local;
  {
    // Held throughout, so that all channels of a lane see the runs in the same order.
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    local = local_;
    runs_.push_back(run);
    if (runs_.size() > look_at_runs_) forget_ended_runs_locked();
    if (!sends.empty() || !recvs.empty()) run->network = transport_;
    if (!local_recvs.empty() || !program->local_sends.empty()) run->local = local_;
    // Before any message: the first that has ended lets those of other channels go, and a receive that ends at
    // once must find the tickets of its forwards.
    run->send_tickets.resize(program->sends.size());
    for (const auto& [peer, ops] : sends) run->out_channels.push_back(&out_channel_locked({lane, peer}));
    for (const auto& [peer, ops] : recvs) run->in_channels.push_back(&in_channel_locked({lane, peer}));
    for (const auto& [peer, ops] : local_recvs)
      run->local_in_channels.push_back(&local_channel_locked({lane, peer}));
    for (const LocalSends& local_sends : program->local_sends) {
      int64_t& sent = local_sent_[{lane, local_sends.peer}];
      run->local_positions.push_back(sent);
      sent += local_sends.count;
    }
    for (const auto& [peer, ops] : sends) {
      OutChannel& channel = out_channel_locked({lane, peer});
      int64_t position = channel.enqueue(run, ops);
      for (const size_t i : send_index[peer]) run->send_tickets[i] = {&channel, position++};
    }
    for (const auto& [peer, ops] : recvs) in_channel_locked({lane, peer}).enqueue(run, ops);
    for (const auto& [peer, ops] : local_recvs) local_channel_locked({lane, peer}).enqueue(run, ops);
  }
  // Phase 3: without the lock, what can begin. This thread posts what arrives and does what is small; what has
  // to be packed or copied at length is the work thread's.
  for (InChannel* channel : run->in_channels) channel->resume();
  for (const auto& [peer, ops] : sends) {
    OutChannel* channel = run->send_tickets[send_index[peer].front()].channel;
    const auto first = std::find_if(ops.begin(), ops.end(), [](const SendOp* op) { return !op->forward; });
    if (first == ops.end()) continue;
    if ((*first)->nbytes <= kInlineBytes || run->packed(**first)) {
      channel->pump();
    } else {
      work_->post(this, [this, run, channel, peer = peer] {
        guarded(failure_, peer, run, [&] { channel->pump([this] { work_->tick_if_due(); }); });
      });
    }
  }
  for (const SendOp& op : program->sends) {
    if (op.local && !op.forward) send_local(*local, run, op, failure_);
  }
  if (program->copies.empty()) return;
  if (copies_are_small(*program)) {
    make_copies(*run, [] {});
  } else {
    run->pin();
    work_->post(this, [this, run] {
      if (!run->failed()) make_copies(*run, [this] { work_->tick_if_due(); });
      run->unpin();
    });
  }
}

InChannel& Engine::in_channel_locked(ChannelKey key) {
  const auto it = in_.find(key);
  if (it != in_.end()) return *it->second;
  auto channel = std::make_unique<InChannel>(
      transport_, key.second, key.first,
      [this](const std::shared_ptr<Run>& run, const RecvOp& op) { forward(run, op); }, failure_);
  return *in_.emplace(key, std::move(channel)).first->second;
}

OutChannel& Engine::out_channel_locked(ChannelKey key) {
  const auto it = out_.find(key);
  if (it != out_.end()) return *it->second;
  auto channel = std::make_unique<OutChannel>(transport_, key.second, key.first, failure_);
  return *out_.emplace(key, std::move(channel)).first->second;
}

LocalInChannel& Engine::local_channel_locked(ChannelKey key) {
  const auto it = local_in_.find(key);
  if (it != local_in_.end()) return *it->second;
  auto channel = std::make_unique<LocalInChannel>(
      local_, key.second, [this](const std::shared_ptr<Run>& run, const RecvOp& op) { forward(run, op); },
      failure_);
  return *local_in_.emplace(key, std::move(channel)).first->second;
}

void Engine::forward(const std::shared_ptr<Run>& run, const RecvOp& op) {
  for (const int32_t send : op.forwards) {
    const SendOp& out = run->program().sends[static_cast<size_t>(send)];
    if (out.local) {
      send_local(*local_, run, out, failure_);
      continue;
    }
    // Position, not pointer: the entry moves up in its channel as others go.
    const SendTicket& ticket = run->send_tickets[static_cast<size_t>(send)];
    ticket.channel->mark_ready(ticket.position);
  }
}

// A caller may keep thousands that have ended: a look at all of them with each start would cost more than the
// start.
void Engine::forget_ended_runs_locked() {
  std::erase_if(runs_, [](const std::weak_ptr<Run>& weak) {
    const auto run = weak.lock();
    return !run || run->ended();
  });
  look_at_runs_ = 2 * runs_.size() + 16;
}

void Engine::fail(std::exception_ptr error) {
  std::vector<std::shared_ptr<Run>> runs;
  std::shared_ptr<LocalTransport> local;
  {
    const std::lock_guard lock(mutex_);
    if (!error_) error_ = std::move(error);
    for (const auto& weak : runs_) {
      if (auto run = weak.lock()) runs.push_back(std::move(run));
    }
    for (auto& [key, channel] : in_) channel->close();
    for (auto& [key, channel] : out_) channel->close();
    for (auto& [key, channel] : local_in_) channel->close();
    error = error_;
    local = local_;
  }
  transport_->abort();
  if (local) local->abort();
  // Without the lock: a run that ends calls back into its users.
  for (const auto& run : runs) run->fail(error);
}

std::exception_ptr Engine::error() const {
  const std::lock_guard lock(mutex_);
  return error_;
}

std::vector<std::shared_ptr<Run>> Engine::in_flight() {
  std::vector<std::shared_ptr<Run>> out;
  const std::lock_guard lock(mutex_);
  for (const auto& weak : runs_) {
    auto run = weak.lock();
    if (run && !run->ended()) out.push_back(std::move(run));
  }
  return out;
}

void Engine::check_local_peers() {
  std::shared_ptr<LocalTransport> local;
  {
    const std::lock_guard lock(mutex_);
    local = local_;
  }
  if (local) local->check_peers();
}

void Engine::shutdown(std::exception_ptr error) {
  {
    const std::lock_guard lock(mutex_);
    if (closed_) return;
    closed_ = true;
  }
  fail(std::move(error));
  admission_.close();  // what they still hand out would find nobody to end it
  work_->drain(this);
  // No start() can add channels any longer. All messages end before any channel goes: arrivals use the senders,
  // and a thread that hears of a failure at this moment closes every channel.
  transport_->shutdown();
  if (local_) local_->shutdown();
  std::shared_ptr<LocalTransport> local;
  const std::lock_guard lock(mutex_);
  in_.clear();
  out_.clear();
  local_in_.clear();
  local = std::move(local_);
}

}  // namespace meshcast
