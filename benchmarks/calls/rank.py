"""Messages between two ranks, and those of torch's backends. One rank of a pair does what it is told over a
socket, see rounds.Pair. Uses meshcast only where that is the carrier or the backend, so that other
interpreters can run it.

python -m benchmarks.calls.rank CARRIER RANK SOCKET
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .cases import CARRIERS

__all__ = ["Buffers", "Messages", "TorchMessages", "serve"]


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


_LIMIT = timedelta(seconds=60)


def _made(carrier: str, buffers: Buffers) -> Callable[[str], Messages]:
    """The ways of a carrier by kind, made when they are first asked for."""
    backend = CARRIERS[carrier].backend
    if backend:
        if backend != "gloo":
            import commux

            commux.register()
        return lambda kind: TorchMessages(buffers, backend, fresh=kind == "gloo-fresh")
    from .ours import KINDS

    return lambda kind: KINDS[kind](buffers)


def serve(made: Callable[[str], Messages], orders: Any) -> None:
    """Carries out one order after the other: WHAT BYTES WINDOW COUNT KIND, as orders.h does."""
    ways: dict[str, Messages] = {}
    for line in orders:
        what, *numbers, kind = line.split()
        nbytes, window, count = (int(number) for number in numbers)
        if kind not in ways:
            ways[kind] = made(kind)
        messages = ways[kind]
        if what == "check":
            answer = "right" if _check(messages, nbytes, window) else "wrong values"
        else:
            seconds, cpu = _measured(messages, what, count)
            answer = f"{seconds} {cpu}"
        messages.settle()
        orders.write(f"{answer}\n")
        orders.flush()


def _check(messages: Messages, nbytes: int, window: int) -> bool:
    messages.prepare(nbytes, window)
    for _ in range(2):  # connects, and takes page faults
        messages.there()
        messages.back()
        messages.batch()
    messages.back()  # so that both have all
    return messages.right()


def _measured(messages: Messages, what: str, count: int) -> tuple[float, float]:
    messages.there()  # begins when both are here
    messages.back()
    begin, used = time.perf_counter(), time.process_time()
    if what == "latency":
        for _ in range(count):
            messages.there()
            messages.back()
    else:
        for _ in range(count):
            messages.batch()
        messages.back()  # so that rank 0 ends when all has arrived
    cpu = time.process_time() - used
    return time.perf_counter() - begin, cpu


def _store(rank: int, port: Path) -> dist.TCPStore:
    """Rank 0's, on a port that it finds free and writes to the file `port`."""
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=_LIMIT)
        partial = port.with_suffix(".partial")
        partial.write_text(str(store.port))
        partial.rename(port)
        return store
    end = time.monotonic() + _LIMIT.total_seconds()
    while not port.exists():
        if time.monotonic() > end:
            raise RuntimeError("rank 0 did not come")
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), is_master=False, timeout=_LIMIT)


def main() -> None:
    carrier, rank, path = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torch.set_num_threads(1)
    store = _store(rank, Path(f"{path}.port"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=_LIMIT)
    made = _made(carrier, Buffers(rank))
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        orders = connection.makefile("rw")
        orders.write(f"{rank}\n")
        orders.flush()
        with torch.no_grad():
            serve(made, orders)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
