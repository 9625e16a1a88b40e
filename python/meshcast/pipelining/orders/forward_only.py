"""Forwards alone: what evaluation runs.

n stages, m micro-batches, free transfers: makespan (m + n - 1) F; nothing is held for a backward.
"""

from __future__ import annotations

from meshcast.pipelining.action import ActionKind, Actions
from meshcast.pipelining.orders.gpipe import gpipe
from meshcast.pipelining.orders.spec import OrderSpec


def forward_only(actions: Actions) -> Actions:
    """Returns what evaluation runs of a schedule: its forwards in their order."""
    return {rank: [action for action in row if action.kind is ActionKind.F] for rank, row in actions.items()}


def _of_gpipe(stages: int, microbatches: int) -> Actions:
    return forward_only(gpipe(stages, microbatches))


SPEC = OrderSpec("ForwardOnly", _of_gpipe)
