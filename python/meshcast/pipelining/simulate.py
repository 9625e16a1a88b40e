"""Simulation of a schedule: how long it takes, what waits, what piles up, where it deadlocks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from meshcast.base.checks import typed_arguments
from meshcast.base.progress import tell
from meshcast.pipelining.action import Action, Actions
from meshcast.pipelining.auto_warmup import AutoWarmup, check_budget, resolve_warmup
from meshcast.pipelining.costs import Costs, Seconds
from meshcast.pipelining.errors import ScheduleError
from meshcast.pipelining.event_simulation import Simulation, Span
from meshcast.pipelining.lower import AHEAD, Link, lower, stage_ranks
from meshcast.pipelining.orders import build, check_size

__all__ = ["SendModel", "SimulationReport", "Span", "simulate", "simulate_actions"]

_LOWERED = 0.45  # of the time of a simulation goes by before its first event
SendModel = Literal["buffered", "rendezvous"]


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """The result of a simulation, in the unit of the times given.

    Attributes:
        makespan: end of the last action or transfer.
        bubble_fraction: 1 - (compute time of all ranks) / (ranks x makespan).
        peak_activations: for each stage, most micro-batches alive at once (forward begun, backward of the
            weights not ended).
        peak_of_ranks: for each rank, most alive at once over its stages together.
        idle: for each rank, the time between its first and its last action in which it computes nothing.
        exposed_fraction: part of ranks x makespan in which a rank did nothing but wait for a value that was
            on its way.
        timeline: compute spans by start time.
        transfers: transfer spans by start time.
    """

    makespan: float
    bubble_fraction: float
    peak_activations: list[int]
    peak_of_ranks: list[int]
    idle: list[float]
    exposed_fraction: float
    timeline: list[Span]
    transfers: list[Span]


@typed_arguments(ScheduleError)
def simulate(
    schedule: str | Mapping[int, Sequence[Action]],
    stages: int | None = None,
    microbatches: int | None = None,
    forward: Seconds = 1.0,
    backward: Seconds = 2.0,
    weight: Seconds | None = None,
    transfer: float | Mapping[Link, float] = 0.0,
    send_model: SendModel = "buffered",
    *,
    links: Sequence[Link] | None = None,
    ahead: int = AHEAD,
    shared_links: bool = False,
    buffers: int | None = None,
    ranks: int | None = None,
    warmup: AutoWarmup | None = None,
    memory_budget: int | Sequence[int] | None = None,
    delay_weight_grad: bool = False,
) -> SimulationReport:
    """Simulates a schedule given by name (with ``stages`` and ``microbatches``) or by its compute actions.

    Args:
        forward, backward: time of F and of B, the whole backward, per micro-batch.
        weight: the part of the backward that W takes where B is split (I takes the rest); default: half of
            it.
        transfer: time of one micro-batch over a link, each direction.
        send_model: "buffered": a transfer starts once its value exists. "rendezvous": also its receive must
            have been posted, and the sender waits for that.
        links: pairs of stages; default: each stage feeds the next.
        ahead: how many compute actions ahead receives are posted, see `lower`.
        shared_links: both directions between two ranks share one slot of bandwidth instead of having one
            each.
        buffers: values of one link and direction that may be on their way or arrived before their receive
            was posted; a sender that finds none free waits. 0: it waits until each value has arrived. None:
            as many as it takes.
        ranks, warmup, delay_weight_grad: as `build` takes them, for a schedule given by name; warmup="auto"
            chooses the warm-up of each stage that makes the step shortest within the budget.
        memory_budget: most micro-batches that a stage may hold activations of, one number or one per stage.

    Raises:
        ScheduleError: unknown name, bad times or options, a budget that does not suffice, or a deadlock, with
            its cycle.

    Example::

        from meshcast.pipelining import simulate

        plain = simulate("1F1B", 4, 16, transfer=0.5)  # stages, micro-batches; a forward takes 1.0
        eager = simulate("Eager1F1B", 4, 16, transfer=0.5, delay_weight_grad=True)
        assert (plain.makespan, eager.makespan) == (71.0, 57.0)
    """
    if buffers is not None and buffers < 0:
        raise ScheduleError(f"buffers must be at least 0, found {buffers}")
    if not isinstance(schedule, str):
        actions = {rank: list(row) for rank, row in schedule.items()}
        costs = Costs.of(len(stage_ranks(actions)), forward, backward, weight, transfer)
    else:
        if stages is None or microbatches is None:
            raise ScheduleError(f"simulate({schedule!r}) needs stages and microbatches")
        check_size(stages, microbatches)
        costs = Costs.of(max(stages, 0), forward, backward, weight, transfer)
        chosen = resolve_warmup(
            warmup, schedule, stages, microbatches, memory_budget, costs, links, delay_weight_grad
        )
        actions = build(
            schedule,
            stages,
            microbatches,
            ranks=ranks,
            warmup=chosen,
            delay_weight_grad=delay_weight_grad,
        )
    lowered = lower(actions, links, ahead)
    report = simulate_actions(
        lowered,
        costs,
        send_model,
        shared_links=shared_links,
        buffers=buffers,
        tell=lambda part: tell(_LOWERED + (1.0 - _LOWERED) * part),
    )
    check_budget(memory_budget, report.peak_activations)
    return report


def simulate_actions(
    actions: Actions,
    costs: Costs,
    send_model: SendModel = "buffered",
    *,
    shared_links: bool = False,
    buffers: int | None = None,
    tell: Callable[[float], None] | None = None,
) -> SimulationReport:
    """Simulates a lowered schedule. Raises ScheduleError with the cycle of waiting ranks if it deadlocks.
    tell: is told, now and then, which part is done."""
    if send_model not in ("buffered", "rendezvous"):
        raise ScheduleError(f'send_model is "buffered" or "rendezvous", found {send_model!r}')
    done = Simulation(actions, costs, send_model == "rendezvous", shared_links, buffers, tell)
    done.run()
    makespan = max((span.end for span in [*done.timeline, *done.transfers]), default=0.0)
    busy = dict.fromkeys(actions, 0.0)
    ends: dict[int, tuple[float, float]] = {}
    for span in done.timeline:
        busy[span.rank] += span.end - span.start
        first, last = ends.get(span.rank, (span.start, span.end))
        ends[span.rank] = min(first, span.start), max(last, span.end)
    capacity = len(actions) * makespan
    order = sorted(actions)
    return SimulationReport(
        makespan=makespan,
        bubble_fraction=1.0 - sum(busy.values()) / capacity if capacity else 0.0,
        peak_activations=[done.peak_of_stage[stage] for stage in sorted(done.peak_of_stage)],
        peak_of_ranks=[done.peak_of_rank[rank] for rank in order],
        idle=[ends[rank][1] - ends[rank][0] - busy[rank] if rank in ends else 0.0 for rank in order],
        exposed_fraction=done.exposed / capacity if capacity else 0.0,
        timeline=sorted(done.timeline, key=lambda span: (span.start, span.rank)),
        transfers=sorted(done.transfers, key=lambda span: (span.start, span.rank)),
    )
