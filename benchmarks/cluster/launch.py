"""Starts one process per rank inside the namespaces, with the environment that torchrun would give it."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from .loopback import Loopback
from .network import Cluster, ClusterError

Network = Cluster | Loopback


@dataclass(frozen=True)
class Rank:
    rank: int
    host: int
    local_rank: int


VARIABLE = "BENCHMARK_STEPS"  # of the environment: the path of a file, see steps.py


@contextmanager
def _shown(steps: Path) -> Iterator[Callable[[], None]]:
    """Shows how far rank 0 is, at each call of what it yields. Hosts and programs of others need no meshcast:
    where it cannot be imported nothing is shown."""
    if find_spec("meshcast") is None:
        yield lambda: None
        return
    from meshcast.base.progress import Progress

    from ..steps import follow

    with Progress("the ranks", ticks=False) as shown:
        yield lambda: follow(shown, steps)


def run_ranks(
    cluster: Network,
    ranks_per_host: int,
    command: Sequence[str],
    *,
    limit: float,
    env: Mapping[str, str] | None = None,
    progress: Callable[[], None] = lambda: None,
) -> str:
    """Runs `command` on every rank (host by host, ranks_per_host each) and returns rank 0's output.

    `progress` is called a few times a second, and how far rank 0 is (steps.py) is shown. Ends all ranks as
    soon as one fails or `limit` seconds have passed, and raises ClusterError with the output of the first
    rank that failed.
    """
    ranks = [Rank(h * ranks_per_host + i, h, i) for h in range(cluster.hosts) for i in range(ranks_per_host)]
    processes: list[tuple[Rank, subprocess.Popen[bytes]]] = []
    outputs = [cluster.folder / f"rank{rank.rank}.out" for rank in ranks]
    port = cluster.port()
    steps = cluster.folder / "steps"
    steps.unlink(missing_ok=True)  # of ranks before
    try:
        for rank in ranks:
            with outputs[rank.rank].open("wb") as output:
                process = subprocess.Popen(
                    [*cluster.enter(rank.host), *command],
                    env={
                        **os.environ,
                        **(env or {}),
                        **environment(cluster, ranks_per_host, rank, port),
                        VARIABLE: str(steps),
                    },
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )
            processes.append((rank, process))
        with _shown(steps) as follow:

            def look() -> None:
                progress()
                follow()

            _wait(processes, outputs, limit, look)
    finally:
        for _, process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    return outputs[0].read_text(errors="replace")


def environment(cluster: Network, ranks_per_host: int, rank: Rank, port: int) -> dict[str, str]:
    """What torchrun sets, and the interfaces to use."""
    return {
        "OMP_NUM_THREADS": "1",
        "RANK": str(rank.rank),
        "WORLD_SIZE": str(cluster.hosts * ranks_per_host),
        "LOCAL_RANK": str(rank.local_rank),
        "LOCAL_WORLD_SIZE": str(ranks_per_host),
        "GROUP_RANK": str(rank.host),
        "MASTER_ADDR": cluster.address(0),
        "MASTER_PORT": str(port),
        "GLOO_SOCKET_IFNAME": cluster.interfaces()[0],
        "MESHCAST_IFNAMES": ",".join(cluster.interfaces()),
        "RES_OPTIONS": "attempts:0",  # no name server answers in there, and none is needed
        **cluster.environment(rank.host),
    }


def _wait(
    processes: Sequence[tuple[Rank, subprocess.Popen[bytes]]],
    outputs: Sequence[Path],
    limit: float,
    progress: Callable[[], None],
) -> None:
    end = time.monotonic() + limit
    while True:
        running = any(process.poll() is None for _, process in processes)
        for rank, process in processes:
            if process.poll() not in (None, 0):
                tail = outputs[rank.rank].read_text(errors="replace").splitlines()[-30:]
                raise ClusterError(
                    f"rank {rank.rank} ended with status {process.returncode}:\n" + "\n".join(tail)
                )
        progress()
        if not running:
            return
        if time.monotonic() > end:
            raise ClusterError(f"not complete after {limit:.0f} s; all ranks were ended")
        time.sleep(0.2)
