"""Actions: what a rank of a pipeline does, one step after the other, and their text form.

A schedule is data: ``{rank: [Action, ...]}``. Here a *rank* is a row of the schedule, as in
torch.distributed.pipelining: all ranks of a stage's mesh run the same row. The text form is the one
torch.distributed.pipelining reads and writes (``2F0``, ``0I3``, ``0W3``, ``1B2``, ``2SEND_F0``,
``1RECV_F0``), with one addition: a transfer whose other end is not the neighbouring stage names it,
``0SEND_F3>2`` (to stage 2) and ``2RECV_F3<0`` (from stage 0).
"""

from __future__ import annotations

import csv
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from meshcast.base.checks import shown, typed_arguments
from meshcast.pipelining.errors import ScheduleError

__all__ = ["Action", "ActionKind", "Actions", "dump_csv", "load_csv"]


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

_PATTERN = re.compile(r"(\d+)(SEND_F|RECV_F|SEND_B|RECV_B|F|B|I|W)(\d+)(?:([<>])(\d+))?")

# Actions torch knows and this scheduler has no use for; named here so that a file that holds them is refused
# with the reason.
_REFUSED = {
    "WAIT": "nobody waits but for the value that it needs, which needs no action",
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


_MATCHING = {
    ActionKind.SEND_F: ActionKind.RECV_F,
    ActionKind.RECV_F: ActionKind.SEND_F,
    ActionKind.SEND_B: ActionKind.RECV_B,
    ActionKind.RECV_B: ActionKind.SEND_B,
}

Actions = dict[int, list[Action]]


def neighbour(stage: int, kind: ActionKind) -> int:
    """The stage a transfer of this kind goes to or comes from when its text does not say."""
    return stage + 1 if kind in (ActionKind.SEND_F, ActionKind.RECV_B) else stage - 1


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
