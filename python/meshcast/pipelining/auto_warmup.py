"""warmup="auto": how many forwards each stage runs before its first backward, chosen by simulation.

A hop between two stages hides its transfers if the stage before it runs two forwards more than the one after
it; with one more, as in 1F1B, they are exposed. Each such hop costs every stage before it the activations of
one micro-batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from meshcast.pipelining.costs import Costs
from meshcast.pipelining.errors import ScheduleError
from meshcast.pipelining.event_simulation import Simulation
from meshcast.pipelining.lower import Link, lower
from meshcast.pipelining.orders import build, spec_of
from meshcast.pipelining.orders.warmup import Warmup

__all__ = ["AutoWarmup", "Budget", "check_budget", "resolve_warmup"]

AutoWarmup = Warmup | Literal["auto"]
Budget = int | Sequence[int] | None


def resolve_warmup(
    warmup: AutoWarmup | None,
    name: str,
    stages: int,
    microbatches: int,
    budget: Budget,
    costs: Costs,
    links: Sequence[Link] | None = None,
    delay_weight_grad: bool = False,
) -> Warmup | None:
    """Returns the warm-up that `build` takes: for "auto" that of each stage, any other as it is.

    For stage i of n it is between n - i and 2(n - i) - 1, within the budget. Hops are tried in the order of
    their transfer times, slowest first; of equally long steps the one that holds the fewest micro-batches is
    taken. Raises ScheduleError if the budget is below what 1F1B holds.
    """
    if not isinstance(warmup, str) or warmup != "auto":
        return warmup
    if not spec_of(name).warmup_by_stage:
        raise ScheduleError(f'warmup="auto" chooses between 1F1B and Eager1F1B, {name} has no such choice')
    limits = _limits(budget, stages)
    for stage, limit in enumerate(limits):
        least = min(microbatches, stages - stage)
        if limit is not None and limit < least:
            raise ScheduleError(
                f"stage {stage}: a memory budget of {limit} micro-batches is below the minimum of {least} "
                f"for {stages} stages and {microbatches} micro-batches"
            )

    def allowed(eager: frozenset[int]) -> bool:
        return all(
            limit is None or min(count, microbatches) <= limit
            for count, limit in zip(_warmups(eager, stages), limits, strict=True)
        )

    def rate(eager: frozenset[int]) -> tuple[float, int]:
        counts = _warmups(eager, stages)
        actions = build("1F1B", stages, microbatches, warmup=counts, delay_weight_grad=delay_weight_grad)
        run = Simulation(lower(actions, links), costs, False, False, None)
        run.run()
        # Rounded: sums of the same times in another order must count as equal.
        return round(max(span.end for span in [*run.timeline, *run.transfers]), 9), sum(counts)

    hops = sorted(range(stages - 1), key=lambda hop: (-costs.of_transfer((hop, hop + 1)), hop))
    best, rated = frozenset[int](), rate(frozenset())
    eager: frozenset[int] = frozenset()
    for hop in hops:
        if allowed(eager | {hop}):
            eager |= {hop}
            if rate(eager) < rated:
                best, rated = eager, rate(eager)
    for hop in sorted(best):
        if rate(best - {hop}) < rated:
            best, rated = best - {hop}, rate(best - {hop})
    return _warmups(best, stages)


def check_budget(budget: Budget, peaks: Sequence[int]) -> None:
    """Raises ScheduleError naming the stage that holds more micro-batches than it may."""
    for stage, (limit, peak) in enumerate(zip(_limits(budget, len(peaks)), peaks, strict=True)):
        if limit is not None and peak > limit:
            raise ScheduleError(
                f"stage {stage} holds the activations of {peak} micro-batches, the memory budget is {limit}; "
                'a shorter warm-up (warmup="auto" finds one) or another schedule needs less'
            )


def _warmups(eager: frozenset[int], stages: int) -> list[int]:
    return [stages - stage + sum(hop >= stage for hop in eager) for stage in range(stages)]


def _limits(budget: Budget, stages: int) -> list[int | None]:
    if budget is None:
        return [None] * stages
    limits = [budget] * stages if isinstance(budget, int) else list(budget)
    if len(limits) != stages or not all(isinstance(limit, int) and limit > 0 for limit in limits):
        raise ScheduleError(
            f"memory_budget must be a number of micro-batches, or one for each of the {stages} stages, "
            f"found {budget!r}"
        )
    return [*limits]
