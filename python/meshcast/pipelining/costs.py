"""Times of the actions of a pipeline, for simulation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from meshcast.pipelining.action import Action, ActionKind
from meshcast.pipelining.errors import ScheduleError
from meshcast.pipelining.lower import Link

__all__ = ["Costs", "Seconds", "link_of"]

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
            f"{name} must be one time >= 0, or one for each of the {stages} stages, found {value}"
        )
    return times


def link_of(action: Action) -> Link:
    """The link a transfer belongs to, producer first, whatever its direction."""
    sends_down = action.kind in (ActionKind.SEND_F, ActionKind.RECV_B)
    return (action.stage, action.peer) if sends_down else (action.peer, action.stage)
