"""MPI on the emulated cluster: the same tasks moved by its broadcasts or messages, see mpi_reshard.c."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from meshcast import Topology
from meshcast.bench.cases import Case

from ..cluster import Cluster
from .launch import Mpi, run

OPEN_MPI = Mpi("mpicc.openmpi", "mpirun.openmpi", "libopenmpi-dev openmpi-bin")
MPICH = Mpi("mpicc.mpich", "mpirun.mpich", "mpich libmpich-dev")
_SOURCE = Path(__file__).with_name("mpi_reshard.c")
_PIPELINE = ("--mca", "coll_tuned_use_dynamic_rules", "1", "--mca", "coll_tuned_bcast_algorithm", "3",
             "--mca", "coll_tuned_bcast_algorithm_segmentsize", str(128 << 10))  # fmt: skip
# To UCX, below MPICH, hosts that share a kernel are one machine: left to itself it copies through memory
# past the emulated links. Restricted to TCP it hangs in MPI_Finalize with several ranks on a host.
_OVER_TCP = {
    "UCX_TLS": "tcp,self", "UCX_NET_DEVICES": "eth0", "MPIR_CVAR_POLLS_BEFORE_YIELD": "1",
    "MPI_RESHARD_SKIP_FINALIZE": "1",
}  # fmt: skip


@dataclass(frozen=True)
class MpiPeer:
    """One way to call one MPI library."""

    name: str
    what: str
    mpi: Mpi
    method: str  # of mpi_reshard
    options: tuple[str, ...] = ()
    env: dict[str, str] = field(default_factory=dict)
    any_status: bool = False  # its launcher calls ranks that end without MPI_Finalize failed

    def missing(self) -> str:
        return self.mpi.missing()

    def why_not(self, case: Case) -> str:
        if len(case.tensors) > 1:
            return "the program moves one tensor"
        return "the program does not add up" if case.src.has_partial else ""

    def run(
        self, cluster: Cluster, case: Case, topology: Topology, repeats: int, slow: float
    ) -> dict[str, Any]:
        return run(
            self.mpi, cluster, case.setting.ranks_per_host, self.options, self.mpi.build(_SOURCE),
            _problem(case, topology), [self.method, str(repeats), str(slow)], self.env,
            self.any_status,
        )  # fmt: skip


PEERS = [
    MpiPeer("Open MPI bcast", "the same unit tasks by MPI_Bcast of Open MPI, its own choice of algorithm",
            OPEN_MPI, "bcast"),
    MpiPeer("Open MPI pipeline", "MPI_Bcast with Open MPI's pipeline algorithm forced (128 KiB segments)",
            OPEN_MPI, "bcast", _PIPELINE),
    MpiPeer("Open MPI isend", "a message per box and receiver", OPEN_MPI, "isend"),
    MpiPeer("MPICH bcast", "the same unit tasks by MPI_Bcast of MPICH, over TCP of UCX", MPICH, "bcast",
            env=_OVER_TCP, any_status=True),
]  # fmt: skip


def _problem(case: Case, topology: Topology) -> str:
    """The plan's unit tasks; holders take turns as senders."""
    plan = case.plan(topology)
    lines = [f"{len(case.shape)} {' '.join(map(str, case.shape))}", str(len(plan.tasks))]
    for number, task in enumerate(plan.tasks):
        box = " ".join(f"{lo} {hi}" for lo, hi in task.box)
        sender = task.holders[number % len(task.holders)]
        lines.append(f"{box} {sender} {len(task.receivers)} {' '.join(map(str, task.receivers))}")
    return "\n".join(lines) + "\n"
