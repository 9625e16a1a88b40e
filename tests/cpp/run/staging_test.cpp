#include "plan/staging.h"

#include <atomic>
#include <chrono>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "catch.h"
#include "plan/cases.h"
#include "run/harness.h"
#include "run/random_plans.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

constexpr std::chrono::seconds kStagingLimit(60);
constexpr int64_t kChunk = 128;

// Bytes of buffers that are not part of the tensors, as far as a transport is given them.
struct Meter {
  std::vector<const LocalTensor*> tensors;  // set before the run starts
  std::atomic<int64_t> now{0};
  std::atomic<int64_t> peak{0};

  bool is_staging(const void* data) const {
    const auto* at = static_cast<const std::byte*>(data);
    return std::none_of(tensors.begin(), tensors.end(), [&](const LocalTensor* t) {
      return at >= t->memory.data && at < t->memory.data + t->data.size() * sizeof(int64_t);
    });
  }
  void add(int64_t nbytes) {
    const int64_t after = now += nbytes;
    int64_t seen = peak;
    while (after > seen && !peak.compare_exchange_weak(seen, after)) {
    }
  }
};

// Counts what a transport has to stage that wants messages in one piece.
class MeteredTransport final : public PassingTransport {
 public:
  MeteredTransport(std::shared_ptr<Transport> inner, Meter* meter)
      : PassingTransport(std::move(inner)), meter_(meter) {}
  void send(const Envelope& to, int64_t nbytes, std::unique_ptr<Outgoing> message) override {
    PassingTransport::send(to, nbytes, metered(nbytes, std::move(message)));
  }
  void recv(const Envelope& from, int64_t nbytes, std::unique_ptr<Incoming> message) override {
    PassingTransport::recv(from, nbytes, metered(nbytes, std::move(message)));
  }

 private:
  template <typename Kind>
  std::unique_ptr<Kind> metered(int64_t nbytes, std::unique_ptr<Kind> message) {
    const auto* data = message->packed();
    if (data && !meter_->is_staging(data)) return message;
    meter_->add(nbytes);
    // The buffer may be used for another message from its end on.
    return with_end(std::move(message), [meter = meter_, nbytes](const std::function<void()>& tell) {
      meter->now -= nbytes;
      tell();
    });
  }

  Meter* meter_;
};

// All ranks of one plan, their staging metered. Ranks are started one by one.
class MeteredCluster {
 public:
  explicit MeteredCluster(const Plan& plan, int world) : plan_(plan), parts_(static_cast<size_t>(world)) {
    const auto transports = make_loopback(world);
    for (int rank = 0; rank < world; ++rank) {
      group_.push_back(rank);
      meters_.push_back(std::make_unique<Meter>());
      engines_.push_back(std::make_unique<Engine>(
          std::make_shared<MeteredTransport>(transports[static_cast<size_t>(rank)], meters_.back().get()),
          [this, rank](int, const TransportError& error, const std::shared_ptr<Run>&) {
            engines_[static_cast<size_t>(rank)]->fail(std::make_exception_ptr(error));
          },
          nullptr));
    }
  }
  ~MeteredCluster() {
    for (auto& engine : engines_)
      engine->shutdown(std::make_exception_ptr(TransportError(TransportError::Cause::Aborted, "test over")));
  }

  void start(int rank) {
    const Problem& problem = plan_.problems.front();
    RankRun& part = parts_[static_cast<size_t>(rank)];
    const Shard destination = shard_of(problem.dst, problem.shape, rank);
    part.source = make_local(shard_of(problem.src, problem.shape, rank), problem.shape, true);
    part.destination = make_local(destination, problem.shape, false);
    part.expected = make_local(destination, problem.shape, true).data;
    meters_[static_cast<size_t>(rank)]->tensors = {&part.source, &part.destination};
    Buffers buffers;
    buffers.source = {part.source.memory};
    buffers.destination = {part.destination.memory};
    part.run = engines_[static_cast<size_t>(rank)]->start(
        std::make_shared<const Program>(project(plan_, rank, group_)), buffers, label(0),
        Clock::now() + kStagingLimit);
  }
  void finish() {
    for (const RankRun& part : parts_) {
      REQUIRE(part.run->wait_until(Clock::now() + kStagingLimit));
      REQUIRE_FALSE(part.run->error());
      REQUIRE(part.destination.data == part.expected);
    }
  }
  int64_t now(int rank) const { return meters_[static_cast<size_t>(rank)]->now; }
  int64_t peak(int rank) const { return meters_[static_cast<size_t>(rank)]->peak; }
  void wait_for(int rank, int64_t nbytes) const {
    for (const TimePoint end = Clock::now() + kStagingLimit; now(rank) != nbytes && Clock::now() < end;)
      std::this_thread::sleep_for(std::chrono::milliseconds(1));
    REQUIRE(now(rank) == nbytes);
  }

 private:
  const Plan& plan_;
  std::vector<int32_t> group_;
  std::vector<std::unique_ptr<Meter>> meters_;
  std::vector<RankRun> parts_;  // outlive the engines
  std::vector<std::unique_ptr<Engine>> engines_;
};

Plan columns_plan(Layout src, Layout dst) {
  // Two rows of half a line each: strided where a rank has whole lines, contiguous where it has halves.
  return make_plan({{{32, 16}, 8, std::move(src), std::move(dst)}},
                   uniform_topology(2, 1, 1'000'000'000, 1, 8'000'000'000, 1000),
                   {Strategy::SendRecv, Balance::None, kChunk, 0});
}

}  // namespace

TEST_CASE("a sender packs a window of messages ahead, as its plan says", "[exec][staging]") {
  const Plan plan = columns_plan(layout({1}, 0, {kReplicate}), layout({2}, 1, {shard(1)}));
  const std::vector<int64_t> planned = peak_staging(plan);
  CHECK(planned == std::vector<int64_t>{2 * kMessageWindow * kChunk, 0, 0});
  MeteredCluster cluster(plan, 3);
  cluster.start(0);
  cluster.wait_for(0, planned[0]);  // the receivers have posted nothing yet
  cluster.start(1);
  cluster.start(2);
  cluster.finish();
  CHECK(cluster.peak(0) == planned[0]);
  CHECK(cluster.peak(1) == 0);
  CHECK(cluster.peak(2) == 0);
}

TEST_CASE("a receiver posts a window of messages ahead, as its plan says", "[exec][staging]") {
  const Plan plan = columns_plan(layout({2}, 0, {shard(1)}), layout({1}, 2, {kReplicate}));
  const std::vector<int64_t> planned = peak_staging(plan);
  CHECK(planned == std::vector<int64_t>{0, 0, 2 * (kMessageWindow + 1) * kChunk});
  MeteredCluster cluster(plan, 3);
  cluster.start(2);
  cluster.wait_for(2, 2 * kMessageWindow * kChunk);  // one more is for the message that is being unpacked
  cluster.start(0);
  cluster.start(1);
  cluster.finish();
  CHECK(cluster.peak(0) == 0);
  CHECK(cluster.peak(1) == 0);
  CHECK(cluster.peak(2) <= planned[2]);
}

TEST_CASE("no rank stages more than its plan says", "[exec][staging]") {
  const uint32_t seed = 23;
  INFO("seed " << seed);
  std::mt19937 rng(seed);
  int64_t staged = 0;
  for (int round = 0; round < 40; ++round) {
    const int world = 2 + static_cast<int>(rng() % 6);
    const Plan plan = random_plan(rng, world);
    const std::vector<int64_t> planned = peak_staging(plan);
    MeteredCluster cluster(plan, world);
    for (int rank = 0; rank < world; ++rank) cluster.start(rank);
    cluster.finish();
    for (size_t i = 0; i < plan.ranks.size(); ++i) {
      INFO("round " << round << ", rank " << plan.ranks[i] << ": " << describe(plan.problems[0].src) << " -> "
                    << describe(plan.problems[0].dst));
      CHECK(cluster.peak(plan.ranks[i]) <= planned[i]);
      staged += cluster.peak(plan.ranks[i]);
    }
  }
  CHECK(staged > 0);
}
