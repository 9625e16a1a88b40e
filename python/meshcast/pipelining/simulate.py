"""Event simulation of a schedule: how long it takes, what waits, what piles up, where it deadlocks.

Ranks run their actions in order. A compute action waits for the receives it needs; a receive is posted and
never waited for; a send never waits under the buffered model and waits until the receive has been posted
under the rendezvous model. Transfers of one link and direction run one after the other, in the order they
become ready.
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from meshcast.pipelining.action import Action, ActionKind, Actions
from meshcast.pipelining.errors import ScheduleError
from meshcast.pipelining.grid import Cell, format_grid
from meshcast.pipelining.lower import AHEAD, Link, lower, stage_ranks
from meshcast.pipelining.schedules import build

__all__ = ["SendModel", "SimulationReport", "Span", "simulate", "simulate_actions"]

SendModel = Literal["buffered", "rendezvous"]
Seconds = float | Sequence[float]  # one for all stages, or one per stage


@dataclass(frozen=True, slots=True)
class Span:
    """A compute action or a transfer (named by its SEND) and when it ran, in the unit of the times given."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class SimulationReport:
    """What the simulation saw.

    Attributes:
        makespan: end of the last action or transfer.
        bubble_fraction: 1 - (compute time of all ranks) / (ranks x makespan).
        peak_activations: for each stage, most micro-batches alive at once (forward begun, backward of the
            weights not ended).
        timeline: compute spans by start time.
        transfers: transfer spans by start time.
    """

    makespan: float
    bubble_fraction: float
    peak_activations: list[int]
    timeline: list[Span]
    transfers: list[Span]


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
) -> SimulationReport:
    """Simulates a schedule given by name (with ``stages`` and ``microbatches``) or by its compute actions.

    Args:
        forward, backward: time of F and of B, the whole backward, per micro-batch.
        weight: the part of the backward that W takes where B is split (I takes the rest); default: half of
            it.
        transfer: time of one micro-batch over a link, each direction.
        send_model: "buffered" or "rendezvous".
        links: pairs of stages; default: each stage feeds the next.
        ahead: how many compute actions ahead receives are posted, see `lower`.
        shared_links: both directions of a link share its bandwidth slot instead of having one each.

    Raises:
        ScheduleError: unknown name, bad times, or a deadlock, with its cycle.
    """
    if isinstance(schedule, str):
        if stages is None or microbatches is None:
            raise ScheduleError(f"simulate({schedule!r}) needs stages and microbatches")
        schedule = build(schedule, stages, microbatches)
    costs = Costs.of(len(stage_ranks(schedule)), forward, backward, weight, transfer)
    return simulate_actions(lower(schedule, links, ahead), costs, send_model, shared_links=shared_links)


@dataclass(frozen=True, slots=True)
class Costs:
    """Time of each kind of action per stage, and of one micro-batch over each link."""

    compute: Mapping[ActionKind, Sequence[float]]
    transfer: float | Mapping[Link, float]

    @staticmethod
    def of(
        stages: int,
        forward: Seconds,
        backward: Seconds,
        weight: Seconds | None,
        transfer: float | Mapping[Link, float],
    ) -> Costs:
        whole = _per_stage("backward", backward, stages)
        late = [time / 2 for time in whole] if weight is None else _per_stage("weight", weight, stages)
        if any(part > time for part, time in zip(late, whole, strict=True)):
            raise ScheduleError(
                f"weight is a part of backward and cannot exceed it: weight={late}, backward={whole}"
            )
        compute = {
            ActionKind.F: _per_stage("forward", forward, stages),
            ActionKind.B: whole,
            ActionKind.W: late,
            ActionKind.I: [time - part for part, time in zip(late, whole, strict=True)],
        }
        for time in transfer.values() if isinstance(transfer, Mapping) else [transfer]:
            if time < 0:
                raise ScheduleError(f"transfer times cannot be negative, found {time}")
        return Costs(compute, transfer)

    def of_transfer(self, link: Link) -> float:
        if isinstance(self.transfer, Mapping):
            return self.transfer.get(link, 0.0)
        return self.transfer


def _per_stage(name: str, value: Seconds, stages: int) -> list[float]:
    times = [float(value)] * stages if isinstance(value, (int, float)) else [float(time) for time in value]
    if len(times) != stages or any(time < 0 for time in times):
        raise ScheduleError(
            f"{name} must be one time >= 0, or one for each of the {stages} stages, found {value}"
        )
    return times


def link_of(action: Action) -> Link:
    """The link a transfer belongs to, producer first, whatever its direction."""
    sends_down = action.kind in (ActionKind.SEND_F, ActionKind.RECV_B)
    return (action.stage, action.peer) if sends_down else (action.peer, action.stage)


def simulate_actions(
    actions: Actions, costs: Costs, send_model: SendModel = "buffered", *, shared_links: bool = False
) -> SimulationReport:
    """Simulates a lowered schedule. Raises ScheduleError with the cycle of waiting ranks if it deadlocks."""
    if send_model not in ("buffered", "rendezvous"):
        raise ScheduleError(f'send_model is "buffered" or "rendezvous", found {send_model!r}')
    return _Simulation(actions, costs, send_model == "rendezvous", shared_links).run()


@dataclass(slots=True)
class _Simulation:
    actions: Actions
    costs: Costs
    rendezvous: bool
    shared_links: bool
    now: float = 0.0
    step: dict[int, int] = field(default_factory=dict)
    busy: set[int] = field(default_factory=set)  # ranks inside a compute action
    owner: dict[Action, int] = field(default_factory=dict)
    needs: dict[Action, set[Action]] = field(default_factory=dict)  # compute action -> RECVs it waits for
    ready: set[Action] = field(default_factory=set)  # SENDs whose value exists
    posted: set[Action] = field(default_factory=set)  # RECVs, as their SEND
    started: set[Action] = field(default_factory=set)
    arrived: set[Action] = field(default_factory=set)
    link_free: dict[object, float] = field(default_factory=lambda: defaultdict(float))
    alive: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    peak: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    split: set[tuple[int, int]] = field(default_factory=set)  # (stage, micro-batch) whose backward is I and W
    timeline: list[Span] = field(default_factory=list)
    transfers: list[Span] = field(default_factory=list)
    numbered: int = 0
    events: list[tuple[float, int, int, Action | None]] = field(
        default_factory=list
    )  # time, number, rank, arrived RECV or None

    def run(self) -> SimulationReport:
        for rank, row in self.actions.items():
            self.step[rank] = 0
            posted: dict[tuple[int, int, bool], set[Action]] = defaultdict(
                set
            )  # stage, micro-batch, backward
            for action in row:
                self.owner[action] = rank
                if action.kind.is_recv:
                    posted[action.stage, action.microbatch, action.kind.is_backward].add(action)
                elif action.kind is ActionKind.W:
                    self.needs[action] = set()
                elif action.kind.is_compute:
                    self.needs[action] = posted[action.stage, action.microbatch, action.kind.is_backward]
                if action.kind is ActionKind.I:
                    self.split.add((action.stage, action.microbatch))
        self._advance(list(self.actions))
        while self.events:
            self.now, _, rank, receive = heapq.heappop(self.events)
            if receive is None:
                self.busy.discard(rank)
                self._finish(rank)
            else:
                self.arrived.add(receive)
            self._advance([rank])
        stuck = {rank: step for rank, step in self.step.items() if step < len(self.actions[rank])}
        if stuck:
            raise ScheduleError(self._deadlock(stuck))
        return self._report()

    def _advance(self, ranks: list[int]) -> None:
        """Lets these ranks go on, and those whose sends they thereby release."""
        while ranks:
            rank = ranks.pop()
            row = self.actions[rank]
            while rank not in self.busy and self.step[rank] < len(row):
                action = row[self.step[rank]]
                if not self._try(rank, action):
                    break
                if self.rendezvous and action.kind.is_recv and action.matching() in self.owner:
                    ranks.append(self.owner[action.matching()])

    def _try(self, rank: int, action: Action) -> bool:
        """Runs the action if it need not wait."""
        if action.kind.is_compute:
            if not self.needs[action] <= self.arrived:
                return False
            end = self.now + self.costs.compute[action.kind][action.stage]
            self.timeline.append(Span(rank, action, self.now, end))
            if action.kind is ActionKind.F:
                self.alive[action.stage] += 1
                self.peak[action.stage] = max(self.peak[action.stage], self.alive[action.stage])
            self.busy.add(rank)
            self._at(end, rank, None)
            return True
        send = action if action.kind.is_send else action.matching()
        (self.ready if action.kind.is_send else self.posted).add(send)
        self._start(send)
        if action.kind.is_send and self.rendezvous and send not in self.posted:
            return False
        self.step[rank] += 1
        return True

    def _finish(self, rank: int) -> None:
        action = self.actions[rank][self.step[rank]]
        whole = action.kind is ActionKind.B and (action.stage, action.microbatch) not in self.split
        if whole or action.kind is ActionKind.W:
            self.alive[action.stage] -= 1
        self.step[rank] += 1

    def _start(self, send: Action) -> None:
        if send in self.started or send not in self.ready or (self.rendezvous and send not in self.posted):
            return
        self.started.add(send)
        link = link_of(send)
        lane: object = link if self.shared_links else (link, send.kind)
        start = max(self.now, self.link_free[lane])
        self.link_free[lane] = end = start + self.costs.of_transfer(link)
        rank = self.owner[send]
        self.transfers.append(Span(rank, send, start, end))
        receive = send.matching()
        self._at(end, self.owner.get(receive, rank), receive)

    def _at(self, time: float, rank: int, receive: Action | None) -> None:
        # Numbered, so that events of one time are handled in the order in which they were made.
        self.numbered += 1
        heapq.heappush(self.events, (time, self.numbered, rank, receive))

    def _report(self) -> SimulationReport:
        makespan = max((span.end for span in [*self.timeline, *self.transfers]), default=0.0)
        compute = sum(span.end - span.start for span in self.timeline)
        capacity = len(self.actions) * makespan
        return SimulationReport(
            makespan=makespan,
            bubble_fraction=1.0 - compute / capacity if capacity else 0.0,
            peak_activations=[self.peak[stage] for stage in sorted(self.peak)],
            timeline=sorted(self.timeline, key=lambda span: (span.start, span.rank)),
            transfers=sorted(self.transfers, key=lambda span: (span.start, span.rank)),
        )

    def _deadlock(self, stuck: Mapping[int, int]) -> str:
        """Follows who waits for whom until a rank comes round again, or until one has nothing left to do."""
        rank = min(stuck)
        path: list[int] = []
        lines: list[str] = []
        while rank in stuck and rank not in path:
            path.append(rank)
            action = self.actions[rank][stuck[rank]]
            if action.kind.is_compute:
                wanted = min(self.needs[action] - self.arrived, key=str).matching()
            else:
                wanted = action.matching()
            owner = self.owner.get(wanted)
            where = f"{wanted}, which no rank has" if owner is None else f"{wanted} on rank {owner}"
            lines.append(
                f"rank {rank}, step {stuck[rank]}: {action} (stage {action.stage}, micro-batch "
                f"{action.microbatch}) waits for {where}"
            )
            if owner is None:
                break
            rank = owner
        cycle = path[path.index(rank) :] if rank in path else path
        marked: set[Cell] = {(member, stuck[member]) for member in path}
        closed = " -> ".join(str(member) for member in [*cycle, rank])
        model = "rendezvous" if self.rendezvous else "buffered"
        return "\n".join(
            [
                f"the schedule deadlocks with {model} sends, ranks {closed}",
                *lines,
                format_grid(self.actions, marked),
            ]
        )
