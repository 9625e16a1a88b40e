"""One rank of a pair: does what it is told over a socket, see rounds.Pair. Uses meshcast only where that is
the carrier or the backend, so that other interpreters can run it.

python -m benchmarks.calls.rank CARRIER RANK SOCKET
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from .cases import CARRIERS
from .messages import Buffers, Messages, TorchMessages

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
