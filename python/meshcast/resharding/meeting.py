"""Ranks that share no process group of torch, and meet in a store that one of them has; the buckets in which
they send tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import LayoutError
from ..groups.parent import ParentGroup, StoreConnection
from .state_arguments import Given
from .state_run import ReshardedState, StateRun, conversation

__all__ = ["Meeting", "buckets"]

T = TypeVar("T")

_DRAIN = 1.0  # seconds that a transfer in flight gets when the meeting ends


class Meeting:
    """Ranks that the caller has brought together, and numbered. Layouts of its calls name these ranks.

    store: connected by all of them; or a function that returns a connection that nothing waits in. name: of
    this meeting in the store, one that no other has had. rank: of this process. limit: seconds, for what has
    no deadline of its own. contacts: texts of their `Contact`s, by rank: one that exits before it has come is
    noticed.
    """

    def __init__(
        self,
        store: dist.Store | Callable[[], dist.Store],
        name: str,
        ranks: Sequence[int],
        rank: int,
        limit: float,
        contacts: Mapping[int, str] | None = None,
    ) -> None:
        self.rank, self.size = rank, len(ranks)
        opened = store if callable(store) else None
        # Not opened here: a store that does not answer is the concern of the call that waits, with its limit.
        connect = StoreConnection(store, name) if opened is None else lambda: dist.PrefixStore(name, opened())
        self._parent = ParentGroup(ranks, rank, limit, name, connect)
        self._parent.expect(contacts or {})

    def move(
        self,
        state: Mapping[str, Any],
        destinations: Mapping[str, Any] | None,
        out: Mapping[str, torch.Tensor] | None = None,
        *,
        deadline: float,
        lost: Sequence[int] = (),
        still: Callable[[], bool] = lambda: True,
        wrong: Exception | None = None,
        **options: Any,
    ) -> ReshardedState:
        """reshard_state_dict among these ranks, all of which call it, with its options. deadline: by
        time.monotonic(). lost: ranks in layouts of what is held that are not of the meeting; the same on
        all. still(): asked once changes of the tensors are noticed, and at the end: whether they are what
        they were meant to be; if not, all ranks raise. wrong: why this rank has nothing to send; all ranks
        raise."""
        given = Given(state, destinations, out, lost=tuple((rank, rank) for rank in lost), **options)
        run = StateRun(self.rank, given, wrong=wrong)
        if not still():
            changed = LayoutError("the tensors have been changed since they were offered")
            run = StateRun(self.rank, given, wrong=changed)
        run.still = still
        return conversation(self._parent).run(run, deadline)

    def close(self) -> None:
        """Ends what is in flight, on all ranks."""
        self._parent.close(time.monotonic() + _DRAIN)


def buckets(items: Iterable[T], nbytes: Callable[[T], int], most: int) -> Iterator[list[T]]:
    """Yields the items of about `most` bytes together, as they come."""
    bucket: list[T] = []
    filled = 0
    for item in items:
        own = nbytes(item)
        if bucket and filled + own > most:
            yield bucket
            bucket, filled = [], 0
        bucket.append(item)
        filled += own
    if bucket:
        yield bucket
