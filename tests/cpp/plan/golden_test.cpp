#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>

#include "catch.h"
#include "plan/cases.h"

using namespace meshcast;
using namespace meshcast::testing;

namespace {

std::string box_text(const Box& box) {
  std::string out;
  for (int d = 0; d < box.ndim; ++d)
    out += (d ? "," : "") + std::to_string(box.lo[d]) + ":" + std::to_string(box.hi[d]);
  return "[" + out + "]";
}

std::string ranks_text(const std::vector<int32_t>& ranks) {
  std::string out;
  for (const int32_t r : ranks) out += (out.empty() ? "" : " ") + std::to_string(r);
  return out;
}

// What a change of the planner would change: small enough to read, and the hash covers the rest.
std::string summary(const Plan& plan) {
  std::ostringstream out;
  out << "  " << to_string(plan.strategy) << ": makespan_ns " << plan.makespan_ns << " lower_bound_ns "
      << plan.lower_bound_ns << " chunks " << plan.chunks.size() << " hops " << plan.hops.size() << " hash "
      << plan.hash << "\n";
  for (size_t i = 0; i < std::min<size_t>(4, plan.hops.size()); ++i) {
    const Hop& hop = plan.hops[i];
    const ChunkPiece& piece =
        plan.pieces[static_cast<size_t>(plan.chunks[static_cast<size_t>(hop.chunk)].piece_begin)];
    out << "    " << hop.src << " -> " << hop.dst << " after " << hop.after << " " << box_text(piece.box)
        << "\n";
  }
  return out.str();
}

std::string render(const NamedCase& c) {
  std::ostringstream out;
  bool first = true;
  for (const Strategy strategy : {Strategy::SendRecv, Strategy::LocalAllGather, Strategy::GlobalAllGather,
                                  Strategy::Broadcast, Strategy::Multicast}) {
    const Plan plan = make_plan({c.problem}, c.topology, {strategy, Balance::Search});
    if (first) {
      out << c.name << ": " << describe(c.problem.src) << " -> " << describe(c.problem.dst) << "\n";
      for (size_t t = 0; t < std::min<size_t>(4, plan.tasks.size()); ++t) {
        const Task& task = plan.tasks[t];
        out << "  task " << t << " of " << plan.tasks.size() << " " << box_text(task.box) << " " << task.nbytes
            << " bytes from " << ranks_text(task.holders) << " to " << ranks_text(task.receivers) << "\n";
      }
      first = false;
    }
    out << summary(plan);
  }
  return out.str();
}

}  // namespace

// MESHCAST_UPDATE_GOLDEN=1 writes the file again: look at the difference before committing it.
TEST_CASE("the plans of the paper's cases are as recorded", "[plan][golden]") {
  const std::filesystem::path file = std::filesystem::path(MESHCAST_GOLDEN_DIR) / "paper_cases.txt";
  std::string now;
  for (const NamedCase& c : paper_cases()) now += render(c);
  if (std::getenv("MESHCAST_UPDATE_GOLDEN") != nullptr) {
    std::ofstream(file) << now;
  }
  std::ifstream in(file);
  REQUIRE(in.good());
  std::ostringstream before;
  before << in.rdbuf();
  std::istringstream a(before.str());
  std::istringstream b(now);
  std::string line_a, line_b;
  for (int line = 1; std::getline(b, line_b); ++line) {
    REQUIRE(std::getline(a, line_a));
    INFO("line " << line);
    CHECK(line_a == line_b);
  }
  CHECK_FALSE(std::getline(a, line_a));
}
