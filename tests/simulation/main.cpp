// Draws programs of calls and faults, runs them in virtual time, and stops at the first that lacks a property.
#include <algorithm>
#include <array>
#include <chrono>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <iostream>
#include <map>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include "simulation/long_run.h"
#include "simulation/program.h"

namespace {

using namespace meshcast::simulation;

constexpr const char* kUsage =
    "simulate [--programs N] [--seconds S] [--first-seed N] [--jobs J] [--progress] | --seed N [--shrink]\n"
    "         | --crowd N | --generations N\n"
    "  --programs N    programs to run, default 20000\n"
    "  --seconds S     goes on for so long, default 0\n"
    "  --first-seed N  default 1\n"
    "  --jobs J        processes that share the work, default 1\n"
    "  --progress      prints every tenth seed as it comes\n"
    "  --seed N        one program: prints it and what came of it\n"
    "  --shrink        makes a program that fails smaller\n"
    "  --crowd N       so many ranks: what they ask of the store\n"
    "  --generations N       so many generations of a group: what they leave behind\n";

std::string read_all(int fd) {
  std::string out;
  std::array<char, 4096> buffer;
  for (ssize_t got = 0; (got = read(fd, buffer.data(), buffer.size())) > 0;)
    out.append(buffer.data(), static_cast<size_t>(got));
  close(fd);
  return out;
}

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
  const std::string out = read_all(ends[0]);
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
  for (const std::string& line : outcome.calls) std::cout << "  " << line << "\n";
  std::cout << fmt::format("  {:.3f} s of virtual time, {} hand-overs, {} requests to the store\n",
                           outcome.seconds, outcome.hand_overs, outcome.requests);
  std::cout << (outcome.violation.empty() ? "holds" : "FAILS: " + outcome.violation) << std::endl;
  std::_Exit(outcome.violation.empty() ? 0 : 1);
}

int show(const Measured& measured) {
  std::cout << measured.text << "\n"
            << (measured.violation.empty() ? "holds" : "FAILS: " + measured.violation) << std::endl;
  std::_Exit(measured.violation.empty() ? 0 : 1);
}

constexpr const char* kAllRows = "~ all";  // sorts behind the others

// Counts of what was drawn, and of how calls ended then; as lines "row<tab>column<tab>count".
class Table {
 public:
  void add(const std::string& row, const std::string& column, int64_t count) { counts_[row][column] += count; }
  std::string lines() const {
    std::string out;
    for (const auto& [row, columns] : counts_)
      for (const auto& [column, count] : columns) out += fmt::format("{}\t{}\t{}\n", row, column, count);
    return out;
  }
  void add_lines(const std::string& text) {
    std::istringstream in(text);
    std::string row;
    std::string column;
    for (std::string count;
         std::getline(in, row, '\t') && std::getline(in, column, '\t') && std::getline(in, count);)
      add(row, column, std::stoll(count));
  }
  int64_t programs() const {
    const auto all = counts_.find(kAllRows);
    return all == counts_.end() ? 0 : all->second.at("programs");
  }
  void print() const {
    constexpr std::array<const char*, 8> columns{
        "programs",      "success",      "LayoutError",  "PlanMismatchError", "DeadlineExceededError",
        "PeerLostError", "AbortedError", "MeshcastError"};
    std::cout << fmt::format("{:18}", "drawn");
    for (const char* column : columns) std::cout << fmt::format(" {:>{}}", column, width(column));
    std::cout << "\n";
    for (const auto& [row, found] : counts_) {
      std::cout << fmt::format("{:18}", row);
      for (const char* column : columns) {
        const auto it = found.find(column);
        std::cout << fmt::format(" {:>{}}", it == found.end() ? 0 : it->second, width(column));
      }
      std::cout << "\n";
    }
    std::cout << std::flush;
  }

 private:
  static size_t width(const char* column) { return std::max<size_t>(9, std::strlen(column)); }
  std::map<std::string, std::map<std::string, int64_t>> counts_;
};

// Until `programs` and `seconds` are over. False at a program that lacks a property, which it prints.
bool run(uint64_t first, uint64_t step, uint64_t programs, double seconds, bool progress, Table& table) {
  const auto begun = std::chrono::steady_clock::now();
  const auto spent = [&] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  };
  uint64_t done = 0;
  for (uint64_t seed = first; done < programs || spent() < seconds; seed += step, ++done) {
    alarm(120);  // of real time, for one program
    if (progress && done % 10 == 0) std::cout << "at " << seed << std::endl;
    const Program program = draw_program(seed);
    const Outcome outcome = run_program(program);
    if (!outcome.violation.empty()) {
      std::cout << describe(program) << "FAILS: " << outcome.violation << "\nagain: simulate --seed " << seed
                << " --shrink" << std::endl;
      return false;
    }
    auto rows = kinds_of(program);
    rows.emplace_back(kAllRows);
    for (const std::string& row : rows) {
      table.add(row, "programs", 1);
      for (const auto& [end, count] : outcome.ends) table.add(row, end, count);
    }
    table.add(kAllRows, "hand-overs", static_cast<int64_t>(outcome.hand_overs));
  }
  return true;
}

// The same in processes of their own. How many of them found something, or ended by a signal.
int64_t run_beside(uint64_t first, uint64_t jobs, uint64_t programs, double seconds, bool progress,
                   Table& table) {
  std::vector<std::pair<pid_t, int>> children;
  std::cout.flush();
  for (uint64_t job = 0; job < jobs; ++job) {
    int ends[2];
    if (pipe(ends) != 0) return 1;
    const pid_t child = fork();
    if (child == 0) {
      Table mine;
      const bool held = run(first + job, jobs, (programs + jobs - 1) / jobs, seconds, progress, mine);
      const std::string text = mine.lines();
      const auto wrote = write(ends[1], text.data(), text.size());
      std::_Exit(held && wrote == static_cast<ssize_t>(text.size()) ? 0 : 1);
    }
    close(ends[1]);
    children.emplace_back(child, ends[0]);
  }
  int64_t failures = 0;
  for (const auto& [child, end] : children) {
    table.add_lines(read_all(end));
    int status = 0;
    waitpid(child, &status, 0);
    failures += status != 0 ? 1 : 0;
    if (WIFSIGNALED(status)) std::cout << "a process ended by signal " << WTERMSIG(status) << std::endl;
  }
  return failures;
}

}  // namespace

int main(int argc, char** argv) {
  uint64_t programs = 20000;
  uint64_t first = 1;
  uint64_t seed = 0;
  uint64_t jobs = 1;
  double seconds = 0;
  bool shrinks = false;
  bool progress = false;
  for (int i = 1; i < argc; ++i) {
    const std::string option = argv[i];
    if (option == "--shrink") {
      shrinks = true;
      continue;
    }
    if (option == "--progress") {
      progress = true;
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
    } else if (option == "--crowd") {
      return show(run_crowd(static_cast<int>(number)));
    } else if (option == "--generations") {
      return show(run_generations(static_cast<int64_t>(number)));
    } else if (option == "--seed") {
      seed = static_cast<uint64_t>(number);
    } else {
      std::cerr << kUsage;
      return 2;
    }
  }
  if (seed != 0) return show(seed, shrinks);
  const auto begun = std::chrono::steady_clock::now();
  Table table;
  const int64_t failures = jobs == 1 ? (run(first, 1, programs, seconds, progress, table) ? 0 : 1)
                                     : run_beside(first, jobs, programs, seconds, progress, table);
  if (failures == 0) table.print();
  std::cout << fmt::format("{} programs, {} failures; {:.0f} s", table.programs() + failures, failures,
                           std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count())
            << std::endl;
  if (failures > 0) std::_Exit(1);  // threads are in the middle
  return 0;
}
