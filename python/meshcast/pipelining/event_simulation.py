"""The event simulation behind `simulate`.

Ranks run their actions in order. A compute action waits for the receives it needs; a receive is posted and
never waited for; whether a send waits is the send model's and the buffers' affair. Transfers between the same
two ranks in one direction run one after the other, in the order in which they become ready.
"""

from __future__ import annotations

import heapq
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from meshcast.pipelining.action import Action, ActionKind, Actions
from meshcast.pipelining.costs import Costs, link_of
from meshcast.pipelining.errors import ScheduleError
from meshcast.pipelining.grid import Cell, format_grid

__all__ = ["Simulation", "Span"]

_TOLD = 4096  # events from one time that it is told how far this is to the next


@dataclass(frozen=True, slots=True)
class Span:
    """A compute action or a transfer (named by its SEND) and when it ran, in the unit of the times given."""

    rank: int
    action: Action
    start: float
    end: float


@dataclass(slots=True)
class Simulation:
    """One run. Arguments as `simulate_actions` explains them; results are the fields that it reads."""

    actions: Actions
    costs: Costs
    rendezvous: bool
    shared_links: bool
    buffers: int | None
    tell: Callable[[float], None] | None = None  # is told, now and then, which part of the actions is done
    timeline: list[Span] = field(default_factory=list)
    transfers: list[Span] = field(default_factory=list)
    peak_of_stage: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    peak_of_rank: dict[int, int] = field(default_factory=lambda: defaultdict(int))
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
    _alive: dict[int, int] = field(default_factory=lambda: defaultdict(int))
    _alive_on_rank: dict[int, int] = field(default_factory=lambda: defaultdict(int))
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
            if self.tell is not None and turn % _TOLD == 0:
                self.tell(sum(self._step.values()) / total)
            self._now, _, rank, receive = heapq.heappop(self._events)
            if receive is None:
                self._finish(rank)
                self._advance([rank])
            else:
                self._arrived.add(receive)
                self._let_go(receive)
                self._advance([rank, self._owner[receive.matching()]])
        stuck = {rank: step for rank, step in self._step.items() if step < len(self.actions[rank])}
        if stuck:
            raise ScheduleError(self._deadlock(stuck))

    def _advance(self, ranks: list[int]) -> None:
        """Lets these ranks go on, and those whose sends they thereby release."""
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
            self._let_go(action)
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
            # Of the wait, the part in which the value that came last was on its way.
            left, came = max((self._travel[receive] for receive in needs), key=lambda times: times[1])
            self.exposed += max(0.0, came - max(begin, left))
        self.timeline.append(Span(rank, action, self._now, end))
        if action.kind is ActionKind.F:
            self._keep(rank, action.stage, 1)
        self._busy.add(rank)
        self._at(end, rank, None)
        return True

    def _keep(self, rank: int, stage: int, count: int) -> None:
        self._alive[stage] += count
        self._alive_on_rank[rank] += count
        self.peak_of_stage[stage] = max(self.peak_of_stage[stage], self._alive[stage])
        self.peak_of_rank[rank] = max(self.peak_of_rank[rank], self._alive_on_rank[rank])

    def _finish(self, rank: int) -> None:
        action = self.actions[rank][self._step[rank]]
        if action.kind in (ActionKind.B, ActionKind.W):
            self._keep(rank, action.stage, -1)
        self._busy.discard(rank)
        self._idle_since[rank] = self._now
        self._step[rank] += 1

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

    def _let_go(self, receive: Action) -> None:
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
        """The action of another rank that a stuck action waits for."""
        if action.kind.is_compute:
            return min(
                (need for need in self._needs[action] if need not in self._arrived), key=str
            ).matching()
        if action not in self._ready:  # no free buffer: the oldest value in the way
            return self._held[_pair(action)][0].matching()
        return action.matching()


def _pair(send: Action) -> tuple[int, int, ActionKind]:
    return send.stage, send.peer, send.kind
