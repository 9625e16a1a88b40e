#include "plan/tables.h"

#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <functional>
#include <map>
#include <set>
#include <string>

#include "catch.h"
#include "plan/random_problems.h"
#include "plan/schedule.h"
#include "run/program.h"

// The tables of docs/benchmarks.md. Hidden: run with `meshcast_tests "[tables]"`, or one of them by name.
using namespace meshcast;
using namespace meshcast::testing;

namespace {

double ratio_of(const Plan& plan) {
  return plan.lower_bound_ns == 0
             ? 1.0
             : static_cast<double>(plan.makespan_ns) / static_cast<double>(plan.lower_bound_ns);
}

// Of this process on its core, so that other work on the machine does not count.
double milliseconds(const std::function<void()>& work) {
  const std::clock_t start = std::clock();
  work();
  return 1e3 * static_cast<double>(std::clock() - start) / CLOCKS_PER_SEC;
}

uint64_t first_seed() {
  const char* text = std::getenv("MESHCAST_FIRST_SEED");
  return text != nullptr ? std::strtoull(text, nullptr, 10) : 1;
}

struct Sample {
  double ratio = 1;
  uint64_t seed = 0;
};

void print_row(const char* name, std::vector<Sample> samples) {
  std::sort(samples.begin(), samples.end(), [](const Sample& a, const Sample& b) { return a.ratio < b.ratio; });
  const auto at = [&](size_t percent) {
    return samples[std::min(samples.size() - 1, samples.size() * percent / 100)].ratio;
  };
  std::printf("| %s | %.3f | %.3f | %.3f | %.3f | %llu |\n", name, at(50), at(90), at(99), samples.back().ratio,
              static_cast<unsigned long long>(samples.back().seed));
  std::fflush(stdout);
}

int64_t pairs() {
  const char* text = std::getenv("MESHCAST_PAIRS");
  return text != nullptr ? std::atoll(text) : 2000;
}

}  // namespace

TEST_CASE("table: the paper's cases", "[.][tables]") {
  std::printf(
      "| case | send_recv | local all-gather | broadcast none | size | greedy | search | bound "
      "| send_recv | local_all_gather | global_all_gather | broadcast | multicast | multicast / bound | ms "
      "|\n");
  for (const NamedCase& c : paper_cases()) {
    const double unit = tensor_seconds(c.problem) * 1e9;
    std::printf("| %s | %.2f | %.2f |", c.name.c_str(), nic_bound(c, Strategy::SendRecv),
                nic_bound(c, Strategy::LocalAllGather));
    for (const Balance b : {Balance::None, Balance::Size, Balance::Greedy, Balance::Search})
      std::printf(" %.3f |", paper_time(c, b));
    Plan plan;
    const double ms = milliseconds([&] { plan = make_plan({c.problem}, c.topology, {Strategy::Multicast}); });
    std::printf(" %.3f |", static_cast<double>(plan.lower_bound_ns) / unit);
    for (const Strategy s :
         {Strategy::SendRecv, Strategy::LocalAllGather, Strategy::GlobalAllGather, Strategy::Broadcast}) {
      const Plan other = make_plan({c.problem}, c.topology, {s, Balance::Search});
      std::printf(" %.3f |", static_cast<double>(other.makespan_ns) / unit);
    }
    std::printf(" %.3f | %.4f | %.1f |\n", static_cast<double>(plan.makespan_ns) / unit, ratio_of(plan), ms);
  }
}

TEST_CASE("table: random pairs", "[.][tables]") {
  const std::vector<std::pair<const char*, PlanOptions>> kinds{
      {"send_recv", {Strategy::SendRecv}},
      {"local_all_gather", {Strategy::LocalAllGather}},
      {"global_all_gather", {Strategy::GlobalAllGather}},
      {"broadcast, balance none", {Strategy::Broadcast, Balance::None}},
      {"broadcast, balance size", {Strategy::Broadcast, Balance::Size}},
      {"broadcast, balance greedy", {Strategy::Broadcast, Balance::Greedy}},
      {"broadcast, balance search", {Strategy::Broadcast, Balance::Search}},
      {"multicast", {Strategy::Multicast}},
      {"auto", {Strategy::Auto}}};
  std::printf("| strategy | median | p90 | p99 | worst | seed of the worst |\n");
  const auto last = first_seed() + static_cast<uint64_t>(pairs());
  std::map<uint64_t, int64_t> best_ns;  // of the paper's strategies, by seed
  for (const auto& [name, options] : kinds) {
    std::vector<Sample> samples, beside;
    for (uint64_t seed = first_seed(); seed < last; ++seed) {
      Random random(seed);
      const RandomCase c = random_case(random, 300'000'000, false);
      const Plan plan = make_plan({c.problem}, c.topology, options);
      samples.push_back({ratio_of(plan), seed});
      int64_t& best = best_ns.try_emplace(seed, plan.makespan_ns).first->second;
      if (options.strategy == Strategy::Auto && best > 0)
        beside.push_back({static_cast<double>(plan.makespan_ns) / static_cast<double>(best), seed});
      if (options.strategy != Strategy::Auto && options.strategy != Strategy::Multicast)
        best = std::min(best, plan.makespan_ns);
    }
    print_row(name, samples);
    if (!beside.empty()) print_row("auto / best of the paper's", beside);
    if (options.strategy != Strategy::Auto) continue;
    const auto above = [&](double most) {
      return std::count_if(samples.begin(), samples.end(), [&](const Sample& s) { return s.ratio > most; });
    };
    std::printf("auto: %td above 1.05, %td above 1.10\n", above(1.05), above(1.10));
  }
}

TEST_CASE("table: Partial sources", "[.][tables]") {
  std::vector<Sample> samples;
  double all_ms = 0;
  double most_ms = 0;
  for (uint64_t seed = first_seed(); seed < first_seed() + static_cast<uint64_t>(pairs()) / 5; ++seed) {
    Random random(seed);
    const RandomCase c = random_case(random, 300'000'000, false, true);
    Plan plan;
    const double ms = milliseconds([&] { plan = make_plan({c.problem}, c.topology, {}); });
    all_ms += ms;
    most_ms = std::max(most_ms, ms);
    samples.push_back({ratio_of(plan), seed});
  }
  std::printf("| strategy | median | p90 | p99 | worst | seed of the worst |\n");
  print_row("auto, Partial sources", samples);
  for (const Sample& sample : samples)
    if (sample.ratio > 1.10)
      std::printf("seed %llu: %.3f\n", static_cast<unsigned long long>(sample.seed), sample.ratio);
  std::printf("planned in %.0f ms on average, %.0f ms at most\n", all_ms / static_cast<double>(samples.size()),
              most_ms);
}

TEST_CASE("table: planning time", "[.][tables]") {
  const Placement R = kReplicate;
  const Placement S0 = shard(0), S1 = shard(1);
  std::vector<Problem> gpt;  // 24 layers of a 1.3B GPT and its embeddings, 300 tensors
  for (int layer = 0; layer < 24; ++layer) {
    for (const auto& [shape, p] : std::vector<std::pair<std::vector<int64_t>, Placement>>{{{2048}, R},
                                                                                          {{2048}, R},
                                                                                          {{6144, 2048}, S0},
                                                                                          {{6144}, S0},
                                                                                          {{2048, 2048}, S1},
                                                                                          {{2048}, R},
                                                                                          {{2048}, R},
                                                                                          {{2048}, R},
                                                                                          {{8192, 2048}, S0},
                                                                                          {{8192}, S0},
                                                                                          {{2048, 8192}, S1},
                                                                                          {{2048}, R}}) {
      gpt.push_back({shape, 2, layout({2, 4}, 0, {R, p}), layout({4, 2}, 8, {R, p})});
    }
  }
  for (int part = 0; part < 12; ++part)
    gpt.push_back({{4267, 2048}, 2, layout({2, 4}, 0, {R, S0}), layout({4, 2}, 8, {R, S0})});
  struct Row {
    const char* name;
    std::vector<Problem> problems;
    int64_t ranks;
  };
  const auto one = [](Layout src, Layout dst) {
    return std::vector<Problem>{{{16384, 16384}, 2, std::move(src), std::move(dst)}};
  };
  const std::vector<Row> rows{
      {"512 to 512 ranks, RS1 to RS1", one(layout({64, 8}, 0, {R, S1}), layout({32, 16}, 512, {R, S1})), 1024},
      {"512 to 512 ranks, S0S1 to S0S1", one(layout({64, 8}, 0, {S0, S1}), layout({32, 16}, 512, {S0, S1})),
       1024},
      {"4096 to 4096 ranks, RS1 to RS1", one(layout({512, 8}, 0, {R, S1}), layout({256, 16}, 4096, {R, S1})),
       8192},
      {"4096 to 4096 ranks, S0S1 to S0S1",
       one(layout({512, 8}, 0, {S0, S1}), layout({256, 16}, 4096, {S0, S1})), 8192},
      {"1 to 4096 ranks, replicated", one(layout({1}, 0, {R}), layout({4096}, 1, {R})), 4097},
      {"512 to 512 ranks, rows to columns", one(layout({512}, 0, {S0}), layout({512}, 512, {S1})), 1024},
      {"300 tensors of a 1.3B GPT, (2,4) to (4,2)", gpt, 16}};
  std::printf("| problem | strategy | ms | tasks | hops | makespan / bound |\n");
  for (const Row& row : rows) {
    for (const Strategy s : {Strategy::Auto, Strategy::Multicast}) {
      const Topology topology = uniform_topology(row.ranks - 1, 8, kTenGbit, 1, 8 * kTenGbit, 20'000);
      Plan plan;
      const double ms = milliseconds([&] { plan = make_plan(row.problems, topology, {s}); });
      std::printf("| %s | %s%s | %.0f | %zu | %zu | %.3f |\n", row.name, to_string(s),
                  s == Strategy::Auto ? (std::string(" (") + to_string(plan.strategy) + ")").c_str() : "", ms,
                  plan.tasks.size(), plan.hops.size(), ratio_of(plan));
      std::fflush(stdout);
    }
  }
}

TEST_CASE("table: projection", "[.][tables]") {
  // What one rank keeps of a plan, and how long it takes to find it.
  std::printf("| ranks | rows to | hops of the plan | ms | messages of the rank | its peers | KiB |\n");
  for (const int64_t half : {32, 128, 512}) {
    for (const int dim : {0, 1}) {
      const Problem problem{{16384, 16384},
                            2,
                            layout({half}, 0, {shard(0)}),
                            layout({half}, static_cast<int32_t>(half), {shard(dim)})};
      const Topology topology = uniform_topology(2 * half - 1, 8, kTenGbit, 1, 8 * kTenGbit, 20'000);
      const Plan plan = make_plan({problem}, topology, {});
      Program program;
      const double ms = milliseconds([&] { program = project(plan, 0, plan.ranks); });
      std::set<int32_t> peers;
      size_t bytes = program.parts.size() * sizeof(Part) + program.copies.size() * sizeof(CopyOp);
      for (const SendOp& send : program.sends) {
        bytes += sizeof(SendOp) + send.targets.size() * sizeof(Target);
        for (const Target& target : send.targets) peers.insert(target.peer);
      }
      for (const RecvOp& receive : program.recvs) {
        bytes += sizeof(RecvOp) + receive.forwards.size() * sizeof(int32_t);
        peers.insert(receive.peer);
      }
      std::printf("| %lld | %s | %zu | %.2f | %zu | %zu | %.1f |\n", static_cast<long long>(2 * half),
                  dim == 0 ? "rows" : "columns", plan.hops.size(), ms,
                  program.sends.size() + program.recvs.size(), peers.size(), static_cast<double>(bytes) / 1024);
    }
  }
}
