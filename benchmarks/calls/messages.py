"""Messages between two ranks, as a benchmark asks for them, and those of torch's backends."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch
import torch.distributed as dist


class Messages(Protocol):
    """Messages between ranks 0 and 1. Both ranks call each method."""

    def prepare(self, nbytes: int, window: int) -> None:
        """Makes what messages of a size need. What is sent has values that differ by rank."""
        ...

    def there(self) -> None:
        """From 0 to 1."""
        ...

    def back(self) -> None: ...
    def batch(self) -> None:
        """A window of messages from 0 to 1, all in flight at once."""
        ...

    def right(self) -> bool:
        """Returns whether the last messages brought this rank what was sent."""
        ...

    def settle(self) -> None:
        """Ends what is still open, and lets go of results, behind the clock."""
        ...


class Buffers:
    """The tensors that the ways of a process share: they are measured by turns, and 64 MiB of each would not
    fit. Values are floats that count from the number of the rank: up to 2**24 they are exact."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self._outs: list[torch.Tensor] = []
        self.mine = self.wanted = torch.empty(0)

    def prepare(self, nbytes: int, window: int) -> list[torch.Tensor]:
        """What can be received into, with zeros: a tensor for each message in flight on rank 1."""
        count = nbytes // 4
        places = window if self.rank else 1
        if self.mine.numel() != count or len(self._outs) != places:
            self.mine, self.wanted = (
                torch.arange(count, dtype=torch.float32) + rank for rank in (self.rank, 1 - self.rank)
            )
            self._outs = [torch.empty(count) for _ in range(places)]
        for out in self._outs:
            out.zero_()
        return self._outs

    def right(self, found: Iterable[torch.Tensor]) -> bool:
        return all(torch.equal(each, self.wanted) for each in found)


class TorchMessages:
    """send, recv, isend and irecv of a backend of torch. fresh: into new tensors."""

    def __init__(self, buffers: Buffers, backend: str, *, fresh: bool = False) -> None:
        self._buffers, self._rank, self._fresh = buffers, buffers.rank, fresh
        self._group = dist.new_group([0, 1], backend=backend)

    def prepare(self, nbytes: int, window: int) -> None:
        self._outs = self._buffers.prepare(nbytes, window)
        self._mine = self._buffers.mine
        self._window = window
        self._one = self._outs[0]

    def _empty(self) -> torch.Tensor:
        return torch.empty(self._mine.numel())

    def _message(self, sender: int) -> None:
        if self._rank == sender:
            dist.send(self._mine, 1 - sender, group=self._group)
            return
        if self._fresh:
            self._one = torch.empty(0)
            self._one = self._empty()
        dist.recv(self._one, sender, group=self._group)

    def there(self) -> None:
        self._message(0)

    def back(self) -> None:
        self._message(1)

    def batch(self) -> None:
        if self._rank == 0:
            works = [dist.isend(self._mine, 1, group=self._group) for _ in range(self._window)]
        else:
            if self._fresh:
                self._outs = []
                self._outs = [self._empty() for _ in range(self._window)]
            works = [dist.irecv(out, 0, group=self._group) for out in self._outs]
        for work in works:
            work.wait()

    def right(self) -> bool:
        return self._buffers.right([self._one, *(self._outs if self._rank else ())])

    def settle(self) -> None:
        if self._fresh:
            self._one, self._outs = torch.empty(0), []
