#include "c10d/group_core.h"

#include <algorithm>
#include <utility>

#include <fmt/format.h>
#include <fmt/ranges.h>

#include "c10d/c10d_transport.h"
#include "c10d/start_args.h"
#include "c10d/tensor_memory.h"

namespace meshcast {
namespace {

constexpr size_t kCompiledPlans = 128;  // programs kept per group

void check_rails(const Rails& rails, const GroupIdentity& group) {
  const auto count = static_cast<int32_t>(rails.backends.size());
  const bool fits = rails.first_rail.size() == group.ranks.size() &&
                    std::all_of(rails.first_rail.begin(), rails.first_rail.end(),
                                [&](int32_t rail) { return rail >= 0 && rail < count; });
  if (!fits) {
    throw LayoutError(fmt::format("each of the {} ranks of a group needs a rail from 0 to {}, found [{}]",
                                  group.ranks.size(), count - 1, fmt::join(rails.first_rail, ", ")));
  }
}

}  // namespace

class GroupCore::WatchedEngine final : public Watched {
 public:
  explicit WatchedEngine(const std::unique_ptr<Engine>& engine) : engine_(engine) {}

  std::vector<std::shared_ptr<WatchedRun>> in_flight() override {
    const auto runs = engine_->in_flight();
    return {runs.begin(), runs.end()};
  }
  std::exception_ptr error() const override { return engine_->error(); }
  void fail(std::exception_ptr error) override { engine_->fail(std::move(error)); }
  void check_peers() override { engine_->check_local_peers(); }
  void wake_undriven(TimePoint limit) override { engine_->wake_undriven(limit); }

 private:
  const std::unique_ptr<Engine>& engine_;
};

GroupCore::GroupCore(Rails rails, const c10::intrusive_ptr<c10d::Store>& store, GroupIdentity identity,
                     LocalRanks local)
    : identity_(std::move(identity)),
      local_ranks_(std::move(local.ranks)),
      agreement_bulletin_(store),
      bin_(std::make_shared<RecycleBin>()),
      watched_(std::make_unique<WatchedEngine>(engine_)),
      slots_(kSlots) {
  check_rails(rails, identity_);
  const auto me = std::lower_bound(identity_.ranks.begin(), identity_.ranks.end(), identity_.rank);
  engine_ = std::make_unique<Engine>(
      make_c10d_transport(std::move(rails.backends), std::move(rails.first_rail),
                          static_cast<int>(me - identity_.ranks.begin())),
      [this](int peer, const TransportError& error, const std::shared_ptr<Run>& run) {
        watcher_->transport_failed(peer, error, *run);
      },
      std::move(local.transport));
  watcher_ = std::make_unique<Watcher>(*watched_, identity_, store);
}

GroupCore::~GroupCore() { shutdown(); }

int32_t GroupCore::agree_on(CallId call, const std::string& descriptor, double timeout_seconds) {
  refuse_if_failed();
  const std::lock_guard lock(agree_mutex_);
  // The first rank gives the slots, so no two ranks can give one slot to two plans.
  const bool leads = identity_.rank == identity_.ranks.front();
  const std::optional<int32_t> offered = leads ? slots_.next() : -1;
  if (!offered) {
    const std::string text = fmt::format(
        "rank {}: group {} has {} transfers alive, and no more are possible; close some (a Resharder, "
        "a graph that is kept)",
        identity_.rank, identity_.name, kSlots);
    agreement_bulletin_.post(Bulletin::Board::Agreement, call.lane, call.ordinal, identity_.rank,
                             {true, -1, text});
    throw LayoutError(text);
  }
  const int32_t slot = agree(agreement_bulletin_, identity_, call, descriptor, *offered,
                             deadline_after(timeout_seconds), timeout_seconds, [this] { refuse_if_failed(); });
  if (leads) slots_.take(slot);
  // That everybody agreed on this call means that everybody has read what was posted for the one before.
  if (last_agreed_)
    agreement_bulletin_.erase(Bulletin::Board::Agreement, last_agreed_->lane, last_agreed_->ordinal,
                              identity_.rank);
  last_agreed_ = call;
  return slot;
}

void GroupCore::release_slot(int32_t slot) {
  // The first rank's word counts for all: slots are given in turn, so a late rank is through with one long
  // before it comes up again.
  if (identity_.rank == identity_.ranks.front()) slots_.release(slot);
}

void GroupCore::reject(CallId call, const std::string& message) {
  const std::lock_guard lock(agree_mutex_);
  agreement_bulletin_.post(Bulletin::Board::Agreement, call.lane, call.ordinal, identity_.rank,
                           {true, -1, message});
}

std::shared_ptr<const GroupCore::Compiled> GroupCore::compile(const std::shared_ptr<const Plan>& plan) {
  const std::lock_guard lock(mutex_);
  const auto hit =
      std::find_if(compiled_.begin(), compiled_.end(), [&](const auto& entry) { return entry->plan == plan; });
  if (hit != compiled_.end()) {
    compiled_.splice(compiled_.begin(), compiled_, hit);
    return compiled_.front();
  }
  auto entry = std::make_shared<Compiled>();
  entry->plan = plan;
  entry->program =
      std::make_shared<const Program>(project(*plan, identity_.rank, identity_.ranks, local_ranks_));
  entry->tensors = expected_tensors(*plan, identity_.rank);
  compiled_.push_front(entry);
  if (compiled_.size() > kCompiledPlans) compiled_.pop_back();
  return entry;
}

c10::intrusive_ptr<c10d::Work> GroupCore::start(const std::shared_ptr<const Plan>& plan, StartArgs args) {
  bin_->empty();
  refuse_if_failed();
  const auto compiled = compile(plan);
  check_counts(*plan, args);
  Buffers buffers;
  RecycleBin::Bag bag;
  std::vector<at::Tensor> outputs;
  for (size_t i = 0; i < plan->problems.size(); ++i) {
    const int64_t element_bytes = plan->problems[i].element_bytes;
    const auto& src = args.source[i];
    const auto& dst = args.destination[i];
    buffers.source.push_back(source_memory(src, compiled->tensors.source_shapes[i], element_bytes, i));
    buffers.destination.push_back(
        destination_memory(dst, compiled->tensors.destination_shapes[i], element_bytes, i));
    buffers.types.push_back(checked_type(src, compiled->tensors.reductions[i], i));
    refuse_overlap(src, dst, i);
    if (src) bag.tensors.push_back(*src);
    if (dst) bag.tensors.push_back(*dst);
    if (dst) outputs.push_back(*dst);
  }
  // The engine's threads drop it when the run has ended. Tensors may need the GIL to be freed, so they land
  // in the bin.
  buffers.keepalive = bin_->bag(std::move(bag));
  const auto sequence = static_cast<uint64_t>(args.label.ordinal);
  const auto run = start_run(compiled->program, std::move(buffers), std::move(args.label),
                             deadline_after(args.timeout_seconds), args.driven);
  if (!run->ended()) watcher_->wake();
  return c10::make_intrusive<ReshardWork>(identity_.rank, run, bin_, std::move(outputs), sequence);
}

std::shared_ptr<Run> GroupCore::start_run(const std::shared_ptr<const Program>& program, Buffers buffers,
                                          RunLabel label, TimePoint deadline, bool driven) {
  try {
    return engine_->start(program, std::move(buffers), std::move(label), deadline, driven);
  } catch (const Error&) {
    throw;
  } catch (const std::exception& error) {
    // The machine refused a thread or memory, in the middle: the others must not wait for the rest.
    const std::string text =
        fmt::format("rank {}: a call could not be started: {}", identity_.rank, error.what());
    watcher_->abort(text);
    throw raise_context(ErrorKind::Generic, text);
  }
}

void GroupCore::refuse_if_failed() const {
  const auto cause = error();
  if (!cause) return;
  throw raise_context(
      ErrorKind::Aborted,
      fmt::format("rank {}: group {} was aborted by an earlier failure: {}. Destroy the process group and "
                  "build it again.",
                  identity_.rank, identity_.name, *cause));
}

Error GroupCore::raise_context(ErrorKind kind, const std::string& text) const {
  ErrorContext context;
  context.rank = identity_.rank;
  context.op = "reshard";
  context.phase = "start";
  return {kind, text, context};
}

void GroupCore::abort(const std::string& reason) {
  if (!error()) watcher_->abort(reason);
}

std::optional<std::string> GroupCore::error() const {
  const auto error = engine_->error();
  if (!error) return std::nullopt;
  return text_of(error);
}

void GroupCore::shutdown() {
  {
    const std::lock_guard lock(mutex_);
    if (shut_down_) return;
    shut_down_ = true;
  }
  // Before the engine: it still tells the others the first cause, which has to be on the board before
  // connections close.
  watcher_->stop();
  engine_->shutdown(std::make_exception_ptr(raise_context(
      ErrorKind::Aborted, fmt::format("rank {}: group {} was shut down", identity_.rank, identity_.name))));
  {
    const std::lock_guard lock(mutex_);
    compiled_.clear();
  }
  bin_->empty();
}

}  // namespace meshcast
