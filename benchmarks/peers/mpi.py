"""Open MPI on the emulated cluster: the same tasks moved by its broadcasts or messages, see mpi_reshard.c.

A peer that is not installed is named as such, never left out in silence.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meshcast
import torch
from meshcast import Topology
from meshcast.bench.cases import RANKS_PER_HOST, Case

from ..cluster import Cluster

_SOURCE = Path(__file__).with_name("mpi_reshard.c")
_BUILD = Path(__file__).resolve().parents[2] / "build" / "peers"
_LIMIT = 120.0  # seconds, of one method of one case


@dataclass(frozen=True)
class MpiPeer:
    """One way to call Open MPI."""

    name: str
    compiler: str
    launcher: str
    package: str
    method: str  # of mpi_reshard
    options: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """What to install, or None."""
        if shutil.which(self.compiler) and shutil.which(self.launcher):
            return None
        return f"{self.name}: not installed: apt-get install {self.package}"

    def run(self, cluster: Cluster, case: Case, topology: Topology, repeats: int) -> dict[str, Any]:
        """Seconds, busy cores and wrong elements of the repeats. Raises RuntimeError with the output where
        the program fails."""
        with tempfile.TemporaryDirectory(prefix="meshcast-mpi-") as folder:
            problem, agent = Path(folder, "problem.txt"), Path(folder, "agent.sh")
            problem.write_text(_problem(case, topology))
            agent.write_text(_AGENT.format(prefix=cluster.namespace(0)[:-1]))
            agent.chmod(0o755)
            command = [
                str(agent), cluster.address(0), "exec", self.launcher,
                *self._launch_options(cluster, str(agent)), *self.options,
                str(_built(self.compiler)), str(problem), self.method, str(repeats),
            ]  # fmt: skip
            env = {**os.environ, "TMPDIR": folder, "RES_OPTIONS": "attempts:0"}
            done = subprocess.run(
                command, env=env, capture_output=True, text=True, timeout=_LIMIT, stdin=subprocess.DEVNULL
            )
            lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
            if done.returncode != 0 or not lines:
                said = (done.stderr or done.stdout)[-600:]
                raise RuntimeError(f"{self.name}: status {done.returncode}: {said}")
            return json.loads(lines[0])

    def _launch_options(self, cluster: Cluster, agent: str) -> list[str]:
        world = str(cluster.hosts * RANKS_PER_HOST)
        hosts = ",".join(f"{cluster.address(host)}:{RANKS_PER_HOST}" for host in range(cluster.hosts))
        return [
            "--allow-run-as-root", "--host", hosts, "-np", world, "--map-by", "slot", "--bind-to", "none",
            "--mca", "plm_rsh_agent", agent, "--mca", "btl", "tcp,self,vader", "--mca", "pml", "ob1",
            "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0",
            "--mca", "mpi_yield_when_idle", "1",
        ]  # fmt: skip


# Called like ssh: options, an address, a command. The address tells the namespace. A host name of its own
# keeps the shared-memory files of emulated hosts apart, which are named after it.
_AGENT = """#!/bin/bash
while [ "${{1#-}}" != "$1" ]; do shift; done
host=${{1##*.}}
shift
exec ip netns exec {prefix}$((host - 1)) unshare --uts /bin/sh -c "hostname emulated$host; $*"
"""

_OPEN_MPI = ("mpicc.openmpi", "mpirun.openmpi", "libopenmpi-dev openmpi-bin")
_PIPELINE = ("--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_bcast_algorithm", "3",
             "--mca", "coll_tuned_bcast_algorithm_segmentsize", str(128 << 10))  # fmt: skip

PEERS = [
    MpiPeer("Open MPI bcast", *_OPEN_MPI, "bcast"),
    MpiPeer("Open MPI pipeline", *_OPEN_MPI, "bcast", _PIPELINE),
    MpiPeer("Open MPI isend", *_OPEN_MPI, "isend"),
]

_MPICH = """MPICH 4.0 as Debian builds it: to UCX, below it, hosts that share a kernel are one machine,
and it copies through shared memory past the emulated links; with UCX_TLS=tcp,self it hung at 12 ranks"""
NOT_MEASURED = [_MPICH.replace("\n", " ")]
"""Peers that cannot be compared here, and why."""


def _built(compiler: str) -> Path:
    program = _BUILD / f"mpi_reshard.{compiler}"
    if not program.exists() or program.stat().st_mtime < _SOURCE.stat().st_mtime:
        _BUILD.mkdir(parents=True, exist_ok=True)
        subprocess.run(
            [compiler, "-O2", "-std=gnu11", "-w", str(_SOURCE), "-o", str(program)], check=True, timeout=120
        )
    return program


def _problem(case: Case, topology: Topology) -> str:
    """The plan's unit tasks; holders take turns as senders."""
    plan = meshcast.plan(case.shape, torch.int32, case.src, case.dst, topology=topology)
    lines = [f"{len(case.shape)} {' '.join(map(str, case.shape))}", str(len(plan.tasks))]
    for number, task in enumerate(plan.tasks):
        box = " ".join(f"{lo} {hi}" for lo, hi in task.box)
        sender = task.holders[number % len(task.holders)]
        lines.append(f"{box} {sender} {len(task.receivers)} {' '.join(map(str, task.receivers))}")
    return "\n".join(lines) + "\n"
