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

void make_copies(Run& run, const std::function<void()>& between) {
  const auto& copies = run.program().copies;
  for (const CopyOp& op : copies) run.copy(op, between);
  run.complete_ops(static_cast<int64_t>(copies.size()), 0);
}

// Adds that a start ran out of memory or threads, which the error alone does not show.
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
  // Phase 1: enqueue all operations in their channels, under one lock. Nothing is posted yet, but another run
  // that ends may post them at once.
  const Program* program = &run->program();
  const int32_t lane = run->label().lane;
  const auto& recvs = program->network_recvs_of;
  const auto& sends = program->network_sends_of;
  const auto& local_recvs = program->local_recvs_of;
  std::shared_ptr<LocalTransport> local;
  {
    // Held throughout, so that all channels of a lane see the runs in the same order.
    const std::lock_guard lock(mutex_);
    if (error_) std::rethrow_exception(error_);
    runs_.push_back(run);
    if (runs_.size() > look_at_runs_) forget_ended_runs_locked();
    if (!sends.empty() || !recvs.empty()) run->network = transport_;
    if (!local_recvs.empty() || !program->local_sends.empty()) run->local = local = local_;
    // Before any message: the first that ends releases those of other channels, and a receive that ends at once
    // must find the tickets of its forwards.
    if (!sends.empty()) run->send_tickets.resize(program->sends.size());
    for (const auto& [peer, ops] : sends) run->out_channels.push_back(&out_channel_locked({lane, peer}));
    for (const auto& [peer, ops] : recvs) run->in_channels.push_back(&in_channel_locked({lane, peer}));
    for (const auto& [peer, ops] : local_recvs)
      run->local_in_channels.push_back(&local_channel_locked({lane, peer}));
    for (const LocalSends& local_sends : program->local_sends) {
      int64_t& sent = local_sent_[{lane, local_sends.peer}];
      run->local_positions.push_back(sent);
      sent += local_sends.count;
    }
    for (size_t i = 0; i < sends.size(); ++i) {
      OutChannel& channel = *run->out_channels[i];
      int64_t position = channel.enqueue(run, sends[i].ops);
      for (const int32_t op : sends[i].ops) run->send_tickets[static_cast<size_t>(op)] = {&channel, position++};
    }
    for (size_t i = 0; i < recvs.size(); ++i) run->in_channels[i]->enqueue(run, recvs[i].ops);
    for (size_t i = 0; i < local_recvs.size(); ++i) run->local_in_channels[i]->enqueue(run, local_recvs[i].ops);
  }
  // Phase 2: begin what can begin, without the lock. This thread posts the receives and does what is small; the
  // work thread does long packing and copying.
  for (InChannel* channel : run->in_channels) channel->resume();
  for (size_t i = 0; i < sends.size(); ++i) {
    OutChannel* const channel = run->out_channels[i];
    const auto& [peer, ops] = sends[i];
    const auto send = [program](int32_t op) -> const SendOp& {
      return program->sends[static_cast<size_t>(op)];
    };
    const auto first = std::find_if(ops.begin(), ops.end(), [&](int32_t op) { return !send(op).forward; });
    if (first == ops.end()) continue;
    if (send(*first).nbytes <= kInlineBytes || run->packed(send(*first))) {
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
  if (program->copies_are_small) {
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
    // Position, not pointer: the entry moves up in its channel as others are removed.
    const SendTicket& ticket = run->send_tickets[static_cast<size_t>(send)];
    ticket.channel->mark_ready(ticket.position);
  }
}

// A caller may keep thousands of ended runs: a look at all of them with each start would cost more than the
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
  admission_.close();  // nothing would end what they still hand out
  work_->drain(this);
  // No start() can add channels any longer. All messages end before any channel is destroyed: arrivals use the
  // out channels, and a thread that is notified of a failure at this moment closes every channel.
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
