"""The candidates of `choose`: the schedules that fit the placement of the stages, with times by simulation.

All of it is arithmetic on what the ranks have measured: no process group, no tensors.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from meshcast.pipelining.action import ActionKind, Actions, Costs, Link, ScheduleError, lower
from meshcast.pipelining.compat import order_of_torch
from meshcast.pipelining.orders import build
from meshcast.pipelining.simulate import SimulationReport, resolve_warmup, simulate_actions

__all__ = ["Candidate", "Times", "best_of", "candidates", "counts_to_try", "ended", "times_at"]

# Steps that differ by less are taken for equally long: measured times do not tell them apart.
_ALIKE = 0.01
# Micro-batches for each rank of the schedule that are tried at most: a longer step is the same shape.
_MOST_FOR_A_RANK = 16


@dataclass(frozen=True, slots=True)
class Times:
    """The costs of a micro-batch. Lists have an entry for each stage, that of its slowest, or fullest, rank.

    Attributes:
        samples: of the micro-batch, over all ranks.
        forward, backward, inputs, weights: seconds of F, B, I and W.
        transfer: seconds of one micro-batch over each link, the longer of both directions.
        held: bytes from the forward to the backward (of the weights).
        between: bytes more between I and W, which may be less than nothing.
    """

    samples: float
    forward: list[float]
    backward: list[float]
    inputs: list[float]
    weights: list[float]
    transfer: dict[Link, float]
    held: list[float]
    between: list[float]

    def costs(self) -> Costs:
        compute = {
            ActionKind.F: self.forward,
            ActionKind.B: self.backward,
            ActionKind.I: self.inputs,
            ActionKind.W: self.weights,
        }
        return Costs(compute, self.transfer)


def times_at(samples: float, known: Sequence[Times]) -> Times:
    """For a micro-batch of so many samples: on the line through what was measured of two sizes, in
    proportion outside of them; a single one is taken as it is."""
    if len(known) == 1:
        return known[0]
    small, large = known[0], known[-1]
    part = (samples - small.samples) / (large.samples - small.samples)

    def on_line(low: float, high: float) -> float:
        return low + (high - low) * part

    def listed(name: str) -> list[float]:
        return [on_line(*pair) for pair in zip(getattr(small, name), getattr(large, name), strict=True)]

    names = ("forward", "backward", "inputs", "weights", "held")
    lists = {name: [max(0.0, each) for each in listed(name)] for name in names}
    lists["between"] = [max(-held, each) for held, each in zip(lists["held"], listed("between"), strict=True)]
    links = {link: max(0.0, on_line(small.transfer[link], large.transfer[link])) for link in small.transfer}
    return Times(samples=samples, transfer=links, **lists)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with its options, and what the simulation says.

    Attributes:
        schedule: name that `get_schedule_class` takes.
        microbatches: of a step.
        options: keyword arguments of the schedule.
        seconds: of a step; infinite where it cannot run.
        bubble: part of the time of all ranks in which they compute nothing.
        held: for each rank of the schedule, most bytes of activations at once.
        why_not: "" where it can run within the budget.
    """

    schedule: str
    microbatches: int
    options: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = float("inf")
    bubble: float = 0.0
    held: Sequence[float] = ()
    why_not: str = ""

    @property
    def name(self) -> str:
        """With what its options change."""
        warmup = self.options.get("warmup")
        words = [self.schedule]
        if isinstance(warmup, str):
            words.append(f"warm-up {warmup}")
        elif warmup is not None:
            words.append(f"warm-up {' '.join(map(str, warmup))}")
        if self.options.get("delay_weight_grad"):
            words.append("delayed")
        return ", ".join(words)


def counts_to_try(samples: int, ranks: int) -> list[int]:
    """Numbers of micro-batches: as many as ranks of the schedule, and twice that again and again."""
    count = min(samples, ranks)
    found = []
    while count <= min(samples, _MOST_FOR_A_RANK * ranks):
        found.append(count)
        count *= 2
    return found


def candidates(
    rows: Sequence[Sequence[int]],
    counts: Sequence[int],
    samples: int,
    known: Sequence[Times],
    links: Sequence[Link] | None,
    budgets: Sequence[float | None],
    after: Sequence[float] = (),
) -> list[Candidate]:
    """Every schedule that runs these stages where they are, simulated for each number of micro-batches.

    Args:
        rows: the stages of each rank of the schedule, ranks in the order of their first stages.
        counts: numbers of micro-batches. samples: of a batch.
        known: of the sizes that were measured, smallest first.
        budgets: bytes that each rank of the schedule may hold; None: any number.
        after: seconds that each rank of the schedule needs behind its last action; empty: none.

    Raises:
        ScheduleError: no schedule has its stages like that.
    """
    found: list[Candidate] = []
    for count in counts:
        times = times_at(samples / count, known)
        for name, options, actions in _orders(rows, count, times, links, budgets):
            if isinstance(actions, str):
                found.append(Candidate(name, count, options, why_not=actions))
            else:
                found.append(_simulated(name, count, options, actions, times, links, budgets, after))
    if not found:
        raise ScheduleError(
            f"no schedule known here runs stages {[list(row) for row in rows]} together: it needs one stage "
            "on each rank, stage s on rank s mod p, or stages s and 2p - 1 - s on rank s"
        )
    return found


def best_of(found: Sequence[Candidate]) -> Candidate:
    """The fastest; of those that are as fast within what can be measured the one that holds least, and of
    these the first, which is the simplest. Raises ScheduleError with the reasons where none can run."""
    able = [each for each in found if not each.why_not]
    if not able:
        reasons = "; ".join(f"{each.name} with {each.microbatches}: {each.why_not}" for each in found[:8])
        raise ScheduleError(f"no schedule fits: {reasons}")
    least = min(each.seconds for each in able)
    alike = [each for each in able if each.seconds <= least * (1 + _ALIKE)]
    return min(alike, key=lambda each: max(each.held, default=0.0))


_Order = tuple[str, dict[str, Any], "Actions | str"]


def _orders(
    rows: Sequence[Sequence[int]],
    count: int,
    times: Times,
    links: Sequence[Link] | None,
    budgets: Sequence[float | None],
) -> Iterator[_Order]:
    """Name, options and actions of each schedule; instead of actions why there are none."""
    ranks, stages = len(rows), sum(map(len, rows))
    placed = [sorted(row) for row in rows]

    def made(name: str, **options: Any) -> _Order:
        known = {key: value for key, value in options.items() if value is not None and value is not False}
        try:
            placed_on = ranks if name == "Interleaved1F1B" else None
            return name, known, build(name, stages, count, ranks=placed_on, **known)
        except ScheduleError as error:
            return name, known, str(error)

    def of_torch(name: str) -> _Order:
        try:
            return name, {}, order_of_torch(name, stages, ranks, count)
        except (ValueError, AssertionError) as error:
            return name, {}, str(error) or type(error).__name__

    if placed == [[stage] for stage in range(stages)]:
        for delayed in (False, True):
            yield made("GPipe", delay_weight_grad=delayed)
            yield made("1F1B", delay_weight_grad=delayed)
            if stages > 1:
                yield made("Eager1F1B", delay_weight_grad=delayed)
                between = _warmup(stages, count, times, links, budgets, delayed)
                if between is not None:
                    yield made("1F1B", warmup=between, delay_weight_grad=delayed)
        yield made("ZBH1")
        yield made("ZBH2")
    elif placed == [list(range(rank, stages, ranks)) for rank in range(ranks)]:
        for delayed in (False, True):
            for warmup in ("1f1b", "eager"):
                yield made("Interleaved1F1B", warmup=warmup, delay_weight_grad=delayed)
        yield of_torch("LoopedBFS")
        yield of_torch("InterleavedZeroBubble")
    if placed == [[rank, stages - 1 - rank] for rank in range(ranks)]:
        yield made("ZBV")
        yield of_torch("DualPipeV")


def _warmup(
    stages: int,
    count: int,
    times: Times,
    links: Sequence[Link] | None,
    budgets: Sequence[float | None],
    delayed: bool,
) -> list[int] | None:
    """Between 1F1B and Eager1F1B, what the budget allows; None where that is one of the two, or nothing."""
    limits = [
        count if budget is None or not held else max(1, min(count, int(budget // held)))
        for budget, held in zip(budgets, times.held, strict=True)
    ]
    try:
        # The steady state has begun by then, and the search simulates each hop.
        found = resolve_warmup(
            "auto", "1F1B", stages, min(count, 3 * stages), limits, times.costs(), links, delayed
        )
    except ScheduleError:
        return None
    assert isinstance(found, list)
    known = [[stages - stage for stage in range(stages)], [2 * (stages - s) - 1 for s in range(stages)]]
    return None if found in known else found


def _simulated(
    name: str,
    count: int,
    options: Mapping[str, Any],
    actions: Actions,
    times: Times,
    links: Sequence[Link] | None,
    budgets: Sequence[float | None],
    after: Sequence[float],
) -> Candidate:
    held = [_most_held(actions[rank], times) for rank in sorted(actions)]
    over = [rank for rank, limit in enumerate(budgets) if limit is not None and held[rank] > limit]
    why_not = ""
    if over:
        rank = over[0]
        why_not = f"rank {rank} holds {held[rank] / 1e6:.4g} MB, budget {(budgets[rank] or 0.0) / 1e6:.4g} MB"
    report = simulate_actions(lower(actions, links), times.costs())
    return Candidate(name, count, options, ended(report, after), report.bubble_fraction, held, why_not)


def ended(report: SimulationReport, after: Sequence[float]) -> float:
    """The end of the step, if each rank needs so many seconds behind its last action."""
    ends = [0.0] * len(after)
    for span in report.timeline if any(after) else ():
        ends[span.rank] = max(ends[span.rank], span.end)
    return max([report.makespan, *map(sum, zip(ends, after, strict=True))])


def _most_held(row: Sequence[Any], times: Times) -> float:
    """Most bytes at once; a rank's order tells, whatever the times."""
    now = most = 0.0
    for action in row:
        stage = action.stage
        if action.kind is ActionKind.F:
            now += times.held[stage]
        elif action.kind is ActionKind.I:
            now += times.between[stage]
        most = max(most, now)
        if action.kind is ActionKind.B:
            now -= times.held[stage]
        elif action.kind is ActionKind.W:
            now -= times.held[stage] + times.between[stage]
    return most
