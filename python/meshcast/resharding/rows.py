"""The rounds in which the ranks of a call agree.

In a round every rank sends a row of numbers and sees the rows of all. Texts are posted in the rendezvous
store, by one of the ranks that have the same. A rank that has failed says so in its row and posts why, so
that all ranks raise in the same round.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import torch
from torch.distributed.tensor import Replicate, Shard

from ..errors import Caller, PlanMismatchError
from ..groups.parent import ParentGroup
from ..groups.store import within
from ..layout import Layout
from ..planning.plan import Problem
from ..transfers.transfer import kept_transfer
from .state_entries import OP

if TYPE_CHECKING:
    from ..groups.private import PrivateGroup

__all__ = ["REFUSED", "Rounds", "Rows", "left"]


_T = TypeVar("_T")
_GRACE = 1.0  # seconds that the store is given beyond the limit of a call
REFUSED = -2  # first in the row of a rank that has failed


class Rows:
    """Rows and texts that the ranks of a group exchange. All ranks make the same calls in one order."""

    def __init__(self, parent: ParentGroup, lost: Collection[int] = ()) -> None:
        """lost: ranks that make no call any longer."""
        self._parent, self.rank = parent, parent.rank
        self.ranks = sorted(parent.ranks.difference(lost))
        self._group: PrivateGroup = parent.private(self.ranks)
        self._rows = Layout(self.ranks, [Shard(0)])
        self._all = Layout(self.ranks, [Replicate()])
        self._posted: list[str] = []

    def number(self) -> int:
        """Returns the number of the next gathering, the same on all ranks."""
        return self._group.next_ordinal(0)

    def gather(self, row: Sequence[int], limit: float) -> dict[int, list[int]]:
        """Every rank's row, all of one length."""
        shape = (len(self.ranks), len(row))
        transfer = kept_transfer(self._parent, [Problem(shape, torch.int64, self._rows, self._all)], OP)
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
        late = f"{OP}: rank {{first}} did not say what it holds"
        return self._ask(
            lambda: self._group.conversation.hear(topic, ranks, deadline, late, OP, "agree"), deadline
        )

    def forget(self, deadline: float) -> None:
        """Deletes what this rank posted. Only after a round that followed the reading of it."""
        for topic in self._posted:
            self._ask(partial(self._group.conversation.forget, topic), deadline)
        self._posted.clear()

    def _ask(self, call: Callable[[], _T], deadline: float) -> _T:
        """call() uses the store, and ends by itself until then where that answers."""
        left = max(deadline - time.monotonic(), 0.0)
        return within(left + _GRACE, call, "what the ranks hold", Caller(OP, self.rank, "agree"))


class Rounds:
    """The rounds of one call. number: of the call among those of its group; deadline: by time.monotonic()."""

    def __init__(self, rows: Rows, deadline: float) -> None:
        self._rows, self.deadline = rows, deadline
        self.number = rows.number()

    def gather(
        self, topic: str, failure: Exception | None, row: Sequence[int], what: str, *, last: bool = False
    ) -> dict[int, list[int]]:
        """Returns every rank's row. Where a rank has failed, all raise; what: that it could not do. A row
        does not begin with REFUSED."""
        topic = f"{topic} {self.number} failed"
        row = row if failure is None else (REFUSED, *row[1:])
        rows = self._rows.gather(row, left(self.deadline))
        if last:
            self._rows.forget(self.deadline)
        if failure is not None:
            self._rows.post(topic, str(failure), self.deadline)
            raise failure
        for rank, theirs in rows.items():
            if theirs[0] == REFUSED:
                why = self._rows.read(topic, [rank], self.deadline)[rank]
                raise PlanMismatchError(f"rank {rank} {what}: {why}", peer=rank, phase="agree")
        return rows

    def texts(
        self, topic: str, mine: Callable[[], str], keys: Mapping[int, Hashable]
    ) -> tuple[dict[int, str], dict[int, int]]:
        """Returns the text of each rank that posts one, and for each rank the one that posted its text.

        keys: of the ranks that have a text, the same on all ranks. Those with one key have one text, which
        the first of them posts.
        """
        topic, rank = f"{topic} {self.number}", self._rows.rank
        first: dict[Hashable, int] = {}
        speakers = {other: first.setdefault(key, other) for other, key in keys.items()}
        own = {}
        if rank in speakers:
            own[speakers[rank]] = mine()
            if speakers[rank] == rank:
                self._rows.post(topic, own[rank], self.deadline)
        read = self._rows.read(topic, sorted({*speakers.values()}.difference(own)), self.deadline)
        return read | own, speakers


def left(deadline: float) -> float:
    """Seconds until then, for a call that needs a positive limit."""
    return max(deadline - time.monotonic(), 1e-3)
