"""Ranks that share no process group of torch, and meet in a store that one of them has; the buckets in which
they send tensors."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from typing_extensions import Unpack

from ..groups.parent import ParentGroup, StoreConnection
from ..resharding.state_arguments import Given
from ..resharding.state_dict import StateOptions, Where
from ..resharding.state_run import ReshardedState, StateRun, conversation

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["Meeting", "buckets"]

T = TypeVar("T")

_DRAIN = 1.0  # seconds that a transfer in flight gets when the meeting ends


class Meeting:
    """Ranks 0 to size - 1, numbered by the caller that brings them together. Layouts of its calls name these
    ranks.

    store: connected by all of them. name: of this meeting in the store, one that no other has had.
    limit: seconds, for what has no deadline of its own.
    """

    def __init__(self, store: dist.Store, name: str, size: int, rank: int, limit: float) -> None:
        self.rank, self.size = rank, size
        self._parent = ParentGroup(range(size), rank, limit, name, StoreConnection(store, name))

    def move(
        self,
        state: Mapping[str, Any],
        destinations: Mapping[str, Where] | None,
        out: Mapping[str, torch.Tensor] | None = None,
        *,
        deadline: float,
        wrong: Exception | None = None,
        **options: Unpack[StateOptions],
    ) -> ReshardedState:
        """reshard_state_dict among these ranks, all of which call it. deadline: by time.monotonic(). wrong:
        why this rank has nothing to send; all ranks raise."""
        run = StateRun(self.rank, Given(state, destinations, out, **options), wrong=wrong)
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
