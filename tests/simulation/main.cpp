// Draws programs of calls and faults, runs them in virtual time, and stops at the first that lacks a property.
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include "simulation/program.h"

namespace {

using namespace meshcast::simulation;

constexpr const char* kUsage =
    "simulate [--programs N] [--seconds S] [--first-seed N] [--jobs J] | --seed N [--shrink]\n"
    "  --programs N    programs to run, default 20000\n"
    "  --seconds S     for so long instead, and at least as many programs as --programs says if that is given\n"
    "  --first-seed N  default 1\n"
    "  --jobs J        processes that share the work, default 1\n"
    "  --seed N        one program: prints it and what came of it\n"
    "  --shrink        makes a program that fails smaller\n";

// In a process of its own: one that fails leaves threads in the middle.
std::string failure_of(const Program& program) {
  int ends[2];
  if (pipe(ends) != 0) return "no pipe";
  std::cout.flush();
  const pid_t child = fork();
  if (child == 0) {
    const std::string text = run_program(program).violation;
    const auto wrote = write(ends[1], text.data(), text.size());
    _exit(wrote < 0);
  }
  close(ends[1]);
  std::string out;
  char buffer[4096];
  for (ssize_t got = 0; (got = read(ends[0], buffer, sizeof(buffer))) > 0;) out.append(buffer, static_cast<size_t>(got));
  close(ends[0]);
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? fmt::format("signal {}", WTERMSIG(status)) : out;
}

// What is taken out of a program, one thing at a time, as long as it still fails.
Program shrink(Program program) {
  const auto try_less = [&](const std::function<void(Program&)>& change) {
    Program less = program;
    change(less);
    if (failure_of(less).empty()) return false;
    program = std::move(less);
    return true;
  };
  for (bool again = true; again;) {
    again = false;
    for (size_t i = program.faults.size(); i-- > 0;)
      again |= try_less([&](Program& p) { p.faults.erase(p.faults.begin() + static_cast<std::ptrdiff_t>(i)); });
    for (size_t i = program.calls.size(); i-- > 0 && program.calls.size() > 1;)
      again |= try_less([&](Program& p) { p.calls.erase(p.calls.begin() + static_cast<std::ptrdiff_t>(i)); });
    for (size_t i = 0; i < program.calls.size(); ++i) {
      for (size_t rank = 0; rank < program.calls[i].acts.size(); ++rank) {
        const Act act = program.calls[i].acts[rank];
        if (act.late > 0) again |= try_less([&](Program& p) { p.calls[i].acts[rank].late = 0; });
        if (!act.waits) again |= try_less([&](Program& p) { p.calls[i].acts[rank].waits = true; });
        if (act.kind != Act::Kind::Calls)
          again |= try_less([&](Program& p) { p.calls[i].acts[rank].kind = Act::Kind::Calls; });
      }
    }
  }
  return program;
}

int show(uint64_t seed, bool shrinks) {
  Program program = draw_program(seed);
  if (shrinks && !failure_of(program).empty()) program = shrink(std::move(program));
  std::cout << describe(program) << std::flush;
  const Outcome outcome = run_program(program);
  for (const auto& [end, count] : outcome.ends) std::cout << "  " << count << " calls of ranks: " << end << "\n";
  std::cout << fmt::format("  {:.3f} s of virtual time, {} hand-overs, {} requests to the store\n", outcome.seconds,
                           outcome.hand_overs, outcome.requests);
  std::cout << (outcome.violation.empty() ? "holds" : "FAILS: " + outcome.violation) << std::endl;
  std::_Exit(outcome.violation.empty() ? 0 : 1);
}

int run(uint64_t first, uint64_t step, uint64_t programs, double seconds) {
  const auto begun = std::chrono::steady_clock::now();
  const auto spent = [&] { return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count(); };
  std::map<std::string, int64_t> ends;
  uint64_t done = 0;
  uint64_t hand_overs = 0;
  double simulated = 0;
  for (uint64_t seed = first; done < programs || spent() < seconds; seed += step, ++done) {
    alarm(120);  // of real time, for one program
    const Outcome outcome = run_program(draw_program(seed));
    if (!outcome.violation.empty()) {
      std::cout << describe(draw_program(seed)) << "FAILS: " << outcome.violation << "\nagain: simulate --seed " << seed
                << " --shrink" << std::endl;
      std::_Exit(1);
    }
    for (const auto& [end, count] : outcome.ends) ends[end] += count;
    hand_overs += outcome.hand_overs;
    simulated += outcome.seconds;
  }
  std::string line = fmt::format("{} programs in {:.1f} s ({:.0f} s of virtual time, {} hand-overs):", done, spent(),
                                 simulated, hand_overs);
  for (const auto& [end, count] : ends) line += fmt::format(" {} {},", count, end);
  line.back() = '\n';
  std::cout << line << std::flush;
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t programs = 20000;
  uint64_t first = 1;
  uint64_t seed = 0;
  uint64_t jobs = 1;
  double seconds = 0;
  bool shrinks = false;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--shrink") {
      shrinks = true;
      continue;
    }
    const char* const value = i + 1 < argc ? argv[++i] : nullptr;
    char* end = nullptr;
    const double number = value ? std::strtod(value, &end) : -1;
    if (!value || *end != 0 || number < 0) {
      std::cerr << kUsage;
      return 2;
    }
    if (option == "--programs") {
      programs = static_cast<uint64_t>(number);
    } else if (option == "--seconds") {
      seconds = number;
    } else if (option == "--first-seed") {
      first = static_cast<uint64_t>(number);
    } else if (option == "--jobs") {
      jobs = std::max<uint64_t>(1, static_cast<uint64_t>(number));
    } else if (option == "--seed") {
      seed = static_cast<uint64_t>(number);
    } else {
      std::cerr << kUsage;
      return 2;
    }
  }
  if (seed != 0) return show(seed, shrinks);
  if (jobs == 1) return run(first, 1, programs, seconds);
  std::vector<pid_t> children;
  for (uint64_t job = 0; job < jobs; ++job) {
    const pid_t child = fork();
    if (child == 0) std::exit(run(first + job, jobs, (programs + jobs - 1) / jobs, seconds));
    children.push_back(child);
  }
  int failed = 0;
  for (const pid_t child : children) {
    int status = 0;
    waitpid(child, &status, 0);
    if (status == 0) continue;
    failed = 1;
    if (WIFSIGNALED(status)) std::cout << "a process ended by signal " << WTERMSIG(status) << std::endl;
  }
  return failed;
}
