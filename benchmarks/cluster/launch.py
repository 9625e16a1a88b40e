"""Starts one process per rank inside the namespaces, with the environment that torchrun would give it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .network import Cluster, ClusterError

_PORT = 29511


@dataclass(frozen=True)
class Rank:
    rank: int
    host: int
    local_rank: int


def run_ranks(
    cluster: Cluster,
    ranks_per_host: int,
    command: Sequence[str],
    *,
    limit: float,
    env: Mapping[str, str] | None = None,
) -> str:
    """Runs `command` on every rank (host by host, ranks_per_host each) and returns rank 0's standard output.

    Ends all ranks as soon as one fails or `limit` seconds have passed, and raises ClusterError with the
    output of the first rank that failed.
    """
    ranks = [Rank(h * ranks_per_host + i, h, i) for h in range(cluster.hosts) for i in range(ranks_per_host)]
    world = len(ranks)
    processes: list[tuple[Rank, subprocess.Popen[str]]] = []
    try:
        for rank in ranks:
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                **(env or {}),
                "RANK": str(rank.rank),
                "WORLD_SIZE": str(world),
                "LOCAL_RANK": str(rank.local_rank),
                "LOCAL_WORLD_SIZE": str(ranks_per_host),
                "MASTER_ADDR": cluster.address(0),
                "MASTER_PORT": str(_PORT),
                "GLOO_SOCKET_IFNAME": "eth0",
            }
            process = subprocess.Popen(
                ["ip", "netns", "exec", cluster.namespace(rank.host), sys.executable, *command],
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )
            processes.append((rank, process))
        return _collect(processes, limit)
    finally:
        for _, process in processes:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def _collect(processes: Sequence[tuple[Rank, subprocess.Popen[str]]], limit: float) -> str:
    end = time.monotonic() + limit
    while any(process.poll() is None for _, process in processes):
        failed = [(rank, process) for rank, process in processes if process.poll() not in (None, 0)]
        if failed:
            rank, process = failed[0]
            raise ClusterError(f"rank {rank.rank} ended with status {process.returncode}:\n{_tail(process)}")
        if time.monotonic() > end:
            raise ClusterError(f"not through after {limit:.0f} s; all ranks were ended")
        time.sleep(0.05)
    for rank, process in processes:
        if process.returncode != 0:
            raise ClusterError(f"rank {rank.rank} ended with status {process.returncode}:\n{_tail(process)}")
    first = processes[0][1]
    assert first.stdout is not None
    return first.stdout.read()


def _tail(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return "\n".join(process.stdout.read().splitlines()[-30:])
