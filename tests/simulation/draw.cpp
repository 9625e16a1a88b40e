#include <algorithm>
#include <array>
#include <random>
#include <set>

#include <fmt/format.h>

#include "simulation/program.h"

namespace meshcast::simulation {

const char* name_of(Act::Kind kind) {
  constexpr std::array<const char*, 6> names{"calls",       "other arguments", "refuses", "refuses to start",
                                             "never comes", "refuses unread"};
  return names[static_cast<size_t>(kind)];
}

const char* name_of(Fault::Kind kind) {
  constexpr std::array<const char*, 13> names{
      "kill",  "freeze", "cut",  "cut unseen",    "store slow", "store frozen", "store dead",
      "abort", "close",  "hang", "store emptied", "half open",  "interrupt"};
  return names[static_cast<size_t>(kind)];
}

namespace {

// Refusals of calls whose group is not known, drawn beside the rest, in every second program.
void draw_unread(Program& program) {
  if (program.seed % 2 == 0) return;
  std::mt19937_64 rng(program.seed * 0x9E3779B97F4A7C15U + 2);
  const auto one_in = [&rng](uint64_t many) { return rng() % many == 0; };
  for (Call& call : program.calls)
    for (Act& act : call.acts)
      if (act.kind == Act::Kind::Refuses && one_in(2)) act.kind = Act::Kind::RefusesUnread;
  if (program.ranks > Wing::kRanks && one_in(program.joined ? 2 : 6)) {
    program.wing.is_there = true;
    if (one_in(2)) {
      program.wing.refuser = static_cast<int>(rng() % Wing::kRanks);
      program.wing.late = static_cast<int64_t>(rng() % 300000);
    }
  }
  if (!program.joined || !one_in(3)) return;
  // A call that nobody waits for while a rank refuses it: all do, or the others come later.
  const size_t place = rng() % program.calls.size();
  // One that is the only call of a rank that then leaves is told to nobody: it is not known that there is a
  // group.
  const bool all = place == 0 || one_in(2);
  const size_t refuser = rng() % static_cast<uint64_t>(program.ranks);
  Call& call = program.calls[place];
  for (size_t rank = 0; rank < call.acts.size(); ++rank) {
    Act& act = call.acts[rank];
    act = {};
    if (all || rank == refuser)
      act.kind = Act::Kind::RefusesUnread;
    else
      act.late = static_cast<int64_t>(450000 + rng() % 400000);
  }
  for (Call& each : program.calls) each.limit = std::max(each.limit, kLongLimit);
}

Program draw_rest(uint64_t seed) {
  std::mt19937_64 rng(seed * 0x9E3779B97F4A7C15U + 1);
  const auto draw = [&](int64_t low, int64_t high) {
    return low + static_cast<int64_t>(rng() % static_cast<uint64_t>(high - low + 1));
  };
  Program out;
  out.seed = seed;
  out.ranks = draw(1, 200) == 1 ? static_cast<int>(draw(9, 32)) : static_cast<int>(draw(2, 6));
  out.tells = draw(1, 3) != 1;
  if (draw(1, 3) == 1) out.kept = 1;
  const auto calls = static_cast<size_t>(draw(1, 6));
  const int64_t plans = draw(1, 3);
  const bool plain = draw(1, 4) == 1;      // nothing goes wrong
  out.joined = !plain && draw(1, 4) == 1;  // but refusals
  if (out.joined) out.ranks = static_cast<int>(draw(2, 3));
  const bool unlike = !plain && (out.joined || draw(1, 2) == 1);
  const bool all_wait = draw(1, out.joined ? 2 : 3) == 1;
  const bool only_refusals = out.joined || draw(1, 3) == 1;
  for (size_t i = 0; i < calls; ++i) {
    Call call;
    call.plan = static_cast<int>(draw(0, plans - 1));
    call.limit = plain ? 30.0 : 0.5 * static_cast<double>(draw(2, 20));
    for (int rank = 0; rank < out.ranks; ++rank) {
      Act act;
      if (draw(1, 2) == 1) act.late = draw(0, 1) == 1 ? draw(0, 500) : draw(0, 60000);
      if (!plain && !out.joined && draw(1, 40) == 1) act.late = draw(0, 8000000);
      // About when the others give it up.
      if (!plain && !out.joined && draw(1, 60) == 1)
        act.late = std::max<int64_t>(0, static_cast<int64_t>(1e6 * call.limit) + draw(-30000, 30000));
      act.waits = all_wait || draw(1, 3) != 1;
      if (unlike && draw(1, 8) == 1) act.kind = static_cast<Act::Kind>(only_refusals ? draw(2, 3) : draw(1, 4));
      if (act.kind == Act::Kind::NeverComes && draw(1, 4) != 1) act.kind = Act::Kind::Calls;
      call.acts.push_back(act);
    }
    out.calls.push_back(std::move(call));
  }
  // Beside them: calls of other lanes, from threads and callbacks of their own, backwards, and another group.
  if (!unlike && draw(1, 4) == 1) {
    for (int32_t lane = 2; lane < 2 + draw(1, 2); ++lane)
      for (int64_t i = draw(1, 3); i > 0; --i)
        out.sides.push_back(
            {lane, static_cast<int>(draw(0, plans - 1)), plain ? 30.0 : 8.0, draw(0, 1) == 1, draw(0, 40000)});
  }
  out.backwards = !unlike && draw(1, 4) == 1;
  out.again = draw(1, 12) == 1;
  if (plain || out.joined || draw(1, 3) == 1) return out;
  for (int64_t i = draw(1, 2); i > 0; --i) {
    Fault fault;
    fault.kind = static_cast<Fault::Kind>(draw(0, 12));
    fault.at = draw(0, 1) == 1 ? draw(0, 3000) : draw(0, 3000000);
    fault.rank = static_cast<int>(draw(0, out.ranks - 1));
    fault.other = static_cast<int>((fault.rank + draw(1, out.ranks - 1)) % out.ranks);
    fault.lasts = draw(0, 1) == 1 ? draw(0, 20000) : draw(0, 12000000);
    out.faults.push_back(fault);
  }
  return out;
}

}  // namespace

Program draw_program(uint64_t seed) {
  Program out = draw_rest(seed);
  draw_unread(out);
  return out;
}

std::string describe(const Program& program) {
  std::string out = fmt::format("program {}: {} ranks{}\n", program.seed, program.ranks,
                                program.tells ? "" : ", a network that tells nothing");
  if (program.joined) out.insert(out.size() - 1, ", all of which need each other");
  if (program.backwards) out.insert(out.size() - 1, ", backwards");
  if (program.again) out.insert(out.size() - 1, ", a second group");
  if (program.wing.is_there) out.insert(out.size() - 1, ", a wing");
  if (program.wing.refuser >= 0)
    out.insert(out.size() - 1, fmt::format(" that rank {} refuses to prepare, and the other {} us late",
                                           program.wing.refuser, program.wing.late));
  if (program.kept == 1) out.insert(out.size() - 1, ", one agreement kept");
  for (size_t i = 0; i < program.calls.size(); ++i) {
    const Call& call = program.calls[i];
    out += fmt::format("  call {}: plan {}, limit {} s", i, call.plan, call.limit);
    for (size_t rank = 0; rank < call.acts.size(); ++rank) {
      const Act& act = call.acts[rank];
      if (act == Act{}) continue;
      out += fmt::format("; rank {} {}", rank, name_of(act.kind));
      if (act.late > 0) out += fmt::format(" {} us late", act.late);
      if (!act.waits) out += " and goes on";
    }
    out += "\n";
  }
  for (const Side& side : program.sides)
    out += fmt::format("  beside, lane {}: plan {}, limit {} s{}, rank 1 {} us late\n", side.lane, side.plan,
                       side.limit, side.called_back ? ", from a callback" : "", side.late);
  for (const Fault& fault : program.faults)
    out += fmt::format("  at {} us: {} (rank {}, other {}, {} us)\n", fault.at, name_of(fault.kind), fault.rank,
                       fault.other, fault.lasts);
  return out;
}

std::vector<std::string> kinds_of(const Program& program) {
  std::set<std::string> found;
  for (const Fault& fault : program.faults) found.insert(name_of(fault.kind));
  for (const Call& call : program.calls)
    for (const Act& act : call.acts)
      if (act.kind != Act::Kind::Calls) found.insert(name_of(act.kind));
  for (const Side& side : program.sides) found.insert(side.called_back ? "callback" : "lane and thread");
  if (program.backwards) found.insert("backwards");
  if (program.again) found.insert("second group");
  if (program.wing.is_there) found.insert("wing");
  if (program.wing.refuser >= 0) found.insert("refuses to prepare");
  if (found.empty()) return {"nothing"};
  return {found.begin(), found.end()};
}

}  // namespace meshcast::simulation
