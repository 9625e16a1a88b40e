"""The plainest calls of a Resharder, at the least cost: what a general call looks up and wraps shows where
only some KiB travel."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.autograd.graph import increment_version

from ..base.observe import Flight
from ..errors import MeshcastError

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from .compiled_call import Compiled

__all__ = ["Repeat"]


class Repeat:
    """Runs of one Resharder on a rank that is in one of its meshes, with tensors on CPUs, nothing to cast or
    to reduce beforehand, and a result that each run overwrites. A general call, through Compiled, does the
    same and more; it makes the first run, and whatever a check here does not let pass, errors above all."""

    __slots__ = (
        "_dtype",
        "_group",
        "_kept",
        "_limit",
        "_local_shape",
        "_op",
        "_shape",
        "_shards",
        "_transfer",
    )

    def __init__(self, compiled: Compiled, kept: DTensor, op: str, limit: float) -> None:
        (move,) = compiled.moves
        assert compiled.transfer is not None
        self._transfer = compiled.transfer
        self._group = compiled.transfer._group
        self._op, self._limit = op, limit
        # Of the source shard here; None on a rank of the destination.
        self._shape = compiled.transfer._source[0] if move.is_holder else None
        self._dtype = move.wire_dtype
        self._shards: list[torch.Tensor | None] = [None]
        self._kept = None if move.is_holder else kept
        self._local_shape = move.local_shape

    @staticmethod
    def of(compiled: Compiled, kept: DTensor | None, op: str, limit: float) -> Repeat | None:
        """None where all calls are general ones."""
        (move,) = compiled.moves
        transfer = compiled.transfer
        # A rank of both meshes would have to look whether the source shares memory with the result.
        if transfer is None or kept is None or move.is_holder == (move.local_shape is not None):
            return None
        plain = (
            transfer._device_types == ("cpu", "cpu")
            and move.reduction is None
            and move.wire_dtype == transfer.problems[0][1]
        )
        if not plain or (not move.is_holder and move.wire_dtype != move.dtype):
            return None
        shape = transfer._source[0] if move.is_holder else move.local_shape
        return None if shape is None or 0 in shape else Repeat(compiled, kept, op, limit)

    def run(self, x: DTensor | None) -> bool:
        """Moves x, which has the spec of the source and is not to be differentiated, and waits. False, with
        nothing done, where only a general call will do."""
        sources = self._shards
        if self._shape is not None:
            local = None if x is None else x._local_tensor
            if type(local) is not torch.Tensor or not local.is_cpu:
                return False
            if local.shape != self._shape or local.dtype != self._dtype:
                return False
            sources = [local]
        written = None if self._kept is None else self._kept._local_tensor  # it may be another than at first
        if written is not None and not self._fits(written):
            return False
        if torch.autograd._profiler_enabled():
            return False
        transfer, group = self._transfer, self._group
        if transfer._facts is None or group.refusals.open:
            return False
        flight = Flight(self._op, group.members, group.rank, None, transfer.what)
        start = transfer.plain_start(sources, [written], self._limit)
        try:
            group.submit(start)
            flight.plan, flight.lane, flight.position = transfer._facts, start.lane, start.ordinal
            flight.traffic = transfer._traffic.get(False)
            group.watch(start)
            start.wait()
            flight.run = start.run
        except BaseException as error:
            flight.run = start.run
            flight.failed(error)
            if not isinstance(error, MeshcastError):  # of a handler of a signal
                group.interrupted(self._op, error)
            raise
        if self._kept is not None and written is not None:
            increment_version((self._kept, written))
        for _ in range(start.begun_again):
            flight.again()
        flight.ended()
        if group.calls.has_news():
            news = group.take_news()
            if news is not None:
                raise news
        return True

    def _fits(self, written: torch.Tensor) -> bool:
        plain = type(written) is torch.Tensor and written.is_cpu
        return plain and written.shape == self._local_shape and written.dtype == self._dtype
