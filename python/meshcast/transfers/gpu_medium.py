"""GpuMedium: transfers between GPUs.

What they enqueue runs behind the caller's current stream. Waiting for it orders the stream that is current
then, and does not block the host; over CUDA IPC only until the other ranks have made the same call.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import LayoutError, MeshcastError
from .casts import Types, types_text
from .gpu_lanes import connect_lanes, gpu_of
from .gpu_offer import CAPTURED, several_gpus
from .medium import Medium, Started, Statistics
from .shards import Shards

if TYPE_CHECKING:
    from .. import _C
    from ..groups.private import PrivateGroup

__all__ = ["GpuMedium"]


class GpuMedium(Medium):
    """Tensors on GPUs, one GPU per rank. lanes: that need communicators, the transfer's own first. types: of
    the tensors on the way there and back, see casts.types_of."""

    by_host = False

    def __init__(
        self,
        group: PrivateGroup,
        op: str,
        lanes: tuple[int, ...],
        types: tuple[tuple[Types, ...], tuple[Types, ...]],
    ) -> None:
        self._group, self._op, self._lanes, self._types = group, op, lanes, types

    def check(self, shards: Shards) -> None:
        gpu = gpu_of(self._group)
        if gpu is not None:
            for shard in shards:
                if shard is not None:
                    gpu.check_device(shard.device.index, self._op)
        if torch.cuda.is_current_stream_capturing():
            raise LayoutError(f"{self._op}: {CAPTURED}", rank=self._group.rank, op=self._op)

    def bring(self, call: _C.MediumCall, src: Shards, dst: Shards, *, reverse: bool) -> tuple[Shards, Shards]:  # noqa: ARG002
        # In the caller's thread: what its stream holds now is what the transfer comes behind, however much
        # later it is started.
        call.brought = _Mark((*src, *dst))
        return src, dst

    def ready(self, call: _C.MediumCall) -> bool:  # noqa: ARG002
        gpu = gpu_of(self._group)
        return gpu is not None and gpu.lanes.issuperset(self._lanes)

    def connect(self, core: _C.GroupCore, call: _C.MediumCall, ordinal: int) -> None:
        number = (self._lanes[0], ordinal)
        connect_lanes(self._group, core, self._lanes, call.brought, number, call.deadline)

    def start(
        self,
        core: _C.GroupCore,  # noqa: ARG002  the GPU's own core moves them
        call: _C.MediumCall,
        agreed: _C.AgreedPlan,
        **arguments: Any,
    ) -> Started:
        mark, gpu = call.brought, gpu_of(self._group)
        if mark.problem is not None:
            raise MeshcastError(f"{call.op}: {mark.problem}", op=call.op) from mark.problem
        if gpu is None:
            raise MeshcastError(f"{call.op}: the call itself has failed", op=call.op)
        gpu.check_device(mark.device, call.op)
        gpu_core = gpu.core  # also after the group was closed
        types = self._types[arguments["reverse"]]
        work = gpu_core.start(agreed, types=types, after=mark.event.cuda_event, **arguments)
        return work, Statistics(work, gpu_core)

    def text(self) -> str:
        forth, back = (types_text(types) for types in self._types)
        casts = (f"; {forth}" if forth else "") + (f"; gradient {back}" if back else "")
        return f"; on cuda{casts}"


class _Mark:
    """Which GPU a call is on, and an event behind what its caller's stream held. problem: why there is
    none."""

    def __init__(self, shards: Sequence[torch.Tensor | None]) -> None:
        self.device = -1
        self.problem: Exception | None = None
        try:
            devices = sorted({shard.device.index for shard in shards if shard is not None})
            if len(devices) > 1:
                raise LayoutError(several_gpus(devices))
            self.device = devices[0] if devices else torch.cuda.current_device()
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(self.device))
        except Exception as error:  # of CUDA; raised where the call is counted, and the others are told
            self.problem = error
