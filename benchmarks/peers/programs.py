"""Programs outside torch to compare with, in C: built once, started on the hosts of the emulated cluster,
ended in time. MPI and ScaLAPACK move the tensor of a case (mpi_reshard.c, scalapack_reshard.c); MPI and UCX
alone exchange messages (mpi_messages.c, ucp_messages.c)."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

from meshcast import Layout, Topology
from meshcast.bench.cases import Case
from meshcast.errors import MeshcastError
from meshcast.groups.network import library

from ..cluster import Cluster, cores_of
from ..harness import ROOT

_BUILD = ROOT / "build" / "peers"
_LIMIT = 90.0  # seconds, of one method of one case

# Called like ssh: options, an address, a command. The address tells the namespace. A host name of its own
# keeps the shared-memory files of emulated hosts apart, which are named after it.
_AGENT = """#!/bin/bash
while [ "${{1#-}}" != "$1" ]; do shift; done
host=${{1##*.}}
shift
cores=({cores})
exec taskset -c ${{cores[host - 1]}} ip netns exec {prefix}$((host - 1)) \\
  unshare --uts /bin/sh -c "hostname emulated$host; $*"
"""


@dataclass(frozen=True)
class Mpi:
    """One of the MPI libraries. libraries: what else a program is linked with."""

    compiler: str
    launcher: str
    package: str
    libraries: tuple[str, ...] = ()

    def missing(self) -> str:
        if shutil.which(self.compiler) and shutil.which(self.launcher):
            return ""
        return f"not installed: apt-get install {self.package}"

    def build(self, source: str) -> Path:
        return compiled([self.compiler], source, self.libraries)


def compiled(compiler: Sequence[str], name: str, libraries: Sequence[str] = ()) -> Path:
    """The program of a source in C of this folder and of its headers, built where it is older than they.
    Raises RuntimeError with what the compiler says."""
    source = Path(__file__).with_name(name)
    program = _BUILD / f"{source.stem}.{compiler[0]}"
    newest = max(path.stat().st_mtime for path in (source, *source.parent.glob("*.h")))
    if not program.exists() or program.stat().st_mtime < newest:
        _BUILD.mkdir(parents=True, exist_ok=True)
        command = [*compiler, "-O2", "-std=gnu11", "-w", str(source), "-o", str(program), *libraries]
        built = subprocess.run(command, capture_output=True, text=True, timeout=120)
        if built.returncode != 0:
            raise RuntimeError(f"{source.name} does not compile: {built.stderr[-600:]}")
    return program


def open_mpi_options(cluster: Cluster, ranks_per_host: int, agent: str) -> list[str]:
    world = str(cluster.hosts * ranks_per_host)
    hosts = ",".join(f"{cluster.address(host)}:{ranks_per_host}" for host in range(cluster.hosts))
    return [
        "--allow-run-as-root", "--host", hosts, "-np", world, "--map-by", "slot", "--bind-to", "none",
        "--mca", "plm_rsh_agent", agent, "--mca", "btl", "tcp,self,vader", "--mca", "pml", "ob1",
        "--mca", "btl_tcp_if_include", "eth0", "--mca", "oob_tcp_if_include", "eth0",
        "--mca", "mpi_yield_when_idle", "1",
    ]  # fmt: skip


def mpich_options(cluster: Cluster, ranks_per_host: int, agent: str) -> list[str]:
    world = str(cluster.hosts * ranks_per_host)
    hosts = ",".join(f"{cluster.address(host)}:{ranks_per_host}" for host in range(cluster.hosts))
    return [
        "-hosts", hosts, "-n", world, "-launcher", "ssh", "-launcher-exec", agent, "-iface", "eth0",
        "-bind-to", "none",
    ]  # fmt: skip


def run(
    mpi: Mpi, cluster: Cluster, ranks_per_host: int, options: Sequence[str], program: Path, problem: str,
    arguments: Sequence[str], env: dict[str, str], any_status: bool = False,
) -> dict[str, Any]:  # fmt: skip
    """What the program prints as JSON on rank 0. `problem` is the text of its first argument, a file. Raises
    RuntimeError with its output where it fails or does not end. any_status: what it printed counts, however
    it then ended."""
    before = cluster.processes()  # the ranks of the benchmark itself, asleep
    with tempfile.TemporaryDirectory(prefix="mpi-", dir=cluster.folder) as folder:
        agent, path = Path(folder, "agent.sh"), Path(folder, "problem.txt")
        path.write_text(problem)
        cores = " ".join(cores_of(host, cluster.hosts) for host in range(cluster.hosts))
        agent.write_text(_AGENT.format(prefix=cluster.namespace(0)[:-1], cores=cores))
        agent.chmod(0o755)
        launch = mpich_options if "mpich" in mpi.launcher else open_mpi_options
        command = [
            str(agent), cluster.address(0), "exec", mpi.launcher,
            *launch(cluster, ranks_per_host, str(agent)), *options, str(program), str(path), *arguments,
        ]  # fmt: skip
        process = subprocess.Popen(
            command, env={**os.environ, "TMPDIR": folder, "RES_OPTIONS": "attempts:0", **env},
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            out, err = process.communicate(timeout=_LIMIT)
        except subprocess.TimeoutExpired:
            raise RuntimeError(f"{mpi.launcher} did not end within {_LIMIT:.0f} s") from None
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            cluster.kill(cluster.processes() - before)  # whatever it started elsewhere
            process.wait()
        lines = [line for line in out.splitlines() if line.startswith("{")]
        if not lines or (process.returncode != 0 and not any_status):
            raise RuntimeError(
                f"{mpi.launcher} ended with status {process.returncode}: {(err or out)[-600:]}"
            )
        found = json.loads(lines[0])
        found["wrong_bytes"] = 4 * found.pop("wrong_elements")
        return found


class Peer(Protocol):
    """A program outside torch that moves the tensor of a case. One that is not installed is named as such in
    the output, never left out in silence."""

    @property
    def name(self) -> str: ...
    @property
    def what(self) -> str:
        """For the table that explains the methods."""
        ...

    def missing(self) -> str:
        """What to install, or ""."""
        ...

    def why_not(self, case: Case) -> str:
        """Why it cannot do the case, or ""."""
        ...

    def run(
        self, cluster: Cluster, case: Case, topology: Topology, repeats: int, slow: float
    ) -> dict[str, Any]:
        """{"seconds", "busy"} of each repeat, {"wrong_bytes"} of all; only one repeat where one takes
        longer than `slow` seconds. Raises RuntimeError with the program's output where it fails."""
        ...


OPEN_MPI = Mpi("mpicc.openmpi", "mpirun.openmpi", "libopenmpi-dev openmpi-bin")
MPICH = Mpi("mpicc.mpich", "mpirun.mpich", "mpich libmpich-dev")
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
            self.mpi, cluster, case.setting.ranks_per_host, self.options, self.mpi.build("mpi_reshard.c"),
            _problem(case, topology), [self.method, str(repeats), str(slow)], self.env,
            self.any_status,
        )  # fmt: skip


def _problem(case: Case, topology: Topology) -> str:
    """The plan's unit tasks; holders take turns as senders."""
    plan = case.plan(topology)
    lines = [f"{len(case.shape)} {' '.join(map(str, case.shape))}", str(len(plan.tasks))]
    for number, task in enumerate(plan.tasks):
        box = " ".join(f"{lo} {hi}" for lo, hi in task.box)
        sender = task.holders[number % len(task.holders)]
        lines.append(f"{box} {sender} {len(task.receivers)} {' '.join(map(str, task.receivers))}")
    return "\n".join(lines) + "\n"


_LIBRARY = "/usr/lib/x86_64-linux-gnu/libscalapack-openmpi.so"
_MPI = replace(OPEN_MPI, package=f"libscalapack-openmpi-dev {OPEN_MPI.package}", libraries=(_LIBRARY, "-lm"))


@dataclass(frozen=True)
class Grid:
    """A matrix cut into blocks of rows and of columns: rank row[i][j] holds block (i, j)."""

    ranks: tuple[tuple[int, ...], ...]
    block: tuple[int, int]


def split_points(shape: tuple[int, ...], *layouts: Layout) -> set[int]:
    """Tensor dimensions that any of the layouts shards."""
    found = set()
    for layout in layouts:
        for size, placement in zip(layout.mesh_shape, layout.placements, strict=True):
            if size > 1 and placement.is_shard():
                found.add(placement.dim % len(shape))
    return found


def grid(shape: tuple[int, ...], first_column: int, layout: Layout) -> Grid | None:
    """The layout as blocks of a matrix, whose columns are the dimensions from `first_column` on; None where
    it is none."""
    rows, columns = prod(shape[:first_column]), prod(shape[first_column:])
    boxes = {rank: found[0] for rank, found in layout.shards(shape).items() if found}
    if len(set(boxes.values())) < len(layout.ranks):
        return None  # replicas, or empty shards
    place = {}
    for rank, box in boxes.items():
        whole = [lo == 0 and hi == size for (lo, hi), size in zip(box, shape, strict=True)]
        if not all(whole[1:first_column]) or not all(whole[first_column + 1 :]):
            return None
        row = prod(shape[1:first_column])
        column = prod(shape[first_column + 1 :])
        place[rank] = (
            (box[0][0] * row, box[0][1] * row) if first_column else (0, 1),
            (box[first_column][0] * column, box[first_column][1] * column) if columns > 1 else (0, columns),
        )
    first_rows = sorted({r for r, _ in place.values()})
    first_columns = sorted({c for _, c in place.values()})
    block = (first_rows[0][1], first_columns[0][1])
    for cut, size, total in ((first_rows, block[0], rows), (first_columns, block[1], columns)):
        if any(lo != i * size or hi != min(lo + size, total) for i, (lo, hi) in enumerate(cut)):
            return None
    at = {where: rank for rank, where in place.items()}
    if len(at) != len(first_rows) * len(first_columns):
        return None
    return Grid(tuple(tuple(at[r, c] for c in first_columns) for r in first_rows), block)


def problem(case: Case) -> str:
    """What scalapack_reshard reads, or "" where the case is no such matrix."""
    shape = case.shape
    later = split_points(shape, case.src, case.dst) - {0}
    if len(later) > 1 or len(case.tensors) > 1 or case.src.has_partial:
        return ""
    first_column = next(iter(later), min(1, len(shape) - 1))
    sides = [grid(shape, first_column, layout) for layout in (case.src, case.dst)]
    lines = [f"{prod(shape[:first_column])} {prod(shape[first_column:])}"]
    for side in sides:
        if side is None:
            return ""
        lines.append(f"{len(side.ranks)} {len(side.ranks[0])} {side.block[0]} {side.block[1]}")
        lines.append(" ".join(str(rank) for row in side.ranks for rank in row))
    return "\n".join(lines) + "\n"


@dataclass(frozen=True)
class ScalapackPeer:
    """ScaLAPACK's p?gemr2d, which copies a matrix from one grid of processes to another: for tensors without
    replicas that can be seen as a matrix cut along rows and columns."""

    name: str = "ScaLAPACK gemr2d"
    what: str = "p?gemr2d of ScaLAPACK over Open MPI; only tensors without replicas, as matrices"
    mpi: Mpi = _MPI

    def missing(self) -> str:
        if not Path(_LIBRARY).exists():
            return f"not installed: apt-get install {self.mpi.package}"
        return self.mpi.missing()

    def why_not(self, case: Case) -> str:
        return "" if problem(case) else "needs a matrix in blocks, without replicas"

    def run(
        self, cluster: Cluster, case: Case, topology: Topology, repeats: int, slow: float
    ) -> dict[str, Any]:
        del topology  # it knows nothing of links
        return run(
            self.mpi, cluster, case.setting.ranks_per_host, (), self.mpi.build("scalapack_reshard.c"),
            problem(case), [str(repeats), str(slow)], {},
        )  # fmt: skip


PEERS: list[Peer] = [
    MpiPeer("Open MPI bcast", "the same unit tasks by MPI_Bcast of Open MPI, its own choice of algorithm",
            OPEN_MPI, "bcast"),
    MpiPeer("Open MPI pipeline", "MPI_Bcast with Open MPI's pipeline algorithm forced (128 KiB segments)",
            OPEN_MPI, "bcast", _PIPELINE),
    MpiPeer("Open MPI isend", "a message per box and receiver", OPEN_MPI, "isend"),
    MpiPeer("MPICH bcast", "the same unit tasks by MPI_Bcast of MPICH, over TCP of UCX", MPICH, "bcast",
            env=_OVER_TCP, any_status=True),
    ScalapackPeer(),
]  # fmt: skip


_COMPILER = "cc"


def ucp_missing() -> str:
    """The reason why it cannot be measured; "" if it can."""
    if shutil.which(_COMPILER) is None:
        return f"there is no C compiler, `{_COMPILER}`"
    if _headers() is None:
        return "the headers of UCX were not found: pip install -r requirements-build.txt, or set UCX_ROOT"
    try:
        library()
    except MeshcastError as error:
        return str(error)
    return ""


def _headers() -> Path | None:
    package = importlib.util.find_spec("libucx")
    places = [Path(os.environ["UCX_ROOT"])] if "UCX_ROOT" in os.environ else []
    places += [Path(each) for each in (package.submodule_search_locations or ())] if package else []
    found = [place / "include" for place in (*places, Path("/usr"))]
    return next((each for each in found if (each / "ucp/api/ucp.h").is_file()), None)


def ucp_program() -> Path:
    """Built where that has not been done. Raises RuntimeError where it does not compile."""
    ucp = Path(library())
    linked = [str(ucp), str(ucp.with_name("libucs.so.0")), f"-Wl,-rpath,{ucp.parent}"]
    if not ucp.is_absolute():  # the system's
        linked = ["-l:libucp.so.0", "-l:libucs.so.0"]
    return compiled([_COMPILER, f"-I{_headers()}"], "ucp_messages.c", linked)


def ucp_origin() -> str:
    """Where the library comes from."""
    return "the wheel" if Path(library()).is_absolute() else "the system"
