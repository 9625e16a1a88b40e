// The round schedule: what holds for every plan, and that the checks beside it see mistakes.
#include <algorithm>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "catch.h"
#include "common/error.h"
#include "plan/cases.h"
#include "rounds/cases.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

void check_table(const Plan& plan, const RoundTable& table) {
  REQUIRE(table.of_hop.size() == plan.hops.size());
  std::set<int32_t> used;
  for (size_t i = 0; i < plan.hops.size(); ++i) {
    const Hop& hop = plan.hops[i];
    REQUIRE(table.of_hop[i] >= 0);
    REQUIRE(table.of_hop[i] < table.count);
    used.insert(table.of_hop[i]);
    if (hop.after < 0) continue;
    const auto before = static_cast<size_t>(hop.after);
    const int32_t lag = plan.hops[before].reduce == ReduceOp::None ? 1 : 2;
    REQUIRE(table.of_hop[i] >= table.of_hop[before] + lag);
  }
  // Ranks may leave a round out, all of them only while a reduction is under way.
  REQUIRE(static_cast<int32_t>(used.size()) * 2 >= table.count);
}

void check_random_plans(uint32_t seed, int count) {
  CAPTURE(seed);
  std::mt19937 rng(seed);
  int64_t exchanged = 0;
  for (int number = 0; number < count; ++number) {
    const int world = 3 + 2 * static_cast<int>(rng() % 3);
    CAPTURE(number, world);
    const Plan plan = random_case(rng, world);
    const RoundOptions options = random_options(rng);
    check_table(plan, make_rounds(plan, options));
    const auto ranks = rounds_of_all(plan, world, options);
    REQUIRE(check_exchanges(ranks).empty());
    for (const RankRounds& rounds : ranks) {
      REQUIRE(check_streams(rounds).empty());
      exchanged += static_cast<int64_t>(rounds.messages.size());
      // A round is not worth its launch where a rank has nothing to do in it.
      for (const RoundStep& step : rounds.steps)
        if (step.kind == StepKind::Exchange || step.kind == StepKind::Kernels) REQUIRE(step.begin < step.end);
    }
  }
  CHECK(exchanged > count);
}

}  // namespace

TEST_CASE("random plans become rounds that pair up and end, ordered by events", "[rounds]") {
  check_random_plans(GENERATE(1U, 2U), 150);
}

TEST_CASE("very many random plans become rounds", "[rounds][.][slow]") {
  check_random_plans(GENERATE(11U, 12U, 13U, 14U), 1500);
}

TEST_CASE("a rank forwards a chunk while it receives the next", "[rounds]") {
  const int world = 5;
  const Plan plan = chain_plan(world, 64 * 20, 512);  // 20 chunks
  REQUIRE(plan.chunks.size() == 20);
  RoundOptions options;
  options.round_ns = 1;  // a hop a round
  const auto ranks = rounds_of_all(plan, world, options);
  CHECK(make_rounds(plan, options).count == 20 + world - 2);
  int relays = 0;
  for (const RankRounds& rounds : ranks) {
    const auto exchanges = exchanges_of(rounds);
    int both = 0;
    for (const RoundStep& step : exchanges) {
      if (step.end - step.begin != 2) continue;
      const RoundMessage& first = rounds.messages[static_cast<size_t>(step.begin)];
      const RoundMessage& second = rounds.messages[static_cast<size_t>(step.begin) + 1];
      both += first.send != second.send;
    }
    if (both == 0) continue;
    ++relays;
    CHECK(both == 19);
    CHECK(exchanges.size() == 21);
    // Contiguous chunks go from tensor to tensor.
    CHECK(rounds.kernels.empty());
    CHECK(rounds.staging_bytes == 0);
  }
  CHECK(relays == world - 2);
}

TEST_CASE("the cost model weighs the fill of a chain against launches", "[rounds]") {
  const Plan plan = chain_plan(6, 64 * 200, 512);
  const int64_t hop_ns = 512;  // 512 bytes at 10^9 bytes/s
  for (const int64_t group_ns : {0, 20'000, 1'000'000}) {
    CAPTURE(group_ns);
    RoundOptions options;
    options.group_ns = group_ns;
    const RoundTable chosen = make_rounds(plan, options);
    const auto cost = [&](const RoundTable& table) {
      const int64_t round_ns = std::max(table.round_ns / hop_ns, int64_t{1}) * hop_ns;
      return static_cast<double>(table.count) * static_cast<double>(round_ns + group_ns + 1000);
    };
    for (const int64_t round_ns : {hop_ns, 20 * hop_ns, 200 * hop_ns}) {
      RoundOptions other = options;
      other.round_ns = round_ns;
      CHECK(cost(chosen) <= 1.1 * cost(make_rounds(plan, other)));
    }
  }
}

TEST_CASE("rounds inside a host are as long as its real links want them", "[rounds]") {
  Plan plan = chain_plan(6, 64 * 200, 512);
  RoundOptions options;
  options.link_rate = 4'000'000'000;
  // Between hosts the plan's rates are those of NICs.
  CHECK(make_rounds(plan, options).round_ns == make_rounds(plan).round_ns);
  // Inside one, a launch costs four times as much of the time that the plan counts with: its square root.
  plan.topology = uniform_topology(5, 6, 1000000000, 1, 1000000000, 1000);
  const int64_t planned = make_rounds(plan).round_ns;
  CHECK(std::abs(make_rounds(plan, options).round_ns - 2 * planned) <= 2);
  options.link_rate = 900'000'000;  // no less than the plan's
  CHECK(make_rounds(plan, options).round_ns == planned);
}

TEST_CASE("a measured cost of rounds replaces the guess and the latency", "[rounds]") {
  const Plan plan = chain_plan(6, 64 * 200, 512);
  RoundOptions measured;
  measured.measured_ns = 9 * (measured.group_ns + 1000);  // the latency of the chain's topology
  // Rounds are as long as the square root of what one costs.
  const int64_t guessed = make_rounds(plan).round_ns;
  CHECK(std::abs(make_rounds(plan, measured).round_ns - 3 * guessed) <= 2);
  measured.group_ns = 0;
  CHECK(std::abs(make_rounds(plan, measured).round_ns - 3 * guessed) <= 2);
  measured.measured_ns = 0;
  CHECK(make_rounds(plan, measured).round_ns < guessed);
}

TEST_CASE("a round holds one message of a pair where each has its own", "[rounds]") {
  PlanOptions direct;
  direct.strategy = Strategy::SendRecv;
  std::vector<Problem> problems;
  for (int64_t number = 0; number < 12; ++number)  // too large to be joined
    problems.push_back({{(64 << 10) + number}, 1, layout({1}, 0, {kReplicate}), layout({1}, 1, {kReplicate})});
  const Plan plan = make_plan(problems, uniform_topology(1, 1, 1000000000, 1, 1000000000, 1000), direct);
  CHECK(make_rounds(plan).count == 1);
  RoundOptions apart;
  apart.round_ns = 1;
  CHECK(make_rounds(plan, apart).count == 12);
}

TEST_CASE("staging is bounded however long the tensor", "[rounds]") {
  // Columns to rows: every box is strided on one side.
  const auto plan_of = [](int64_t rows) {
    PlanOptions options;
    options.chunk_bytes = 1024;  // several rows
    options.strategy = Strategy::Broadcast;
    return make_plan({{{rows, 48}, 8, layout({2}, 0, {shard(1)}), layout({4}, 2, {kReplicate})}},
                     uniform_topology(5, 1, 1000000000, 1, 8000000000, 1000), options);
  };
  RoundOptions options;
  options.staging_bytes = 6 * 2048;
  int64_t most = 0;
  for (const int64_t rows : {40, 400}) {
    CAPTURE(rows);
    for (const RankRounds& rounds : rounds_of_all(plan_of(rows), 6, options)) {
      most = std::max(most, rounds.staging_bytes);
      CHECK(rounds.staging_bytes <= options.staging_bytes + kStagingAlignment);
      CHECK(rounds.events <= 8);
    }
  }
  CHECK(most > 2048);
}

TEST_CASE("every wait is needed, and the check knows which memory it guards", "[rounds]") {
  const auto seed = GENERATE(21U, 22U);
  CAPTURE(seed);
  std::mt19937 rng(seed);
  int dropped = 0;
  for (int number = 0; number < 40; ++number) {
    const int world = 3 + 2 * static_cast<int>(rng() % 3);
    CAPTURE(number, world);
    const Plan plan = random_case(rng, world);
    for (const RankRounds& rounds : rounds_of_all(plan, world, random_options(rng))) {
      for (size_t i = 0; i < rounds.steps.size(); ++i) {
        if (rounds.steps[i].kind != StepKind::Wait) continue;
        RankRounds broken = rounds;
        broken.steps.erase(broken.steps.begin() + static_cast<int64_t>(i));
        CAPTURE(i, rounds.program->rank);
        REQUIRE_FALSE(check_streams(broken).empty());
        ++dropped;
      }
    }
  }
  CHECK(dropped > 500);
}

TEST_CASE("staging that is written one round early is seen", "[rounds]") {
  std::mt19937 rng(31);
  int moved = 0;
  int seen = 0;
  for (int number = 0; number < 40; ++number) {
    const int world = 5;
    const Plan plan = random_case(rng, world);
    RoundOptions options;
    options.round_ns = 1;
    for (const RankRounds& rounds : rounds_of_all(plan, world, options)) {
      // What is received into staging goes where the exchange before, or the same one, received something.
      const auto exchanges = exchanges_of(rounds);
      std::vector<int64_t> before, now;
      for (const RoundStep& step : exchanges) {
        before = std::exchange(now, {});
        for (auto i = static_cast<size_t>(step.begin); i < static_cast<size_t>(step.end); ++i) {
          const RoundMessage& message = rounds.messages[i];
          if (message.send || message.staging < 0) continue;
          before.insert(before.end(), now.begin(), now.end());
          for (const int64_t staging : before) {
            RankRounds broken = rounds;
            broken.messages[i].staging = staging;
            ++moved;
            seen += !check_streams(broken).empty();
          }
          now.push_back(message.staging);
        }
      }
    }
  }
  CHECK(moved > 50);
  CHECK(seen == moved);
}

TEST_CASE("what does not pair up is named", "[rounds]") {
  const Plan plan = chain_plan(3, 64 * 4, 512);
  RoundOptions options;
  options.round_ns = 1;
  const auto good = rounds_of_all(plan, 3, options);
  REQUIRE(check_exchanges(good).empty());
  const auto first = [](const RankRounds& rounds, bool send) -> size_t {
    const auto it = std::find_if(rounds.messages.begin(), rounds.messages.end(),
                                 [send](const RoundMessage& m) { return m.send == send; });
    return static_cast<size_t>(it - rounds.messages.begin());
  };

  SECTION("two sends in the wrong order") {
    auto ranks = good;
    std::swap(ranks[0].messages[0], ranks[0].messages[1]);
    const std::string text = check_exchanges(ranks);
    CAPTURE(text);
    CHECK(text.rfind("rank 0, round 0: sends hop ", 0) == 0);
    CHECK(text.find("receives hop 0 of 512 bytes in its round 0") != std::string::npos);
  }
  SECTION("other sizes") {
    auto ranks = good;
    ranks[1].messages[first(ranks[1], false)].nbytes = 8;
    const std::string text = check_exchanges(ranks);
    CAPTURE(text);
    CHECK(text.find("512 bytes to rank") != std::string::npos);
    CHECK(text.find("of 8 bytes in its round") != std::string::npos);
  }
  SECTION("a send without a receive") {
    auto ranks = good;
    for (RankRounds& rounds : ranks) {
      if (rounds.program->rank != 2) continue;
      const auto last = std::find_if(rounds.steps.rbegin(), rounds.steps.rend(),
                                     [](const RoundStep& step) { return step.kind == StepKind::Exchange; });
      rounds.steps.erase(std::next(last).base());
    }
    const std::string text = check_exchanges(ranks);
    CAPTURE(text);
    CHECK(text.find("rank 2, which has no exchange left") != std::string::npos);
  }
  SECTION("a peer that is not there") {
    auto ranks = good;
    ranks[0].messages[0].peer = 7;
    CHECK(check_exchanges(ranks) == "rank 0, round 0: names peer 7 of 3 ranks");
  }
  SECTION("two ranks that receive before they send") {
    // What rings do without groups: each waits for the other to send first.
    std::vector<RankRounds> ranks(2);
    for (int32_t rank = 0; rank < 2; ++rank) {
      RankRounds& rounds = ranks[static_cast<size_t>(rank)];
      rounds.messages = {{false, 1 - rank, 8, 0, -1, 1 - rank}, {true, 1 - rank, 8, 0, -1, rank}};
      rounds.steps = {{StepKind::Exchange, StreamRole::Transfer, -1, 0, 1, 0},
                      {StepKind::Exchange, StreamRole::Transfer, -1, 1, 2, 1}};
    }
    CHECK(
        check_exchanges(ranks) ==
        "cycle: rank 0, round 0: receives hop 1 from rank 1; rank 1, round 0: receives hop 0 from rank 0; back "
        "to rank 0");
    for (RankRounds& rounds : ranks) rounds.steps = {{StepKind::Exchange, StreamRole::Transfer, -1, 0, 2, 0}};
    CHECK(check_exchanges(ranks).empty());
  }
}

TEST_CASE("rounds of a plan whose hops cannot be done are refused", "[rounds]") {
  Plan plan = chain_plan(3, 64, 512);
  REQUIRE(plan.hops.size() == 2);
  plan.hops[0].after = 1;  // each after the other
  CHECK_THROWS_AS(make_rounds(plan), Error);
  const Plan whole = chain_plan(3, 64, 512);
  const auto program = std::make_shared<const Program>(project(whole, 0, {0, 1, 2}));
  CHECK_THROWS_AS(schedule_rank(whole, make_rounds(whole), 1, program, row_major_forms(whole, 1)), Error);
  TensorForms forms = row_major_forms(whole, 0);
  forms.source[0].element_bytes = 4;
  CHECK_THROWS_AS(schedule_rank(whole, make_rounds(whole), 0, program, forms), Error);
}
