"""Plants one fault after the other in a copy of the core, and counts the programs after which the simulation
notices it. Prints a table; exit status 1 where it notices one of them too late, or not at all.

python tests/simulation/mutants.py [--programs 20000] [--only NAME ...] [--jobs 2]
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
WHERE = ROOT / "build" / "mutants"  # a copy of what is compiled, and what comes of it
LIMIT = 300  # seconds for the programs of one mutant


class Mutant(NamedTuple):
    """One place of the core, by a text that stands there once, and what stands there instead."""

    name: str
    path: str  # below csrc/core
    before: str
    after: str


MUTANTS = [
    Mutant(
        "start: the watcher is not woken", "group/group_core.cpp", "if (!run->ended()) watcher_->wake();", ""
    ),
    Mutant("refuse: nothing is posted", "group/group_core.cpp", "if (!agreed) reject(call, message);", ""),
    Mutant("board: keys are not erased", "group/group_core.cpp", "if (!each.rejected) erase(each);", ""),
    Mutant(
        "verdict: the second rank overwrites it",
        "group/bulletin.cpp",
        "return decode_cause(store_->compare_set(kCauseKey, std::string(), encode(cause)));",
        "store_->set(kCauseKey, encode(cause));\n  return cause;",
    ),
    Mutant(
        "verdict: a rank takes its own",
        "group/bulletin.cpp",
        "return decode_cause(store_->compare_set(kCauseKey, std::string(), encode(cause)));",
        "store_->compare_set(kCauseKey, std::string(), encode(cause));\n  return cause;",
    ),
    Mutant(
        "agree: a rank is counted twice",
        "group/agreement.cpp",
        "bool all = alike.answer(group.place());",
        "alike.answer(group.place());\n  bool all = alike.answer(group.place());",
    ),
    Mutant(
        "agree: descriptors are not compared",
        "group/agreement.cpp",
        "if (other.rejected || other.text != descriptor) throw",
        "if (other.rejected) throw",
    ),
    Mutant(
        "agree: no back-off",
        "group/agreement.cpp",
        "pause = std::min(pause * 2, crowd * std::chrono::microseconds(20000));",
        "",
    ),
    Mutant(
        "agree: no limit",
        "group/agreement.cpp",
        "const bool late = now >= deadline;",
        "const bool late = false;",
    ),
    Mutant(
        "agree: the first rank's slot is read wrong",
        "group/agreement.cpp",
        "if (posting.rank == first) slot = posting.slot;",
        "if (posting.rank == first) slot = posting.slot + (group.rank & 1);",
    ),
    Mutant(
        "agree: lost ranks are not looked for",
        "group/agreement.cpp",
        "    if (now - started > crowd * kLookForPeers && knows_who_came) {\n",
        "    if (false) {\n",
    ),
    Mutant(
        "agree: nobody hears that another called differently",
        "group/agreement.cpp",
        "  bulletin.object(call.lane, call.ordinal, mine);\n",
        "",
    ),
    Mutant(
        "roll: a rank is never seen",
        "group/roll.cpp",
        "  for (size_t each = first; each < std::min(ranks_, first + kBits); ++each)\n",
        "  for (size_t each = first; each < std::min(ranks_ - ranks_ / 4, first + kBits); ++each)\n",
    ),
    Mutant(
        "group: a call that was refused in the last generation is met for",
        "group/group.cpp",
        "if (!objection || !objection->rejected ||",
        "if (true ||",
    ),
    Mutant(
        "refusals: the refused call goes before itself",
        "group/refusals.cpp",
        "return !backward && call.ordinal < refused.ordinal;",
        "return !backward && call.ordinal <= refused.ordinal;",
    ),
    Mutant("watcher: stalls are not told", "group/watcher.cpp", "  if (fresh) {\n", "  if (false) {\n"),
    Mutant(
        "watcher: deadlines are not looked at",
        "group/watcher.cpp",
        "    if (now < run->deadline() + (unanswered ? milliseconds(0) : kStoreGrace)) continue;",
        "    if (now < run->deadline() + std::chrono::hours(1)) continue;",
    ),
    Mutant(
        "watcher: memory that a request holds is never let go",
        "group/watcher.cpp",
        "      for (const auto& run : runs) run->force_end();",
        "",
    ),
    Mutant(
        "watcher: an ended engine is used",
        "group/watcher.cpp",
        "    if (!inside || failed()) return;\n    const TimePoint now",
        "    if (failed()) return;\n    const TimePoint now",
    ),
    Mutant(
        "watcher: calls behind a refused one outlive their limits",
        "group/watcher.cpp",
        "      late = late || now >= run->deadline();\n",
        "",
    ),
    Mutant(
        "watcher: who is lost names itself",
        "group/watcher.cpp",
        "  return {static_cast<int32_t>(kind), group_.rank, peer_rank,",
        "  return {static_cast<int32_t>(kind), group_.rank, group_.rank,",
    ),
    Mutant(
        "watcher: an error before a refused call is that of the refused one",
        "group/watcher.cpp",
        ": error_before(*run, earlier ? *earlier : *refused)));",
        ": error_of(*refused, group_)));",
    ),
    Mutant(
        "watcher: what a peer told as it left is not read",
        "group/watcher.cpp",
        "error.told().empty() ? describe",
        "true ? describe",
    ),
    Mutant("run: nobody is woken by its end", "run/run_state.cpp", "  changed_.notify_all();\n", ""),
    Mutant(
        "run: a receive counts twice",
        "run/channel_in.cpp",
        "  run->complete_ops(1, op.nbytes);\n",
        "  run->complete_ops(2, op.nbytes);\n",
    ),
    Mutant(
        "run: a send keeps its pin",
        "run/channel_out.cpp",
        "  run->complete_ops(1, 0, op.nbytes);\n  run->unpin();\n",
        "  run->complete_ops(1, 0, op.nbytes);\n",
    ),
    Mutant(
        "channel: both ends of a pair count differently",
        "run/channel_in.cpp",
        "message_key(entry.run->label(), first_++)",
        "message_key(entry.run->label(), entry.run->label().ordinal == 2 ? first_ : first_++)",
    ),
    Mutant(
        "channel: what arrives makes no room",
        "run/channel_in.cpp",
        "    const std::lock_guard lock(mutex_);\n    --posted_;\n",
        "    const std::lock_guard lock(mutex_);\n",
    ),
    Mutant(
        "channel: a forward is marked and not sent",
        "run/channel_out.cpp",
        "].state = State::Ready;\n  }\n  pump();\n",
        "].state = State::Ready;\n  }\n",
    ),
    Mutant(
        "engine: a failure leaves the transport going",
        "run/engine.cpp",
        "  transport_->abort();\n",
        "",
    ),
    Mutant(
        "engine: runs of a failed group are not ended",
        "run/engine.cpp",
        "  for (const auto& run : runs) run->fail(error);\n",
        "",
    ),
    Mutant(
        "work: a wake-up is lost",
        "run/work_thread.cpp",
        "  if (!urgent && !asleep_) return;\n",
        "  if (!urgent) return;\n",
    ),
    Mutant(
        "work: a tick that is over is not told",
        "run/work_thread.cpp",
        "    turn_ = nullptr;\n    changed_.notify_all();\n",
        "    turn_ = nullptr;\n",
    ),
    Mutant(
        "admission: closing does not wait",
        "run/admission.h",
        "    left_.wait(lock, [this] { return inside_ == 0; });\n",
        "",
    ),
    Mutant(
        "reporters: a report is kept back for good",
        "run/reporters.cpp",
        "if (std::find(wanted.begin(), wanted.end(), who) != wanted.end()) return threads_.call();",
        "if (true) return threads_.call();",
    ),
    Mutant(
        "executor: a lock is not taken again",
        "run/executor.cpp",
        "    state->running.erase(me);\n    if (state->queue",
        "    if (state->queue",
    ),
    Mutant(
        "group: a rank counts a call twice",
        "group/group.cpp",
        "if (!command->ordinal) command->ordinal = ordinals_[command->lane]++;",
        "if (!command->ordinal) {\n    command->ordinal = ordinals_[command->lane]++;\n"
        "    if (identity_.rank == 0 && *command->ordinal == 1) ++ordinals_[command->lane];\n  }",
    ),
    Mutant(
        "group: all lanes count as one",
        "group/group.cpp",
        "if (!command->ordinal) command->ordinal = ordinals_[command->lane]++;",
        "if (!command->ordinal) command->ordinal = ordinals_[0]++;",
    ),
    Mutant(
        "executor: a callback that waits keeps all others",
        "run/executor.cpp",
        "latest = std::max(latest, at.begun + patience);",
        "latest = std::max(latest, at.begun + std::chrono::hours(1));",
    ),
    Mutant(
        "plan: a backward takes the way of its forward",
        "group/agreed_plan.cpp",
        "const auto& found = reverse ? reverse_ : forward_;",
        "const auto& found = forward_;",
    ),
    Mutant(
        "group: two groups of one store share their keys",
        "group/group.cpp",
        'fmt::format("{}/{}", identity_.name, (arrivals - 1)',
        'fmt::format("group/{}", (arrivals - 1)',
    ),
    Mutant(
        "watcher: a rank that stands still does not say so",
        "group/watcher.cpp",
        "    standing.sign(group_.place());\n",
        "",
    ),
    Mutant(
        "watcher: long waits are not noticed",
        "group/watcher.cpp",
        "if (!late) return notify_of_wait(run, standing, now);",
        "if (!late) return;",
    ),
    Mutant(
        "agree: long waits are not noticed",
        "group/agreement.cpp",
        "if (notice.is_due(now))",
        "if (false)",
    ),
    Mutant(
        "meeting: long waits are not noticed",
        "group/meeting.cpp",
        "if (!complete && notice.is_due(now))",
        "if (false)",
    ),
    Mutant(
        "watcher: no thread looks after the store's silence",
        "group/watcher.cpp",
        "if (now < run->deadline() + (unanswered ? milliseconds(0) : kStoreGrace)) continue;",
        "if (now < run->deadline() + kStoreGrace * (unanswered ? 8 : 1)) continue;",
    ),
    Mutant(
        "group: a call overtakes another",
        "group/group.cpp",
        "queue_.push_back(std::move(command));",
        "queue_.push_front(std::move(command));",
    ),
    Mutant(
        "group: nobody begins what came meanwhile",
        "group/group.cpp",
        "if (!queue_.empty()) start_thread(lock);",
        "",
    ),
    Mutant(
        "group: a rank meets for a call that has ended",
        "group/group.cpp",
        "error = std::make_exception_ptr(*ended);",
        "error = nullptr;",
    ),
    Mutant(
        "group: a call that others are done with begins",
        "group/group.cpp",
        "if (first != generation_.first.end() && *command->ordinal < first->second) {",
        "if (first == generation_.first.end() && *command->ordinal < 0) {",
    ),
    Mutant(
        "group: ranks do not say which call they make next",
        "group/group.cpp",
        "if (!refused_) return {};",
        "if (refused_ || !refused_) return {};",
    ),
    Mutant(
        "group: a stale generation",
        "group/group.cpp",
        "origin_of_generations_, ++generations_);",
        "origin_of_generations_, generations_ = 1);",
    ),
    Mutant(
        "group: a call begins again behind later ones",
        "group/group.cpp",
        "return ordinals_[call.lane] == call.ordinal + 1;",
        "return true;",
    ),
    Mutant(
        "transfer: no call begins again",
        "group/transfer.cpp",
        "const bool again = group_->begin_again(shared_from_this(), core);",
        "const bool again = false;",
    ),
    Mutant(
        "transfer: a group goes on without a rank", "group/transfer.cpp", "core->abort(error.what());", ""
    ),
    Mutant(
        "meeting: the second verdict counts",
        "group/conversation.cpp",
        "if (!proposal.empty()) return store_->compare_set(topic, std::string(), proposal);",
        "if (!proposal.empty()) {\n    store_->set(topic, proposal);\n    return proposal;\n  }",
    ),
    Mutant(
        "meeting: no back-off",
        "group/meeting.cpp",
        "pause.sleep(part_.deadline - now);",
        "sleep_for(std::chrono::microseconds(500));",
    ),
    Mutant(
        "open refusals: a call does not take them for its own",
        "group/group.cpp",
        "if (!command->ordinal || command->lane == kNoLane) assume_open();",
        "",
    ),
    Mutant(
        "open refusals: nobody says that it meets",
        "group/open_refusals.cpp",
        "  meetings_[ranks] = prepares;\n  write_meetings();",
        "  meetings_[ranks] = prepares;",
    ),
    Mutant(
        "open refusals: the word that ranks meet stays",
        "group/open_refusals.cpp",
        "if (meetings_.erase(ranks) == 0) return;",
        "if (true) return;",
    ),
    Mutant(
        "open refusals: only ranks that meet are looked for",
        "group/open_refusals.cpp",
        "if (group->is_awaited()) return group;",
        "if (false) return group;",
    ),
    Mutant(
        "open refusals: a generation that is over counts as up",
        "group/open_refusals.cpp",
        "(!refusal.prepares_ && group->is_over())",
        "false",
    ),
    Mutant(
        "open refusals: a rank leaves without a word of them",
        "group/open_refusals.cpp",
        "if (keeps_any_) tell_left();",
        "",
    ),
    Mutant(
        "open refusals: the group that was refused is not the one to prepare",
        "group/open_refusals.cpp",
        "if (each.prepares != refusal.prepares_ || !refusal.fits(ranks)) continue;",
        "if (!refusal.fits(ranks)) continue;",
    ),
    Mutant(
        "open refusals: any group is the one that is known",
        "group/open_refusals.cpp",
        "return std::includes(ranks.begin(), ranks.end(), known_.begin(), known_.end());",
        "return true;",
    ),
    Mutant(
        "close: a refusal that runs is cut off",
        "group/group.cpp",
        "[this] { return !has_refusals(); });",
        "[] { return true; });",
    ),
    Mutant(
        "meeting: no limit",
        "group/meeting.cpp",
        "if (Clock::now() >= part_.deadline) {",
        "if (part_.deadline == TimePoint::min()) {",
    ),
]


def check() -> None:
    """Raises where a text does not stand in its file once."""
    for mutant in MUTANTS:
        count = (ROOT / "csrc/core" / mutant.path).read_text().count(mutant.before)
        if count != 1:
            raise SystemExit(
                f"{mutant.name}: its text stands {count} times in csrc/core/{mutant.path}, not once"
            )


def copy_tree() -> None:
    """What the simulation is compiled of. Files that are as they were keep their times."""
    for part in (
        "CMakeLists.txt",
        "cmake",
        "csrc",
        "python/meshcast/_version.py",
        "tests/simulation",
        "tests/cpp/run",
        "tests/cpp/support",
    ):
        source, target = ROOT / part, WHERE / "tree" / part
        target.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-rpuT", str(source), str(target)], check=True)
    for path in {mutant.path for mutant in MUTANTS}:  # one that was left changed
        shutil.copy(ROOT / "csrc/core" / path, WHERE / "tree/csrc/core" / path)


def build(jobs: int) -> str:
    """Compiles it. Returns what the compiler said where it failed."""
    done = subprocess.run(
        ["cmake", "--build", str(WHERE / "build"), f"-j{jobs}", "--target", "meshcast_simulate"],
        capture_output=True,
        text=True,
    )
    return done.stdout[-2000:] if done.returncode else ""


def simulate(programs: int) -> tuple[int | None, str]:
    """The program at which it failed, counted from 1, and why; None where all had their properties."""
    command = [str(WHERE / "build/meshcast_simulate"), "--programs", str(programs), "--progress"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, errors="replace")
        said, status = done.stdout + done.stderr, done.returncode
    except subprocess.TimeoutExpired as late:
        said, status = (late.stdout or b"").decode(errors="replace"), 124
    reached = re.findall(r"^at (\d+)$", said, re.MULTILINE)
    failed = re.search(r"again: simulate --seed (\d+)", said)
    why = re.search(r"^FAILS: (.*)", said, re.MULTILINE)
    if status == 0:
        return None, ""
    if failed:
        return int(failed[1]), why[1] if why else ""
    return int(reached[-1]) if reached else 0, "ends by a signal" if status != 124 else "does not end"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--programs", type=int, default=20000)
    parser.add_argument("--only", nargs="*", help="names, or parts of them")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument(
        "--check", action="store_true", help="only whether each text still stands in its file"
    )
    given = parser.parse_args()
    check()
    if given.check:
        return 0
    copy_tree()
    configure = [
        "cmake",
        "-S",
        str(WHERE / "tree"),
        "-B",
        str(WHERE / "build"),
        "-G",
        "Ninja" if shutil.which("ninja") else "Unix Makefiles",
    ]
    options = ["-DCMAKE_BUILD_TYPE=Release", "-DCMAKE_CXX_FLAGS_RELEASE=-O1", "-DMESHCAST_BUILD_MODULE=OFF"]
    options += ["-DMESHCAST_UNITY=OFF", "-DMESHCAST_CUDA=OFF", f"-DPython_EXECUTABLE={sys.executable}"]
    subprocess.run(configure + options, check=True, stdout=subprocess.DEVNULL)
    if text := build(given.jobs):
        raise SystemExit(text)
    missed = 0
    print("| fault | file | found by program | as | s |\n|---|---|--:|---|--:|", flush=True)
    for mutant in MUTANTS:
        if given.only and not any(part in mutant.name for part in given.only):
            continue
        path = WHERE / "tree/csrc/core" / mutant.path
        whole = path.read_text()
        begun = time.monotonic()
        try:
            path.write_text(whole.replace(mutant.before, mutant.after))
            if text := build(given.jobs):
                raise SystemExit(f"{mutant.name}: {text}")
            found, why = simulate(given.programs)
        finally:
            path.write_text(whole)
        missed += found is None
        at = "NOT FOUND" if found is None else str(found)
        print(
            f"| {mutant.name} | {mutant.path} | {at} | {why[:90]} | {time.monotonic() - begun:.0f} |",
            flush=True,
        )
    print(f"\n{missed} not found" if missed else "\nall found")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
