"""Simulation of a schedule: how long it takes, what waits, what piles up, where it deadlocks.

Ranks run their actions in order. A compute action waits for the receives it needs; a receive is posted and
never waited for; whether a send waits is the send model's and the buffers' affair. Transfers between the same
two ranks in one direction run one after the other, in the order in which they become ready.

warmup="auto" chooses by simulation how many forwards each stage runs before its first backward. A hop between
two stages hides its transfers if the stage before it runs two forwards more than the one after it; with one
more, as in 1F1B, they are exposed. Each such hop costs every stage before it the activations of one
micro-batch.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from ..base.checks import shown, typed_arguments
from ..base.progress import tell
from .action import (
    AHEAD,
    Action,
    ActionKind,
    Actions,
    Cell,
    Costs,
    Link,
    ScheduleError,
    Seconds,
    format_grid,
    link_of,
    lower,
    stage_ranks,
)
from .orders import Warmup, build, check_size, spec_of

__all__ = [
    "AutoWarmup",
    "Budget",
    "SendModel",
    "SimulationReport",
    "Span",
    "best_warmup",
    "check_budget",
    "most_held",
    "scheduled",
    "simulate",
    "simulate_actions",
]


_REPORTED = 4096  # events from one report of progress to the next


@dataclass(frozen=True, slots=True)
class Span:
    """An action of a rank and when it began and ended, simulated or measured: a compute action, a transfer
    (named by its SEND), or the wait for a value (named by its RECV)."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(slots=True)
class _Simulation:
    """One run. Arguments as `simulate_actions` explains them; results are the fields that it reads."""

    actions: Actions
    costs: Costs
    rendezvous: bool
    shared_links: bool
    buffers: int | None
    tell: Callable[[float], None] | None = None  # gets, now and then, the part of the actions that is done
    timeline: list[Span] = field(default_factory=list)
    transfers: list[Span] = field(default_factory=list)
    exposed: float = 0.0  # time that ranks did nothing but wait for a value that was travelling
    _now: float = 0.0
    _step: dict[int, int] = field(default_factory=dict)
    _busy: set[int] = field(default_factory=set)  # ranks inside a compute action
    _idle_since: dict[int, float] = field(default_factory=lambda: defaultdict(float))
    _owner: dict[Action, int] = field(default_factory=dict)
    _needs: dict[Action, list[Action]] = field(default_factory=dict)  # compute action -> RECVs it waits for
    _ready: set[Action] = field(default_factory=set)  # SENDs whose value exists
    _posted: set[Action] = field(default_factory=set)  # RECVs, as their SEND
    _travel: dict[Action, tuple[float, float]] = field(default_factory=dict)  # RECV -> times of its transfer
    _arrived: set[Action] = field(default_factory=set)  # RECVs
    _held: dict[tuple[int, int, ActionKind], list[Action]] = field(default_factory=lambda: defaultdict(list))
    _link_free: dict[object, float] = field(default_factory=lambda: defaultdict(float))
    _numbered: int = 0
    # time, number, rank, RECV that arrived or None where a compute action ended
    _events: list[tuple[float, int, int, Action | None]] = field(default_factory=list)

    def run(self) -> None:
        """Raises ScheduleError with the cycle of waiting ranks if they deadlock."""
        for rank, row in self.actions.items():
            self._step[rank] = 0
            posted: dict[tuple[int, int, bool], list[Action]] = defaultdict(list)
            for action in row:
                self._owner[action] = rank
                key = action.stage, action.microbatch, action.kind.is_backward
                if action.kind.is_recv:
                    posted[key].append(action)
                elif action.kind is ActionKind.W:
                    self._needs[action] = []
                elif action.kind.is_compute:
                    self._needs[action] = posted[key]
        self._advance(list(self.actions))
        total = sum(map(len, self.actions.values()))
        for turn in itertools.count():
            if not self._events:
                break
            if self.tell is not None and turn % _REPORTED == 0:
                self.tell(sum(self._step.values()) / total)
            self._now, _, rank, receive = heapq.heappop(self._events)
            if receive is None:
                self._busy.discard(rank)
                self._idle_since[rank] = self._now
                self._step[rank] += 1
                self._advance([rank])
            else:
                self._arrived.add(receive)
                self._release(receive)
                self._advance([rank, self._owner[receive.matching()]])
        stuck = {rank: step for rank, step in self._step.items() if step < len(self.actions[rank])}
        if stuck:
            raise ScheduleError(self._deadlock(stuck))

    def _advance(self, ranks: list[int]) -> None:
        """Continues these ranks, and those whose sends they thereby release."""
        while ranks:
            rank = ranks.pop()
            row = self.actions[rank]
            while rank not in self._busy and self._step[rank] < len(row):
                action = row[self._step[rank]]
                if not self._try(rank, action):
                    break
                if action.kind.is_recv and action.matching() in self._owner:
                    ranks.append(self._owner[action.matching()])

    def _try(self, rank: int, action: Action) -> bool:
        """Runs the action if it need not wait."""
        if action.kind.is_compute:
            return self._compute(rank, action)
        if action.kind.is_recv:
            self._posted.add(action.matching())
            self._start(action.matching())
            self._release(action)
        elif not self._send(action):
            return False
        self._step[rank] += 1
        return True

    def _compute(self, rank: int, action: Action) -> bool:
        needs = self._needs[action]
        if not all(receive in self._arrived for receive in needs):
            return False
        begin, end = self._idle_since[rank], self._now + self.costs.compute[action.kind][action.stage]
        if needs and begin < self._now:
            # Of the wait, the part in which the value that came last was in flight.
            left, came = max((self._travel[receive] for receive in needs), key=lambda times: times[1])
            self.exposed += max(0.0, came - max(begin, left))
        self.timeline.append(Span(rank, action, self._now, end))
        self._busy.add(rank)
        self._at(end, rank, None)
        return True

    def _send(self, send: Action) -> bool:
        """False while the sender has to wait: for its receive to be posted, or for a free buffer."""
        held = self._held[_pair(send)]
        if send not in self._ready:
            if self.buffers and len(held) >= self.buffers:
                return False
            self._ready.add(send)
            held.append(send)
            self._start(send)
        if self.rendezvous and send not in self._posted:
            return False
        return self.buffers != 0 or send not in held

    def _release(self, receive: Action) -> None:
        """A value leaves its buffer once it has arrived and its receive is posted."""
        send = receive.matching()
        if receive in self._arrived and send in self._posted:
            self._held[_pair(send)].remove(send)

    def _start(self, send: Action) -> None:
        receive = send.matching()
        if (
            receive in self._travel
            or send not in self._ready
            or (self.rendezvous and send not in self._posted)
        ):
            return
        source = self._owner[send]
        target = self._owner.get(receive, source)
        link: object = frozenset((source, target)) if self.shared_links else (source, target)
        start = max(self._now, self._link_free[link])
        self._link_free[link] = end = start + self.costs.of_transfer(link_of(send))
        self._travel[receive] = start, end
        self.transfers.append(Span(source, send, start, end))
        self._at(end, target, receive)

    def _at(self, time: float, rank: int, receive: Action | None) -> None:
        # Numbered, so that events of one time are handled in the order in which they were made.
        self._numbered += 1
        heapq.heappush(self._events, (time, self._numbered, rank, receive))

    def _deadlock(self, stuck: Mapping[int, int]) -> str:
        """Follows who waits for whom until a rank comes round again, or until one has nothing left to do."""
        rank = min(stuck)
        path: list[int] = []
        lines: list[str] = []
        while rank in stuck and rank not in path:
            path.append(rank)
            action = self.actions[rank][stuck[rank]]
            wanted = self._wanted(action)
            owner = self._owner.get(wanted)
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
        limit = "" if self.buffers is None else f" and {self.buffers} buffers"
        return "\n".join(
            [
                f"the schedule deadlocks with {model} sends{limit}, ranks {closed}",
                *lines,
                format_grid(self.actions, marked),
            ]
        )

    def _wanted(self, action: Action) -> Action:
        """Returns the action of another rank that a stuck action waits for."""
        if action.kind.is_compute:
            return min(
                (need for need in self._needs[action] if need not in self._arrived), key=str
            ).matching()
        if action not in self._ready:  # no free buffer: the oldest value in the way
            return self._held[_pair(action)][0].matching()
        return action.matching()


def _pair(send: Action) -> tuple[int, int, ActionKind]:
    return send.stage, send.peer, send.kind


AutoWarmup = Warmup | Literal["auto"]
Budget = int | Sequence[int] | None


def scheduled(
    name: str,
    stages: int,
    microbatches: int,
    costs: Costs,
    links: Sequence[Link] | None,
    *,
    ranks: int | None = None,
    warmup: AutoWarmup | None = None,
    budget: Budget = None,
    delay_weight_grad: bool = False,
) -> Actions:
    """Returns what `build` makes. warmup: "auto" is chosen by the costs, within the budget."""
    if isinstance(warmup, str) and warmup == "auto":
        if not spec_of(name).warmup_by_stage:
            raise ScheduleError(
                f'warmup="auto" chooses between 1F1B and Eager1F1B, {name} has no such choice'
            )
        warmup = best_warmup(stages, microbatches, budget, costs, links, delay_weight_grad)
    return build(name, stages, microbatches, ranks=ranks, warmup=warmup, delay_weight_grad=delay_weight_grad)


def best_warmup(
    stages: int,
    microbatches: int,
    budget: Budget,
    costs: Costs,
    links: Sequence[Link] | None,
    delay_weight_grad: bool,
) -> list[int]:
    """Returns the warm-up of each stage that makes a step of 1F1B shortest.

    For stage i of n it is between n - i and 2(n - i) - 1, within the budget. Hops are tried in the order of
    their transfer times, slowest first; of equally long steps the one that holds the fewest micro-batches is
    taken. Raises ScheduleError if the budget is below what 1F1B holds.
    """
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
        # Rounded: sums of the same times in another order must count as equal.
        return round(simulate_actions(lower(actions, links), costs).makespan, 9), sum(counts)

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


def most_held(
    row: Iterable[Action],
    held: Callable[[int], float] = lambda _: 1.0,
    between: Callable[[int], float] = lambda _: 0.0,
) -> float:
    """Returns the most that a rank holds at once for its backwards, whatever the times: its order decides.

    Args:
        row: actions of the rank.
        held: by stage, what it holds of a micro-batch from the forward to the backward of the weights.
            Default: one, which counts micro-batches.
        between: by stage, how much more it holds between I and W.
    """
    now = most = 0.0
    for action in row:
        stage, kind = action.stage, action.kind
        if kind is ActionKind.F:
            now += held(stage)
        elif kind is ActionKind.I:
            now += between(stage)
        most = max(most, now)
        if kind is ActionKind.B:
            now -= held(stage)
        elif kind is ActionKind.W:
            now -= held(stage) + between(stage)
    return most


def _peaks(actions: Mapping[int, Sequence[Action]]) -> list[int]:
    """Returns for each stage the most micro-batches that it holds activations of."""
    of_stage: dict[int, list[Action]] = defaultdict(list)
    for row in actions.values():
        for action in row:
            of_stage[action.stage].append(action)
    return [int(most_held(of_stage[stage])) for stage in sorted(of_stage)]


def check_budget(budget: Budget, actions: Mapping[int, Sequence[Action]]) -> None:
    """Raises ScheduleError naming the stage that holds more micro-batches than it may."""
    if budget is None:
        return
    peaks = _peaks(actions)
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
            f"found {shown(budget)}"
        )
    return [*limits]


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
            in flight.
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
        buffers: values of one link and direction that may be in flight or arrived before their receive
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
        costs = Costs.of(stages, forward, backward, weight, transfer)
        actions = scheduled(
            schedule,
            stages,
            microbatches,
            costs,
            links,
            ranks=ranks,
            warmup=warmup,
            budget=memory_budget,
            delay_weight_grad=delay_weight_grad,
        )
    report = simulate_actions(
        lower(actions, links, ahead),
        costs,
        send_model,
        shared_links=shared_links,
        buffers=buffers,
        tell=lambda part: tell(_LOWERED + (1.0 - _LOWERED) * part),
    )
    check_budget(memory_budget, actions)
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
    tell: gets, now and then, the part that is done."""
    if send_model not in ("buffered", "rendezvous"):
        raise ScheduleError(f'send_model is "buffered" or "rendezvous", found {shown(send_model)}')
    done = _Simulation(actions, costs, send_model == "rendezvous", shared_links, buffers, tell)
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
        peak_activations=_peaks(actions),
        peak_of_ranks=[int(most_held(actions[rank])) for rank in order],
        idle=[ends[rank][1] - ends[rank][0] - busy[rank] if rank in ends else 0.0 for rank in order],
        exposed_fraction=done.exposed / capacity if capacity else 0.0,
        timeline=sorted(done.timeline, key=lambda span: (span.start, span.rank)),
        transfers=sorted(done.transfers, key=lambda span: (span.start, span.rank)),
    )
