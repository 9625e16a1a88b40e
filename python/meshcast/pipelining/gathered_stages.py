"""The FSDP2 stages that a rank has gathered at a time: the window of ``max_active_stages``, by torch's rule.

Before every action a rank looks at the next stages that it will compute. Those beyond the window are freed
(``RESHARD``), those inside it are gathered ahead (``UNSHARD``), as many as ``unshard_lookahead`` says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from meshcast.base.checks import shown
from meshcast.errors import LayoutError

__all__ = ["FSDP_DEFAULTS", "Gathering", "windows"]


@dataclass(frozen=True, slots=True)
class Gathering:
    """Arguments of schedules in torch 2.15 about FSDP2, checked.

    max_active_stages: stages of a rank that may be gathered at once. lookahead: "full" (all of these are
    gathered ahead), "auto" (rank r gathers r + 2 ahead), or a number for each rank of the schedule.
    defer_wait: where an order is lowered, the end of a reduction is waited for before the next one begins.
    """

    max_active_stages: int = 3
    lookahead: str | tuple[int, ...] = "full"
    defer_wait: bool = False

    def __post_init__(self) -> None:
        if not _positive(self.max_active_stages):
            raise LayoutError(
                f"max_active_stages must be an integer of at least 1, found {shown(self.max_active_stages)}"
            )
        given = self.lookahead
        if isinstance(given, str):
            if given not in ("full", "auto"):
                raise LayoutError(f'unshard_lookahead is "full", "auto" or a tuple, found {given!r}')
        elif not isinstance(given, tuple) or not all(map(_positive, given)):
            raise LayoutError(
                'unshard_lookahead is "full", "auto" or a tuple of integers of at least 1, one for each rank '
                f"of the schedule, found {shown(given)}"
            )
        if not isinstance(self.defer_wait, bool):
            raise LayoutError(f"defer_reduce_grad_wait must be True or False, found {shown(self.defer_wait)}")

    def ahead(self, rank: int, ranks: int) -> int:
        """Returns how many of the next stages a rank of the schedule gathers. Raises LayoutError for a tuple
        of another length."""
        most = self.max_active_stages
        if self.lookahead == "full":
            return most
        if self.lookahead == "auto":
            return min(rank + 2, most)
        if len(self.lookahead) != ranks:
            raise LayoutError(
                f"unshard_lookahead has {len(self.lookahead)} entries, the schedule has {ranks} ranks: give "
                "one for each"
            )
        return min(int(self.lookahead[rank]), most)


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1


FSDP_DEFAULTS = Gathering()


def windows(computing: Sequence[Sequence[int]], active: int, ahead: int) -> list[tuple[list[int], list[int]]]:
    """Returns for each action the stages to free before it and those to gather then.

    Args:
        computing: the stages that each action of the rank computes on; none where it computes nothing.
        active, ahead: see `Gathering`. An action that computes on several stages counts them all.
    """
    active = min(active, len({stage for stages in computing for stage in stages}))
    gathered: set[int] = set()
    found: list[tuple[list[int], list[int]]] = []
    for position, stages in enumerate(computing):
        if not stages:
            found.append(([], []))
            continue
        inside = _next(computing, position, active)
        wanted = inside if ahead >= active else _next(computing, position, ahead)
        freed = sorted(gathered.difference(inside))
        fetched = [stage for stage in wanted if stage not in gathered]
        gathered = gathered.intersection(inside).union(fetched)
        found.append((freed, fetched))
    return found


def _next(computing: Sequence[Sequence[int]], begin: int, count: int) -> list[int]:
    """The next `count` stages, without repetition."""
    stages: list[int] = []
    for position in range(begin, len(computing)):
        for stage in computing[position]:
            if stage not in stages:
                stages.append(stage)
        if len(stages) >= count:
            break
    return stages
