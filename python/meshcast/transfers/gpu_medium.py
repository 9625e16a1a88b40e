"""CudaTransfer: a transfer between GPUs. What it enqueues runs behind the caller's current stream; waiting
for it orders the stream that is current then, and does not block the host; over CUDA IPC only until the other
ranks have made the same call."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from ..errors import LayoutError, MeshcastError
from .casts import Types, types_of, types_text
from .gpu_lanes import connect_lanes, gpu_of
from .persistent import REVERSE_LANE, CallNumber, PersistentTransfer
from .shards import Shards

if TYPE_CHECKING:
    from .. import _C
    from ..groups.agreements import Agreed
    from ..groups.private import Job, PrivateGroup
    from .handle import Launch

__all__ = ["CudaTransfer"]


class CudaTransfer(PersistentTransfer):
    """A PersistentTransfer whose tensors are on GPUs, one GPU per rank."""

    _by_host = False

    def _check(self, side: str, shards: Shards, expected: Sequence[tuple[int, ...] | None]) -> None:
        super()._check(side, shards, expected)
        gpu = gpu_of(self._group)
        if gpu is not None:
            for shard in shards:
                if shard is not None:
                    gpu.check_device(shard.device.index, self._op)
        if torch.cuda.is_current_stream_capturing():
            raise LayoutError(
                f"{self._op}: the current stream is being captured into a CUDA graph, which a reshard cannot "
                "be part of: call it outside of the capture",
                op=self._op,
            )

    def _describe(self) -> str:
        forth, back = (types_text(types) for types in self._types)
        casts = (f"; {forth}" if forth else "") + (f"; gradient {back}" if back else "")
        return f"{super()._describe()}; on cuda{casts}"

    def _start_job(self, launch: Launch, call: CallNumber, src: Shards, dst: Shards, *, reverse: bool) -> Job:
        # In the caller's thread: what its stream holds now is what the transfer comes behind, however much
        # later the job runs.
        place = _Place((*src, *dst))
        start = super()._start_job(launch, call, src, dst, reverse=reverse)

        def job(core: _C.GroupCore | None, error: Exception | None) -> None:
            types = self._types[reverse]
            call = None if core is None else _GpuCall(core, self._group, place, launch.op, types)
            start(call, error)  # type: ignore[arg-type]

        return job

    def _has_agreed(self) -> bool:
        gpu = gpu_of(self._group)
        return gpu is not None and gpu.lanes.issuperset(self._lanes()) and super()._has_agreed()

    def _agreed(self, core: Any, ordinal: int, launch: Launch) -> Agreed:
        call: _GpuCall = core
        agreed = super()._agreed(call.control, ordinal, launch)
        number = (self._lane, ordinal)
        connect_lanes(self._group, call.control, self._lanes(), call.place, number, launch.deadline)
        return agreed

    @cached_property
    def _types(self) -> tuple[tuple[Types, ...], tuple[Types, ...]]:
        """Of the tensors on the way there and, in the backward, back; see types_of."""
        casts = self._casts
        if casts is None:
            return (), ()
        forth = [dtype for _, dtype, _, _ in self.problems]
        back = [dtype for _, dtype, _, _ in self._backward or ()]
        return types_of(forth, casts.forth), types_of(back, casts.back)

    def _lanes(self) -> tuple[int, ...]:
        """Of both directions: in a backward, ranks may come by too late to make one."""
        return (self._lane,) if self._backward is None else (self._lane, REVERSE_LANE)


class _Place:
    """Which GPU a call is on, and an event behind what its caller's stream held. problem: why there is
    none."""

    def __init__(self, shards: Shards) -> None:
        self.device = -1
        self.problem: Exception | None = None
        try:
            devices = sorted({shard.device.index for shard in shards if shard is not None})
            if len(devices) > 1:
                raise LayoutError(
                    f"the tensors of one call are on several GPUs of this rank, {devices}; results are made "
                    "on the current one: call torch.cuda.set_device with that of the source first"
                )
            self.device = devices[0] if devices else torch.cuda.current_device()
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(self.device))
        except Exception as error:  # of CUDA; raised where the call is counted, and the others are told
            self.problem = error


class _GpuCall:
    """One call as the job of a transfer sees its group: agreement is the group's own, the start that of its
    GPU side. Keeps the event alive until then."""

    def __init__(
        self,
        control: _C.GroupCore,
        group: PrivateGroup,
        place: _Place,
        op: str,
        types: tuple[Types, ...],
    ) -> None:
        self.control = control
        self.place = place
        self._types = types
        self._group = group
        self._op = op
        self._core: Any = None

    def start(self, plan: Any, **arguments: Any) -> Any:
        arguments.pop("driven")  # the host does not wait for what a GPU does
        gpu, place = gpu_of(self._group), self.place
        if place.problem is not None:
            raise MeshcastError(f"{self._op}: {place.problem}", op=self._op) from place.problem
        if gpu is None:
            raise MeshcastError(f"{self._op}: the call itself has failed", op=self._op)
        gpu.check_device(place.device, self._op)
        self._core = gpu.core  # also after the group was closed
        return gpu.core.start(plan, types=self._types, after=place.event.cuda_event, **arguments)

    def stats(self, work: Any) -> dict[str, float]:
        found: dict[str, float] = self._core.stats(work)
        return found
