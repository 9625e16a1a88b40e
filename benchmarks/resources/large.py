"""Large tensors: memory and CPU time, and copies inside a host."""

from __future__ import annotations

import time
from typing import Any

import meshcast
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from .clocks import Figure, compared, cpu_seconds, largest, on_core, peak_above, total

__all__ = ["cpu", "digests", "in_host", "memory"]

MIB = 1 << 20
COLUMNS = 4096  # of the matrices, int32: a row has 16 KiB
_ALLOWED = (64 * MIB, 0.05)  # bytes, and part of what a rank holds


class Matrix:
    """Rows cut over one mesh, to be laid out by `placement` on another whose memory is there and touched.
    Every element has a value of its own."""

    def __init__(self, nbytes: int, source: list[int], target: list[int], placement: Any) -> None:
        self.rank, self.rows = dist.get_rank(), nbytes // COLUMNS // 4
        self._target, self._placement = target, placement
        meshes = [DeviceMesh("cpu", ranks) for ranks in (source, target)]
        size, stride = torch.Size((self.rows, COLUMNS)), (COLUMNS, 1)
        local = torch.empty(0, 0, dtype=torch.int32)
        if self.rank in source:
            own = self.rows // len(source) * COLUMNS
            begin = source.index(self.rank) * own
            local = torch.arange(begin, begin + own, dtype=torch.int32).view(-1, COLUMNS)
        shape = [self.rows, COLUMNS]
        if placement.is_shard():
            shape[placement.dim] //= len(target)
        out = torch.zeros(shape if self.rank in target else [0, 0], dtype=torch.int32)
        self.source = DTensor.from_local(
            local, meshes[0], [Shard(0)], run_check=False, shape=size, stride=stride
        )
        self.out = DTensor.from_local(out, meshes[1], [placement], run_check=False, shape=size, stride=stride)

    def reshard(self) -> None:
        meshcast.reshard_(self.out, self.source)

    def check(self) -> None:
        """Looks at some rows. Raises RuntimeError where a value is wrong."""
        if self.rank not in self._target:
            return
        found, place = self.out.to_local(), self._target.index(self.rank)
        first = [0, 0]
        if self._placement.is_shard():
            first[self._placement.dim] = place * found.shape[self._placement.dim]
        for row in {0, len(found) // 3, len(found) - 1}:
            begin = (first[0] + row) * COLUMNS + first[1]
            if not torch.equal(found[row], torch.arange(begin, begin + found.shape[1], dtype=torch.int32)):
                raise RuntimeError(f"rank {self.rank}: wrong values in row {row}")


def memory(nbytes: int) -> Figure:
    """Rows of two ranks become columns of two others. nbytes: of each rank. In MiB: the peak of the rank
    with the largest, and what is allowed."""
    small = Matrix(16 * MIB, [0, 1], [2, 3], Shard(1))
    small.reshard()  # connects
    matrix = Matrix(2 * nbytes, [0, 1], [2, 3], Shard(1))
    extra = largest(float(peak_above(matrix.reshard)))
    matrix.check()
    allowed = _ALLOWED[0] + _ALLOWED[1] * nbytes
    return {"ours": extra / MIB, "theirs": allowed / MIB, "value": extra / allowed}


def cpu(nbytes: int, dim: int, repeats: int, packs: bool = False) -> Figure:
    """CPU seconds of all ranks, beside isend and irecv of gloo for the same bytes between the same ranks, in
    one piece each. packs: there too the senders pack what has gaps, by torch, into memory that is there."""
    matrix = Matrix(nbytes, [0, 1], [2, 3], Shard(dim))
    sends = matrix.rank < 2
    peers = [(matrix.rank + 2) % 4] if dim == 0 else ([2, 3] if sends else [0, 1])
    local = (matrix.source if sends else matrix.out).to_local().clone()
    parts = local.reshape(-1).chunk(len(peers))

    def gloo() -> None:
        post = dist.isend if sends else dist.irecv
        if packs and sends:
            for part, columns in zip(parts, matrix.source.to_local().chunk(len(peers), dim), strict=True):
                part.view(columns.shape).copy_(columns)
        for work in [post(part, peer) for part, peer in zip(parts, peers, strict=True)]:
            work.wait()

    found = compared(matrix.reshard, gloo, repeats, cpu_seconds, total)
    matrix.check()
    return found


def digests(nbytes: int, repeats: int) -> dict[str, Figure]:
    """A state dict of one matrix with digests, beside the same without. Seconds of the slowest rank; and in
    MiB the peak of the rank with the largest, beside what is allowed."""
    matrix = Matrix(nbytes, [0, 1], [2, 3], Shard(1))
    sends = matrix.rank < 2
    held, outs = ({"w": matrix.source}, None) if sends else (None, {"w": matrix.out})
    where = {"w": (matrix.out.device_mesh, [Shard(1)])}

    def call(digest: bool) -> None:
        meshcast.reshard_state_dict(held, where, outs, digest=digest)

    found = compared(lambda: call(True), lambda: call(False), repeats, time.perf_counter, largest)
    matrix.check()
    extra = largest(float(peak_above(lambda: call(True))))
    allowed = _ALLOWED[0] + _ALLOWED[1] * nbytes / 2
    return {"time": found, "memory": {"ours": extra / MIB, "theirs": allowed / MIB, "value": extra / allowed}}


def in_host(nbytes: int, placement: Any, repeats: int) -> dict[str, Figure]:
    """Rows of four ranks of one host, laid out anew in memory that is there, beside plain copies of the
    bytes that each rank gets, by the four at once, also into memory that is there. Seconds: "one core" for
    all ranks, where every copy finds the caches of the last, and "all cores", which the ranks take in turn.
    """
    matrix = Matrix(nbytes, [0, 1, 2, 3], [0, 1, 2, 3], placement)
    given = torch.ones_like(matrix.out.to_local())
    copied = torch.zeros_like(given)
    found = {}
    for cores, number in (("one core", 0), ("all cores", matrix.rank)):
        with on_core(number):
            found[cores] = compared(
                matrix.reshard, lambda: copied.copy_(given), repeats, time.perf_counter, largest
            )
    matrix.check()
    return found


ROWS_TO_COLUMNS, ALL_GATHER = Shard(1), Replicate()
