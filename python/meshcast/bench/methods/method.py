"""One way to move the tensors of a case."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..cases import Case
from ..groups import Groups
from ..move import CaseBatch


def applies(_: Case) -> str:
    return ""


def no_groups(_case: Case, _groups: Groups) -> None:
    return None


@dataclass(frozen=True)
class Method:
    """run: called by all ranks of either mesh, fills every move.destination. why_not: why it cannot do a
    case, or "". setup: called before by all ranks of the job, makes groups; run finds what it returns in
    batch.kept[name]. adds_up: it takes a Partial source; for others the source mesh adds up by all_reduce
    first, as part of the measured time. prepares: its first round does what later ones reuse (connections,
    plans, imports), so that it tells nothing."""

    name: str
    run: Callable[[CaseBatch], None]
    what: str  # for the table that explains the methods
    why_not: Callable[[Case], str] = applies
    setup: Callable[[Case, Groups], Any] = no_groups
    adds_up: bool = False
    often: bool = False  # repeated as often as was asked for; the others fewer times
    prepares: bool = True
