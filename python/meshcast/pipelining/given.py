"""An order of actions that was given as torch's: by a subclass, a file, one of torch's own schedules."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from torch.distributed.pipelining.schedules import REDUCE_GRAD

from meshcast.errors import LayoutError
from meshcast.pipelining.action import Action, Actions
from meshcast.pipelining.compat import actions_of, fused_pairs
from meshcast.pipelining.table import StageTable

__all__ = ["GivenOrder"]


class GivenOrder:
    """order: torch's actions of each of its ranks. lowered: with their transfers."""

    def __init__(self, order: dict[int, list[Any]], lowered: bool) -> None:
        self.order, self.lowered = order, lowered
        self.pairs = fused_pairs(order)
        actions = actions_of(order)
        text = str(sorted((rank, list(map(str, row))) for rank, row in actions.items()))
        self.digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self._rows = [row for row in actions.values() if row]

    @staticmethod
    def of(schedule: Any) -> GivenOrder | None:
        """The order that ``_load_csv`` or ``_prepare_schedule_with_comms`` got last, else ``pipeline_order``,
        else ``pipeline_order_with_comms``. None where the schedule runs what is built by its name."""
        prepared, order = schedule._given_order, schedule.pipeline_order
        if prepared is None and schedule.name is not None and order is schedule._built_order:
            return None
        given = prepared or (order, False)
        if not given[0]:
            given = getattr(schedule, "pipeline_order_with_comms", None), True
        if not given[0]:
            raise LayoutError(
                f"{type(schedule).__name__} has no actions: give it a pipeline_order, or load a file"
            )
        return GivenOrder(*given)

    def rows(self, table: StageTable) -> Actions:
        """By row of the schedule."""
        return dict(sorted((table.row_of(row[0].stage), row) for row in self._rows))

    def row_of(self, stages: set[int]) -> list[Any]:
        """torch's actions of the rank that has these stages."""
        return next(row for row in self.order.values() if any(a and a.stage_index in stages for a in row))

    def reduced(self, stages: Iterable[int]) -> list[int]:
        """The stages whose gradients are scaled: an order that holds its transfers says which."""
        told = {
            each.stage_index
            for row in self.order.values()
            for each in row
            if each is not None and each.computation_type == REDUCE_GRAD
        }
        return [stage for stage in stages if not self.lowered or stage in told]

    def side_by_side(self, row: list[Action]) -> list[Action]:
        """A lowered row with the parts of each fused action next to each other: receives between them come
        before, sends behind."""
        for _, parts in self.pairs.values():
            if parts[0] not in row:
                continue
            first, last = row.index(parts[0]), row.index(parts[-1])
            between = [each for each in row[first : last + 1] if each not in parts]
            receives = [each for each in between if each.kind.is_recv]
            sends = [each for each in between if not each.kind.is_recv]
            row = [*row[:first], *receives, *parts, *sends, *row[last + 1 :]]
        return row
