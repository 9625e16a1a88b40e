"""PinnedMedium: transfers between a mesh on CPUs and one on GPUs.

Between ranks they are those of CPUs; what a rank has on its GPU goes through pinned memory (pinned_copy.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..errors import MeshcastError
from . import gpu_copies
from .gpu_offer import DeviceTypes
from .medium import Medium, Started, Statistics
from .pinned import PinnedPool
from .pinned_copy import Passage
from .shards import Shards

if TYPE_CHECKING:
    from .. import _C
    from ..groups.private import PrivateGroup

__all__ = ["PinnedMedium"]


class PinnedMedium(Medium):
    """One end of the transfer is on GPUs."""

    by_host = True

    def __init__(self, group: PrivateGroup, device_types: DeviceTypes) -> None:
        self._group, self._device_types = group, device_types

    def bring(self, call: _C.MediumCall, src: Shards, dst: Shards, *, reverse: bool) -> tuple[Shards, Shards]:
        source, destination = (kind == "cuda" for kind in self._device_types)
        on_gpu = (destination, source) if reverse else (source, destination)
        group, copies = self._group, gpu_copies.COPIES
        pool = group.attached("pinned")
        if not isinstance(pool, PinnedPool):
            pool = PinnedPool(copies.pinned)
            group.attach("pinned", pool)
        passage = call.brought = Passage(copies, pool, call, group.rank, src, dst, on_gpu)
        if call.driven:  # who waits anyhow spares the group's thread, and others the wait for its lock
            try:
                passage.leave(group.cause)
            except MeshcastError as error:
                group.abort(str(error))
                raise
        return passage.src, passage.dst

    def ready(self, call: _C.MediumCall) -> bool:
        return bool(call.brought.has_left())

    def start(
        self, core: _C.GroupCore, call: _C.MediumCall, agreed: _C.AgreedPlan, **arguments: Any
    ) -> Started:
        passage: Passage = call.brought
        try:
            passage.leave(self._group.cause)
        except MeshcastError as error:
            core.abort(str(error))  # the others have started it
            raise
        arguments["timeout"] = max(call.remaining(), 1e-3)
        work = core.start(agreed, **arguments)
        return passage.landing(work), Statistics(work)

    def text(self) -> str:
        return f"; from {self._device_types[0]} to {self._device_types[1]}"
