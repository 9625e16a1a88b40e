"""Whether each step of a job was done once, by all ranks alike, and as in one process."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from .lines import Line

ALLOWED = 1e-5  # of the loss
_SHOWN = 20


@dataclass
class Verdict:
    """wrong: by step, what is. again: steps that a killed rank alone had told, and that were done again.
    worst: difference of a loss from the expected one. kills, hangs: of the run, as far as it got."""

    steps: int = 0
    wrong: dict[int, list[str]] = field(default_factory=lambda: defaultdict(list))
    again: int = 0
    worst: float = 0.0
    asked: int = 0
    kills: int = 0
    hangs: int = 0

    @property
    def good(self) -> bool:
        return not (self.wrong or self.hangs) and self.kills == self.asked and self.steps > 0

    def text(self) -> str:
        said = [
            f"step {step}: {each}" for step, all_of_it in sorted(self.wrong.items()) for each in all_of_it
        ]
        more = [f"and {len(said) - _SHOWN} more"] if len(said) > _SHOWN else []
        kills = f"{self.kills} of {self.asked} kills, {self.hangs} hangs, {len(self.wrong)} wrong steps"
        again = f"{self.again} done again that only a killed rank had told"
        worst = f"worst difference of a loss {self.worst:.1e} (allowed {ALLOWED:g})"
        word = "good" if self.good else "BAD"
        return "\n".join([*said[:_SHOWN], *more, f"{word}: {kills} of {self.steps}, {again}, {worst}"])


def check(of: Mapping[int, Sequence[Line]], killed: Collection[int], expected: Sequence[float]) -> Verdict:
    """of: lines by process, until the job was ended; the last step may be cut. killed: processes, also such
    that told nothing. expected: losses, of all steps or more."""
    found = Verdict()
    last = {process: lines[-1]["step"] for process, lines in of.items() if lines}
    found.steps = max(last.values(), default=-1) + 1
    for process, lines in of.items():
        for one, next_one in pairwise(lines):
            if next_one["step"] != one["step"] + 1:
                found.wrong[next_one["step"]].append(f"process {process} told it after step {one['step']}")
        if process not in killed and last[process] < found.steps - 2:
            said = f"process {process} told no later one, and nobody killed it"
            found.wrong[last[process]].append(said)
    by_step: dict[int, dict[str, dict[int, Line]]] = defaultdict(lambda: defaultdict(dict))
    for process, lines in of.items():
        for line in lines:
            by_step[line["step"]][line["group"]][process] = line
    silent = sum(process not in last for process in killed)  # each explains one that is missing, once
    for step in range(found.steps):
        begun = by_step[step].keys() - by_step[step - 1].keys()
        may_explain = silent if begun else 0  # who told nothing was in no group's second step
        silent -= _check_step(step, by_step[step], last, killed, may_explain, found)
        for lines_of_group in by_step[step].values():
            for process, line in lines_of_group.items():
                apart = abs(line["loss"] - expected[step])
                found.worst = max(found.worst, apart)
                if not apart <= ALLOWED:
                    said = f"loss {line['loss']!r} of process {process}, expected {expected[step]!r}"
                    found.wrong[step].append(said)
    return found


def _check_step(
    step: int,
    groups: Mapping[str, Mapping[int, Line]],
    last: Mapping[int, int],
    killed: Collection[int],
    silent: int,
    found: Verdict,
) -> int:
    """How many of those who are missing were killed before they told anything."""
    if not groups:
        found.wrong[step].append("nobody told it")
        return 0
    *before, newest = sorted(groups.values(), key=lambda lines: min(line["time"] for line in lines.values()))
    for those in before:
        # Who was alone to have taken the step, and died with it: that of the others is the one that counts.
        if all(process in killed and last[process] == step for process in those):
            found.again += 1
        else:
            found.wrong[step].append(f"told in {len(groups)} groups of ranks, by processes {sorted(those)}")
            break
    lines = list(newest.values())
    ranks = {line["ranks"] for line in lines}
    places = {line["rank"] for line in lines}
    if len({line["loss"] for line in lines}) > 1:
        found.wrong[step].append(f"losses differ among ranks: {sorted(line['loss'] for line in lines)}")
    if len(ranks) > 1 or len(places) < len(lines) or not places <= set(range(max(ranks))):
        found.wrong[step].append(f"ranks {sorted(line['rank'] for line in lines)} of {sorted(ranks)} told it")
        return 0
    # The rank that was killed in the step, and at the very end those that were stopped in it.
    missing = max(ranks) - len(lines)
    over = step == found.steps - 1
    cut = sum(at == step - 1 and (process in killed or over) for process, at in last.items())
    if over or missing <= cut:
        return 0
    if missing - cut > silent:
        found.wrong[step].append(f"{len(lines)} of {max(ranks)} ranks told it, and {cut} were killed in it")
        return 0
    return missing - cut
