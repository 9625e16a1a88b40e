"""Actions: what a rank of a pipeline does, one step after the other, and their text form.

A schedule is data: ``{rank: [Action, ...]}``. Here a *rank* is a row of the schedule, as in
torch.distributed.pipelining: all ranks of a stage's mesh run the same row. The text form is the one
torch.distributed.pipelining reads and writes (``2F0``, ``0I3``, ``0W3``, ``1B2``, ``2SEND_F0``,
``1RECV_F0``), with one addition: a transfer whose other end is not the neighbouring stage names it,
``0SEND_F3>2`` (to stage 2) and ``2RECV_F3<0`` (from stage 0).

Lowering: from compute actions to what a rank really runs, with its sends and receives.

A *link* is an ordered pair of stages between which values travel: activations from the first to the second,
their gradients back. All values of one link and one micro-batch travel together. A chain of stages has the
links (0,1), (1,2), ...; a skip connection adds one.
"""

from __future__ import annotations

import csv
import os
import re
from bisect import bisect_left
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from ..base.checks import shown, table, typed_arguments
from ..errors import MeshcastError

__all__ = [
    "AHEAD",
    "Action",
    "ActionKind",
    "Actions",
    "Costs",
    "Link",
    "ScheduleError",
    "Seconds",
    "chain",
    "crossing",
    "dump_csv",
    "link_of",
    "load_csv",
    "lower",
    "stage_ranks",
]


class ScheduleError(MeshcastError, ValueError):
    """A schedule that cannot run: bad text, a missing or repeated action, a wrong order, a deadlock.

    The message names rank, step, stage and micro-batch, and shows the part of the grid around the cell.
    """


class ActionKind(Enum):
    """The kind of an action. The value is its text form.

    F: forward. B: whole backward. I: the part of the backward that makes the gradients of the inputs; W: the
    part that makes those of the weights. SEND_F, RECV_F: an activation goes to a consumer stage, and comes
    from its producer. SEND_B, RECV_B: its gradient goes back, and comes back.
    """

    F = "F"  # forward
    B = "B"  # whole backward
    I = "I"  # noqa: E741  backward, gradient of the inputs only
    W = "W"  # backward, gradient of the weights only
    SEND_F = "SEND_F"  # give an activation to a consumer stage
    RECV_F = "RECV_F"  # make room for an activation and post its receive
    SEND_B = "SEND_B"  # give the gradient of an activation back to its producer
    RECV_B = "RECV_B"  # make room for that gradient and post its receive

    # There is one of each, and this needs no call of Python: the runtime looks actions up all the time.
    __hash__ = object.__hash__

    @property
    def is_compute(self) -> bool:
        return self in _COMPUTE

    @property
    def is_send(self) -> bool:
        return self in (ActionKind.SEND_F, ActionKind.SEND_B)

    @property
    def is_recv(self) -> bool:
        return self in (ActionKind.RECV_F, ActionKind.RECV_B)

    @property
    def is_backward(self) -> bool:
        """True for the actions that move or make gradients."""
        return self not in (ActionKind.F, ActionKind.SEND_F, ActionKind.RECV_F)


_COMPUTE = frozenset({ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W})
_TO_CONSUMER = (ActionKind.SEND_F, ActionKind.RECV_B)  # transfers whose other end is a consumer of the stage
# The values that a compute action needs from other stages, and those that it makes for them.
_RECEIVES = {
    ActionKind.F: ActionKind.RECV_F,
    ActionKind.B: ActionKind.RECV_B,
    ActionKind.I: ActionKind.RECV_B,
}
_SENDS = {ActionKind.F: ActionKind.SEND_F, ActionKind.B: ActionKind.SEND_B, ActionKind.I: ActionKind.SEND_B}
_MATCHING = {
    ActionKind.SEND_F: ActionKind.RECV_F,
    ActionKind.RECV_F: ActionKind.SEND_F,
    ActionKind.SEND_B: ActionKind.RECV_B,
    ActionKind.RECV_B: ActionKind.SEND_B,
}

_PATTERN = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)(?:([<>])(\d+))?")

# Actions torch knows and this scheduler has no use for; named here so that a file that holds them is refused
# with the reason.
_REFUSED = {
    "WAIT": "an action waits only for the values that it needs, which needs no action",
    "UNSHARD": "gathering FSDP parameters is left to the module",
    "RESHARD": "freeing FSDP parameters is left to the module",
    "REDUCE_GRAD": "gradients are reduced once at the end of a step, which needs no action",
    "OVERLAP_F_B": "fused forward and backward is not supported; write the two actions one after the other",
}


@dataclass(frozen=True, slots=True)
class Action:
    """One step of one rank.

    Args:
        stage: the stage that computes, sends or receives.
        kind: what it does.
        microbatch: which micro-batch it does it for.
        peer: sends and receives only, the stage at the other end. May be left out for the neighbour the kind
            implies (SEND_F: stage + 1, RECV_F: stage - 1, SEND_B: stage - 1, RECV_B: stage + 1).
    """

    stage: int
    kind: ActionKind
    microbatch: int
    peer: int = -1

    def __post_init__(self) -> None:
        if not isinstance(self.kind, ActionKind):
            raise ScheduleError(f"kind of an action: expected an ActionKind, found {shown(self.kind)}")
        for name in ("stage", "microbatch", "peer"):
            value = getattr(self, name)
            if not isinstance(value, int):
                raise ScheduleError(f"{name} of an action: expected an integer, found {shown(value)}")
        if self.kind.is_compute:
            if self.peer != -1:
                raise ScheduleError(
                    f"a compute action has no peer, found {self.peer} in "
                    f"{self.stage}{self.kind.value}{self.microbatch}"
                )
        elif self.peer == -1:
            object.__setattr__(self, "peer", neighbour(self.stage, self.kind))

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind.value}{self.microbatch}"
        if self.kind.is_compute or self.peer == neighbour(self.stage, self.kind):
            return text
        return f"{text}{'>' if self.kind.is_send else '<'}{self.peer}"

    __repr__ = __str__

    @staticmethod
    @typed_arguments(ScheduleError)
    def parse(text: str) -> Action:
        """The action that ``str`` wrote. Raises ScheduleError that names the text and, for torch's other
        actions, why they are refused."""
        text = text.strip()
        match = _PATTERN.fullmatch(text)
        if match is None:
            for name, reason in _REFUSED.items():
                if name in text:
                    raise ScheduleError(f"action {text!r}: {name} is refused: {reason}")
            raise ScheduleError(
                f"action {text!r}: expected [stage][kind][micro-batch] such as 2F0, 1B3, 0SEND_F2 "
                "or 0SEND_F2>3"
            )
        stage, kind_text, microbatch, arrow, peer = match.groups()
        kind = ActionKind(kind_text)
        if arrow is not None and arrow != (">" if kind.is_send else "<" if kind.is_recv else None):
            raise ScheduleError(f"action {text!r}: '>' names where a SEND goes, '<' where a RECV comes from")
        return Action(int(stage), kind, int(microbatch), -1 if peer is None else int(peer))

    def matching(self) -> Action:
        """The other end of a transfer: the RECV of a SEND, the SEND of a RECV."""
        return Action(self.peer, _MATCHING[self.kind], self.microbatch, self.stage)


Actions = dict[int, list[Action]]


def neighbour(stage: int, kind: ActionKind) -> int:
    """The stage a transfer of this kind goes to or comes from when its text does not say."""
    return stage + 1 if kind in _TO_CONSUMER else stage - 1


@typed_arguments(ScheduleError)
def load_csv(path: str | os.PathLike[str]) -> Actions:
    """Reads a schedule, one row per rank, one cell per step; empty cells (idle steps) are dropped.

    Reads the files torch.distributed.pipelining writes, compute-only or with transfers. Raises ScheduleError
    naming row and column.

    Example::

        import tempfile
        from meshcast.pipelining import Action, dump_csv, load_csv

        rows = (["0F0", "0B0"], ["1F0", "1B0"])
        actions = {rank: [Action.parse(each) for each in row] for rank, row in enumerate(rows)}
        with tempfile.NamedTemporaryFile(suffix=".csv") as file:
            dump_csv(actions, file.name)
            assert load_csv(file.name) == actions
    """
    actions: Actions = {}
    with open(path, newline="") as file:
        for rank, row in enumerate(csv.reader(file)):
            actions[rank] = []
            for column, cell in enumerate(row):
                if not cell.strip():
                    continue
                try:
                    actions[rank].append(Action.parse(cell))
                except ScheduleError as error:
                    raise ScheduleError(
                        f"{os.fspath(path)}, row {rank} (rank {rank}), column {column}: {error}"
                    ) from None
    return actions


@typed_arguments(ScheduleError)
def dump_csv(actions: Mapping[int, Sequence[Action]], path: str | os.PathLike[str]) -> None:
    """Writes a schedule, one row per rank in ascending order. torch.distributed.pipelining reads the file
    unless it holds ``>`` or ``<``. `load_csv` has an example."""
    if sorted(actions) != list(range(len(actions))):
        raise ScheduleError(
            f"a CSV file has one row per rank 0..{len(actions) - 1}, found ranks {sorted(actions)}"
        )
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        for rank in sorted(actions):
            writer.writerow([str(action) for action in actions[rank]])


Link = tuple[int, int]

# How many compute actions ahead of its use a receive is posted, W apart, which waits for nothing. Two would
# do for the steady state of 1F1B (the period of one kind of action is two); four also lets the back-to-back
# forwards of a warm-up find their receives posted. More only costs buffers.
AHEAD = 4
_NEVER = 1 << 60


def chain(stages: int) -> list[Link]:
    """The links of stages that only feed their successor."""
    return [(stage, stage + 1) for stage in range(stages - 1)]


def crossing(links: Sequence[Link], ranks: Mapping[int, int]) -> list[Link]:
    """The links between stages of different ranks: those that need transfers. Inside a rank a value is handed
    over."""
    return [(source, target) for source, target in links if ranks[source] != ranks[target]]


def stage_ranks(actions: Mapping[int, Sequence[Action]]) -> dict[int, int]:
    """The rank of each stage, read from the compute actions. Raises ScheduleError if two ranks compute one
    stage."""
    ranks: dict[int, int] = {}
    for rank, row in actions.items():
        for action in row:
            if action.kind.is_compute and ranks.setdefault(action.stage, rank) != rank:
                raise ScheduleError(
                    f"stage {action.stage} is computed by rank {ranks[action.stage]} and by rank "
                    f"{rank} ({action})"
                )
    return ranks


@typed_arguments(ScheduleError)
def lower(
    actions: Mapping[int, Sequence[Action]], links: Sequence[Link] | None = None, ahead: int = AHEAD
) -> Actions:
    """Inserts the transfers into a compute-only schedule.

    A SEND comes right after the compute action that makes its value. A RECV comes ``ahead`` compute actions
    (W not counted) per stage that its link spans before the one that uses it (or first): a link that skips
    stages joins ranks that are further apart in time. Where the value is made earlier still in a run in which
    every action takes one unit, the RECV comes before what the consumer's rank does in that unit: so senders
    that wait for their receives to be posted never wait in a circle.
    Both ends of a link thus see its micro-batches in the order of their compute actions; `validate` proves
    that the two orders agree. A link between two stages of one rank has no transfers.

    Args:
        actions: compute actions of each rank.
        links: pairs of stages (from, to), to > from; default: each stage feeds the next.
        ahead: at least 1; see above.

    Raises:
        ScheduleError: a link names a stage that no rank computes, or goes backwards, or the schedule holds
            transfers already.

    Example::

        from meshcast.pipelining import Action, lower, validate

        compute = {0: ["0F0", "0B0"], 1: ["1F0", "1B0"]}  # of each rank
        actions = lower({rank: [Action.parse(each) for each in row] for rank, row in compute.items()})
        assert "0SEND_F0" in map(str, actions[0])
        validate(actions, stages=2, microbatches=1)
    """
    ranks = stage_ranks(actions)
    links = chain(len(ranks)) if links is None else sorted(set(links))
    if ahead < 1:
        raise ScheduleError(
            f"receives must be posted at least 1 action ahead of their use, found ahead={ahead}"
        )
    for source, target in links:
        if source >= target:
            raise ScheduleError(f"link {source} -> {target}: values travel to a later stage")
        for stage in (source, target):
            if stage not in ranks:
                raise ScheduleError(f"link {source} -> {target}: stage {stage} is on no rank")
    for rank, row in actions.items():
        for position, action in enumerate(row):
            if not action.kind.is_compute:
                raise ScheduleError(
                    f"rank {rank}, step {position}: {action} is a transfer; only a compute-only schedule can "
                    "be lowered"
                )
    crossed = crossing(links, ranks)
    ends = _unit_times(actions, links)
    return {rank: _lower_row(row, crossed, ahead, ends) for rank, row in actions.items()}


def _lower_row(
    row: Sequence[Action], links: Sequence[Link], ahead: int, ends: Mapping[Action, int]
) -> list[Action]:
    receives: list[list[Action]] = [[] for _ in row]
    counted: list[int] = []  # positions of the actions that `ahead` counts
    row_ends = [ends.get(action, _NEVER) for action in row]
    for position, action in enumerate(row):
        if action.kind is ActionKind.W:
            continue
        counted.append(position)
        for receive in _transfers(action, links, _RECEIVES):
            early = counted[max(0, len(counted) - 1 - ahead * abs(receive.peer - receive.stage))]
            made = min(ends.get(maker, _NEVER) for maker in _makers(receive))
            receives[min(early, bisect_left(row_ends, made, 0, position))].append(receive)
    lowered: list[Action] = []
    for posted, action in zip(receives, row, strict=True):
        lowered += [*posted, action, *_transfers(action, links, _SENDS)]
    return lowered


def _unit_times(actions: Mapping[int, Sequence[Action]], links: Sequence[Link]) -> dict[Action, int]:
    """Returns when each compute action ends if every one takes one unit and transfers take none. An action
    that never gets to run, since what it needs is missing or behind it, is left out: `validate` says why."""
    present = {action for row in actions.values() for action in row}
    ends: dict[Action, int] = {}
    step = dict.fromkeys(actions, 0)
    moved = True
    while moved:
        moved = False
        for rank, row in actions.items():
            while step[rank] < len(row):
                action = row[step[rank]]
                receives = _transfers(action, links, _RECEIVES)
                makers = [m for receive in receives for m in _makers(receive) if m in present]
                if not all(maker in ends for maker in makers):
                    break
                before = ends[row[step[rank] - 1]] if step[rank] else 0
                ends[action] = 1 + max([before, *(ends[maker] for maker in makers)])
                step[rank] += 1
                moved = True
    return ends


def _makers(receive: Action) -> list[Action]:
    """Returns the compute actions, one of which makes what is received."""
    kinds = (ActionKind.F,) if receive.kind is ActionKind.RECV_F else (ActionKind.B, ActionKind.I)
    return [Action(receive.peer, kind, receive.microbatch) for kind in kinds]


def _transfers(action: Action, links: Sequence[Link], kinds: Mapping[ActionKind, ActionKind]) -> list[Action]:
    """Returns the transfers of a compute action over the links of its stage. kinds: by that of the action."""
    kind = kinds.get(action.kind)
    if kind is None:
        return []
    stage = action.stage
    if kind in _TO_CONSUMER:
        others = [target for source, target in links if source == stage]
    else:
        others = [source for source, target in links if target == stage]
    return [Action(stage, kind, action.microbatch, other) for other in others]


Cell = tuple[int, int]  # rank, step

_AROUND = 6  # steps shown before and after the first and last marked cell


def format_grid(actions: Mapping[int, Sequence[Action]], marked: Collection[Cell] = ()) -> str:
    """Steps downwards, ranks across, marked cells in ``>..<``. A long schedule is cut to the steps around the
    marks."""
    ranks = sorted(actions)
    steps = max((len(row) for row in actions.values()), default=0)
    first, last = 0, steps
    if marked:
        first = max(0, min(step for _, step in marked) - _AROUND)
        last = min(steps, max(step for _, step in marked) + _AROUND + 1)
    rows = [["step", *(f"rank {rank}" for rank in ranks)]]
    for step in range(first, last):
        cells = [_cell(actions[rank], step, (rank, step) in marked) for rank in ranks]
        rows.append([str(step), *cells])
    return table(rows)


def _cell(row: Sequence[Action], step: int, marked: bool) -> str:
    text = str(row[step]) if step < len(row) else ""
    return f">{text or 'end'}<" if marked else f" {text} " if text else ""


Seconds = float | Sequence[float]  # one for all stages, or one per stage


@dataclass(frozen=True, slots=True)
class Costs:
    """Time of each kind of action per stage, and of one micro-batch over each link. Any unit."""

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
        """From the times as `simulate` takes them. Raises ScheduleError naming the one that is wrong."""
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
            if not time >= 0:
                raise ScheduleError(f"transfer times cannot be negative, found {time}")
        return Costs(compute, transfer)

    def of_transfer(self, link: Link) -> float:
        """Time of one micro-batch over a link, either direction."""
        if isinstance(self.transfer, Mapping):
            return self.transfer.get(link, 0.0)
        return self.transfer


def _per_stage(name: str, value: Seconds, stages: int) -> list[float]:
    times = [float(value)] * stages if isinstance(value, (int, float)) else [float(time) for time in value]
    if len(times) != stages or not all(time >= 0 for time in times):
        raise ScheduleError(
            f"{name} must be one time >= 0, or one for each of the {stages} stages, found {shown(value)}"
        )
    return times


def link_of(action: Action) -> Link:
    """The link a transfer belongs to, producer first, whatever its direction."""
    return (action.stage, action.peer) if action.kind in _TO_CONSUMER else (action.peer, action.stage)
