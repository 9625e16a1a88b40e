"""The copies that a Job keeps on other ranks, while the ranks that make them change.

A generation is the `Replicas` of one rendezvous. It begins with the first step that its ranks commit. The one
before stays until every rank of the new one is known to have a whole copy, which is when they commit again.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..base import checks
from .replicas import Replicas

if TYPE_CHECKING:
    from ..topology import Topology

__all__ = ["Chosen", "Generations"]

_MOST = 10**9  # steps


@dataclass(frozen=True)
class Chosen:
    """The generation that a job goes back to. members: of its rendezvous, by rank. replicas: None on a worker
    that was not there."""

    members: list[str]
    replicas: Replicas | None


@dataclass
class _Generation:
    rendezvous: int
    members: list[str]
    replicas: Replicas


class Generations:
    """The generations of one worker. every: steps from one copy to the next; more: arguments of Replicas."""

    def __init__(self, op: str, every: int, more: Mapping[str, Any], topology: Topology | None) -> None:
        self._every = checks.integer(f"{op}: replicas_every", every, 1, _MOST)
        self._more = {**more, "topology": topology}
        self._kept: list[_Generation] = []  # the newest last; two at most

    def committed(
        self, steps: int, rendezvous: int, members: Sequence[str], state: Callable[[], Mapping[str, Any]]
    ) -> None:
        """A step, by all ranks. A collective of them; raises as Replicas does."""
        if len(members) < 2:  # nobody is left that could have a copy
            self._kept.clear()
        elif not self._kept or self._kept[-1].rendezvous != rendezvous:
            replicas = Replicas(state, self._every, **self._more)
            replicas.refresh(steps)
            replicas.wait()
            self._kept = [*self._kept[-1:], _Generation(rendezvous, list(members), replicas)]
        else:
            del self._kept[:-1]
            self._kept[-1].replicas.step(steps)

    def choose(self, members: Collection[str], group: dist.ProcessGroup) -> Chosen | None:
        """The newest generation of which all members that live have copies; None where there is none. A
        collective of the ranks of `group`, which are `members`; all choose alike."""
        mine = {each.rendezvous: each.members if each.replicas.steps else None for each in self._kept}
        told: list[Any] = [None] * len(members)
        dist.all_gather_object(told, mine, group=group)
        by_worker = dict(zip(members, told, strict=True))
        known: dict[int, list[str]] = {}
        for theirs in told:
            known |= {number: each for number, each in theirs.items() if each is not None}
        for number in sorted(known, reverse=True):
            alive = [worker for worker in known[number] if worker in by_worker]
            if all(by_worker[worker].get(number) is not None for worker in alive):
                found = [each.replicas for each in self._kept if each.rendezvous == number]
                return Chosen(known[number], found[0] if found else None)
        return None
