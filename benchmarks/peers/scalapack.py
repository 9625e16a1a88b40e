"""ScaLAPACK's p?gemr2d, which copies a matrix from one grid of processes to another: for tensors without
replicas that can be seen as a matrix cut along rows and columns. See scalapack_reshard.c."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

from meshcast import Layout, Topology
from meshcast.bench.cases import Case

from ..cluster import Cluster
from .launch import Mpi, run
from .mpi import OPEN_MPI

_SOURCE = Path(__file__).with_name("scalapack_reshard.c")
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
            self.mpi, cluster, case.setting.ranks_per_host, (), self.mpi.build(_SOURCE), problem(case),
            [str(repeats), str(slow)], {},
        )  # fmt: skip


PEERS = [ScalapackPeer()]
