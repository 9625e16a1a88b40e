"""Rows of reshard_state_dict: a row of integers from every rank to every rank, and texts where a row says
that there is one."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.distributed.tensor import Replicate, Shard

from ..groups.store import within
from ..layout import Layout
from ..planning.plan import Problem
from ..transfers.transfer import kept_transfer

if TYPE_CHECKING:
    from ..groups.parent import ParentGroup
    from ..groups.private import PrivateGroup

__all__ = ["Rows"]

_T = TypeVar("_T")
_OP = "reshard_state_dict"
_GRACE = 1.0  # seconds that the store is given beyond the limit of a call


class Rows:
    """The conversation of one group of ranks. All ranks make the same calls in one order."""

    def __init__(self, parent: ParentGroup, lost: Collection[int] = ()) -> None:
        """lost: ranks that make no call any more."""
        self._parent = parent
        self.ranks = sorted(parent.ranks.difference(lost))
        self._group: PrivateGroup = parent.private(self.ranks, _OP)
        self._rows = Layout(self.ranks, [Shard(0)])
        self._all = Layout(self.ranks, [Replicate()])
        self._posted: list[str] = []

    def number(self) -> int:
        """Returns the number of the next gathering, the same on all ranks."""
        return self._group.next_ordinal(0)

    def gather(self, row: Sequence[int], limit: float) -> dict[int, list[int]]:
        """Every rank's row, all of one length."""
        shape = (len(self.ranks), len(row))
        transfer = kept_transfer(self._parent, [Problem(shape, torch.int64, self._rows, self._all)], _OP)
        mine = torch.tensor([list(row)], dtype=torch.int64)
        rows = torch.empty(shape, dtype=torch.int64)
        transfer.launch([mine], [rows], limit, driven=True).wait()
        return dict(zip(self.ranks, rows.tolist(), strict=True))

    def post(self, topic: str, text: str, deadline: float) -> None:
        """deadline: by time.monotonic(); that of the call, as everywhere here."""
        self._posted.append(topic)
        self._ask(lambda: self._group.conversation.say(topic, text), deadline)

    def read(self, topic: str, ranks: Sequence[int], deadline: float) -> dict[int, str]:
        """Returns what `ranks` have posted, or are about to post."""
        if not ranks:
            return {}
        late = f"{_OP}: rank {{first}} did not say what it holds"
        return self._ask(
            lambda: self._group.conversation.hear(topic, ranks, deadline, late, _OP, "agree"), deadline
        )

    def forget(self, deadline: float) -> None:
        """Deletes what this rank posted. Only after a round that followed the reading of it."""
        for topic in self._posted:
            self._ask(partial(self._group.conversation.forget, topic), deadline)
        self._posted.clear()

    def _ask(self, call: Callable[[], _T], deadline: float) -> _T:
        """call() uses the store, and ends by itself until then where that answers."""
        left = max(deadline - time.monotonic(), 0.0)
        return within(left + _GRACE, call, f"{_OP}, what the ranks hold", rank=self._parent.rank, op=_OP)
