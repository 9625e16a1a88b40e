#include <string>

#include "catch.h"
#include "plan/cases.h"
#include "plan/network.h"
#include "plan/strategies/paper_model.h"
#include "plan/tables.h"
#include "plan/tasks.h"

using namespace meshcast;
using namespace meshcast::testing;

TEST_CASE("the paper's strategies reproduce the paper's model", "[plan]") {
  // Times in units of the tensor over one NIC, from the host-NIC model: a task holds its hosts until it is
  // done. Columns: plain sends, then broadcast with balance none, size, search.
  struct Row {
    double send_recv, none, size, search, bound;
  };
  const std::vector<Row> rows{
      {2.00, 0.500, 0.500, 0.5, 0.5}, {2.00, 1.000, 0.500, 0.5, 0.5}, {2.00, 0.750, 0.750, 0.5, 0.5},
      {0.50, 0.938, 0.938, 0.5, 0.5}, {2.00, 1.000, 0.750, 0.5, 0.5}, {2.00, 1.000, 1.000, 0.5, 0.5},
      {8.00, 1.000, 1.000, 1.0, 1.0}, {8.00, 1.000, 1.000, 1.0, 1.0}, {2.00, 0.750, 0.750, 0.5, 0.5}};
  const std::vector<NamedCase> cases = paper_cases();
  for (size_t i = 0; i < rows.size(); ++i) {
    INFO(cases[i].name);
    CHECK(nic_bound(cases[i], Strategy::SendRecv) == Approx(rows[i].send_recv).epsilon(0.002));
    CHECK(paper_time(cases[i], Balance::None) == Approx(rows[i].none).epsilon(0.002));
    CHECK(paper_time(cases[i], Balance::Size) == Approx(rows[i].size).epsilon(0.002));
    CHECK(paper_time(cases[i], Balance::Search) == Approx(rows[i].search).epsilon(0.002));
    CHECK(paper_time(cases[i], Balance::Greedy) >= rows[i].bound - 0.002);
    const Plan plan = make_plan({cases[i].problem}, cases[i].topology, {Strategy::Multicast});
    const double unit = tensor_seconds(cases[i].problem);
    CHECK(static_cast<double>(plan.lower_bound_ns) * 1e-9 / unit == Approx(rows[i].bound).epsilon(0.002));
  }
}

TEST_CASE("multicast is within 2 per cent of the bound on the paper's cases", "[plan]") {
  for (const NamedCase& c : paper_cases()) {
    INFO(c.name);
    const Plan plan = make_plan({c.problem}, c.topology, {Strategy::Multicast});
    CHECK(static_cast<double>(plan.makespan_ns) <= 1.02 * static_cast<double>(plan.lower_bound_ns));
  }
}

TEST_CASE("orders submit every work once, from one of its holders", "[plan]") {
  const NamedCase c = paper_cases()[3];
  const Demand demand = intersect_layouts({c.problem});
  std::vector<int32_t> ranks(16);
  for (int32_t r = 0; r < 16; ++r) ranks[static_cast<size_t>(r)] = r;
  const Network network(c.topology, ranks);
  const std::vector<PaperWork> works =
      paper_works(demand.tasks, bundle_tasks(demand.tasks, {c.problem}), network);
  for (const Balance balance : {Balance::None, Balance::Size, Balance::Greedy, Balance::Search}) {
    const PaperOrder order = solve_paper_order(works, network.host_count(), balance, 7);
    std::vector<int> seen(works.size(), 0);
    for (size_t i = 0; i < order.work.size(); ++i) {
      const PaperWork& work = works[static_cast<size_t>(order.work[i])];
      ++seen[static_cast<size_t>(order.work[i])];
      CHECK(std::count(work.senders.begin(), work.senders.end(), order.sender[i]) == 1);
    }
    CHECK(seen == std::vector<int>(works.size(), 1));
  }
  const PaperOrder a = solve_paper_order(works, network.host_count(), Balance::Greedy, 1);
  CHECK(a.work == solve_paper_order(works, network.host_count(), Balance::Greedy, 1).work);
  CHECK(a.work != solve_paper_order(works, network.host_count(), Balance::Greedy, 2).work);
}
