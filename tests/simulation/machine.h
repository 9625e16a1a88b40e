#pragma once

#include <algorithm>
#include <charconv>
#include <chrono>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include "common/signals.h"
#include "cpp/run/harness.h"
#include "group/group.h"
#include "group/group_core.h"
#include "group/meeting.h"
#include "group/open_refusals.h"
#include "group/transfer.h"
#include "simulation/scheduler.h"
#include "simulation/world.h"

namespace meshcast::simulation {

// What a group needs of a simulated machine.
class SimulatedConnector final : public Connector {
 public:
  SimulatedConnector(Scheduler& scheduler, Storage& storage, Network& network, GroupIdentity group)
      : scheduler_(scheduler), storage_(storage), network_(network), group_(std::move(group)) {}

  std::shared_ptr<Store> store() override {
    const std::lock_guard lock(mutex_);
    if (!store_) store_ = storage_.connect();
    return store_;
  }
  std::unique_ptr<Joining> join(const std::string& prefix) override {
    return std::make_unique<Way>(*this, prefix);
  }
  std::optional<Error> shortage(const std::exception& /*failure*/) override { return std::nullopt; }

 private:
  class Way final : public Joining {
   public:
    Way(SimulatedConnector& site, std::string prefix) : site_(site), prefix_(std::move(prefix)) {}

    std::string offer() override { return std::to_string(site_.group_.rank); }
    Watch watch(const std::string& offer) override {
      if (!site_.network_.tells()) return {};
      int other = -1;  // not by std::stoi: errno is that of the thread in which all others run, too
      std::from_chars(offer.data(), offer.data() + offer.size(), other);
      return [&network = site_.network_, rank = site_.group_.rank, other] { return network.lost(rank, other); };
    }
    // One that tells needs no more than the offers; else ranks wait for each other, as over gloo.
    std::shared_ptr<GroupCore> connect(const std::map<int32_t, std::string>& /*offers*/, TimePoint deadline,
                                       const std::function<std::optional<LostRank>()>& lost) override {
      const auto transport = site_.network_.join(site_.group_.rank, prefix_);
      sleep_for(std::chrono::microseconds(site_.scheduler_.draw(100, 3000)));
      while (!site_.network_.tells() && site_.network_.joined(prefix_) < site_.group_.ranks.size()) {
        ErrorContext context;
        context.rank = site_.group_.rank;
        if (const auto found = lost()) {
          context.peer = found->rank;
          throw Error(ErrorKind::PeerLost, "lost while ranks connected: " + found->why, context);
        }
        if (Clock::now() >= deadline)
          throw Error(ErrorKind::DeadlineExceeded, "ranks did not connect in time", context);
        sleep_for(std::chrono::milliseconds(5));
      }
      return std::make_shared<GroupCore>(
          transport, std::make_shared<PrefixedStore>(prefix_ + "/control", site_.store()), site_.group_);
    }

   private:
    SimulatedConnector& site_;
    const std::string prefix_;
  };

  Scheduler& scheduler_;
  Storage& storage_;
  Network& network_;
  const GroupIdentity group_;
  Mutex mutex_;
  std::shared_ptr<Store> store_;
};

// The groups of one rank, all of one process group.
class SimulatedSite final : public OpenRefusals::Site {
 public:
  explicit SimulatedSite(Storage& storage) : store_(storage.connect()) {}

  void add(const std::shared_ptr<Group>& group) {
    const std::lock_guard lock(mutex_);
    groups_[group->identity().ranks] = group;
  }
  std::shared_ptr<Store> store() override { return store_; }
  std::shared_ptr<Group> group_of(const std::vector<int32_t>& ranks) override {
    const std::lock_guard lock(mutex_);
    return groups_.at(ranks);
  }

 private:
  const std::shared_ptr<Store> store_;
  Mutex mutex_;
  std::map<std::vector<int32_t>, std::shared_ptr<Group>> groups_;
};

class SimulatedTransfer final : public Transfer {
 public:
  SimulatedTransfer(std::shared_ptr<Group> group, int32_t lane, bool is_shared, CompiledPlans plans)
      : Transfer(std::move(group), lane, is_shared), plans_(std::move(plans)) {}

  const Plan& plan(bool reverse) const { return reverse ? *plans_.reverse : *plans_.forward; }

 private:
  CompiledPlans compile() override { return plans_; }

  const CompiledPlans plans_;
};

// One call of one rank: its tensors, and what is to come of them.
class SimulatedStart final : public Start {
 public:
  SimulatedStart(const std::shared_ptr<SimulatedTransfer>& transfer, double limit, bool refuses)
      : SimulatedStart(transfer, std::make_shared<CallNumber>(), limit, refuses, false) {}
  // Its backward.
  std::shared_ptr<SimulatedStart> backward(const std::shared_ptr<SimulatedTransfer>& transfer,
                                           double limit) const {
    return std::shared_ptr<SimulatedStart>(new SimulatedStart(transfer, number_, limit, false, true));
  }

  const std::shared_ptr<Group>& group() const { return group_; }
  bool is_right() const { return destination_.data == expected_; }
  double ran() const { return run_ ? run_->seconds() : 0; }  // seconds, since it was started; 0: it never was
  // Seconds since `begun` after which it had ended, as far as that is known; else now.
  double took(TimePoint begun) const {
    const TimePoint at = is_settled() && !again_ ? settled_at_ : Clock::now();
    return std::chrono::duration_cast<std::chrono::duration<double>>(at - begun).count() + (again_ ? 0 : ran());
  }
  // As a user's callback; false where it was never started.
  bool call_back(std::function<void()> callback) {
    if (run_) run_->on_end(std::move(callback));
    return run_ != nullptr;
  }

 private:
  SimulatedStart(const std::shared_ptr<SimulatedTransfer>& transfer, std::shared_ptr<CallNumber> number,
                 double limit, bool refuses, bool reverse)
      : Start(transfer, std::move(number), limit, reverse, "reshard"), refuses_(refuses) {
    const Problem& problem = transfer->plan(reverse).problems.front();
    const int32_t rank = transfer->group->identity().rank;
    const Shard source = testing::shard_of(problem.src, problem.shape, rank);
    const Shard destination = testing::shard_of(problem.dst, problem.shape, rank);
    source_ = testing::make_local(source, problem.shape, true);
    destination_ = testing::make_local(destination, problem.shape, false);
    expected_ = testing::make_local(destination, problem.shape, true).data;
  }

  void settled() override { settled_at_ = Clock::now(); }
  void began_again() override { again_ = true; }
  void start(const std::shared_ptr<GroupCore>& core, AgreedPlan& agreed, CallId call, bool reverse,
             double timeout_seconds) override {
    run_ = core->start(agreed, {call.ordinal, reverse, timeout_seconds}, [&](const PlanDirection&) -> Buffers {
      if (refuses_) throw LayoutError("its tensors are wrong");
      Buffers buffers;
      buffers.source = {source_.memory};
      buffers.destination = {destination_.memory};
      buffers.keepalive = shared_from_this();  // one that was given up may start yet
      return buffers;
    });
  }
  void wait_for_work() override {
    // In slices, as real waits are: between two of them those look for signals.
    const auto ends = [this](TimePoint from) {
      const TimePoint limit = from + std::chrono::seconds(60);
      while (!run_->wait_until(std::min<TimePoint>(limit, Clock::now() + kSignalSlice)))
        if (Clock::now() >= limit) return false;
      return true;
    };
    if (!ends(run_->deadline()) && !ends(Clock::now()))  // it may have been frozen meanwhile
      throw Violation(fmt::format("call {} has not ended a minute beyond its limit", *ordinal));
    if (const auto error = run_->error()) std::rethrow_exception(error);
  }
  bool has_ended() override { return run_->ended(); }
  bool has_succeeded() override { return !run_->error(); }

  const bool refuses_;
  testing::LocalTensor source_;
  testing::LocalTensor destination_;
  std::vector<int64_t> expected_;
  std::shared_ptr<meshcast::Run> run_;
  TimePoint settled_at_{};
  bool again_ = false;
};

}  // namespace meshcast::simulation
