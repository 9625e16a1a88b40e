"""One rank of a pair: does what it is told over a socket, see pair.py. Uses meshcast only where that is the
way, so that other interpreters can run it.

python -m benchmarks.transports.rank WAY RANK SOCKET STORE_PORT
"""

from __future__ import annotations

import socket
import sys
import time
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .cases import WAYS

_LIMIT = timedelta(seconds=60)


class Messages(Protocol):
    """Messages between ranks 0 and 1, in place. Both ranks call each method."""

    def prepare(self, nbytes: int, window: int) -> None:
        """Makes buffers, of which the ones that are sent have values that differ by rank."""
        ...

    def there(self) -> None:
        """From 0 to 1."""
        ...

    def back(self) -> None: ...
    def batch(self) -> None:
        """A window of messages from 0 to 1, all in flight at once."""
        ...

    def arrived(self) -> list[torch.Tensor]:
        """What the messages of this rank were written into."""
        ...


def pattern(nbytes: int, rank: int) -> torch.Tensor:
    return torch.arange(nbytes // 4, dtype=torch.int32) + rank


class TorchMessages:
    """isend and irecv of a backend of torch."""

    def __init__(self, rank: int, backend: str) -> None:
        self._rank = rank
        if backend != "gloo":
            import commux

            commux.register()
        self._group = dist.new_group([0, 1], backend=backend)

    def prepare(self, nbytes: int, window: int) -> None:
        self._mine = pattern(nbytes, self._rank)
        self._outs = [torch.zeros_like(self._mine) for _ in range(window if self._rank else 1)]
        self._window = window

    def _one(self, sender: int) -> None:
        if self._rank == sender:
            dist.send(self._mine, 1 - sender, group=self._group)
        else:
            dist.recv(self._outs[0], sender, group=self._group)

    def there(self) -> None:
        self._one(0)

    def back(self) -> None:
        self._one(1)

    def batch(self) -> None:
        if self._rank == 0:
            works = [dist.isend(self._mine, 1, group=self._group) for _ in range(self._window)]
        else:
            works = [dist.irecv(out, 0, group=self._group) for out in self._outs]
        for work in works:
            work.wait()

    def arrived(self) -> list[torch.Tensor]:
        return self._outs


class MeshcastMessages:
    """Resharders from rank 0 to rank 1 and back."""

    def __init__(self, rank: int) -> None:
        from torch.distributed.device_mesh import DeviceMesh

        self._rank = rank
        self._meshes = [
            DeviceMesh("cpu", torch.tensor([each]), _init_backend=False, _rank=rank) for each in (0, 1)
        ]

    def prepare(self, nbytes: int, window: int) -> None:
        import meshcast
        from torch.distributed.tensor import DTensor, Replicate

        def on_mesh(values: torch.Tensor) -> DTensor:
            return DTensor.from_local(values, self._meshes[self._rank], [Replicate()], run_check=False)

        specs = [
            meshcast.TensorSpec((nbytes // 4,), torch.int32, mesh, [Replicate()]) for mesh in self._meshes
        ]
        here, there = self._meshes
        self._forth = meshcast.Resharder(specs[0], there, [Replicate()], reuse_output=True)
        self._home = meshcast.Resharder(specs[1], here, [Replicate()], reuse_output=True)
        self._starts = meshcast.Resharder(specs[0], there, [Replicate()])
        self._given = on_mesh(pattern(nbytes, self._rank))
        self._outs: list[Any] = [None] * window
        if self._rank == 1:
            zeros = [torch.zeros(nbytes // 4, dtype=torch.int32) for _ in self._outs]
            self._outs = [on_mesh(each) for each in zeros]
        self._last: Any = None

    def there(self) -> None:
        found = self._forth.run(self._given if self._rank == 0 else None)
        self._last = found if self._rank == 1 else self._last

    def back(self) -> None:
        found = self._home.run(self._given if self._rank == 1 else None)
        self._last = found if self._rank == 0 else self._last

    def batch(self) -> None:
        given = self._given if self._rank == 0 else None
        for handle in [self._starts.start(given, out=out) for out in self._outs]:
            handle.wait()

    def arrived(self) -> list[torch.Tensor]:
        outs = self._outs if self._rank == 1 else []
        return [each.to_local() for each in (self._last, *outs)]


def serve(messages: Messages, rank: int, orders: Any) -> None:
    """Carries out one order after the other: WHAT BYTES WINDOW COUNT, as mpi_messages.c does."""
    for line in orders:
        what, *numbers = line.split()
        nbytes, window, count = (int(number) for number in numbers)
        if what == "check":
            messages.prepare(nbytes, window)
            for _ in range(2):  # connects, and takes page faults
                messages.there()
                messages.back()
                messages.batch()
            wanted = pattern(nbytes, 1 - rank)
            wrong = any(not torch.equal(found, wanted) for found in messages.arrived())
            orders.write("wrong values\n" if wrong else "right\n")
            orders.flush()
            continue
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
        orders.write(f"{time.perf_counter() - begin} {cpu}\n")
        orders.flush()


def main() -> None:
    way, rank, path, port = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0, timeout=_LIMIT)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=_LIMIT)
    backend = WAYS[way].backend
    messages: Messages = TorchMessages(rank, backend) if backend else MeshcastMessages(rank)
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        orders = connection.makefile("rw")
        orders.write(f"{rank}\n")
        orders.flush()
        with torch.no_grad():
            serve(messages, rank, orders)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
