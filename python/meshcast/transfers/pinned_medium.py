"""StagedTransfer: a transfer between a mesh on CPUs and one on GPUs. Between ranks it is that of CPUs; what a
rank has on its GPU goes through pinned host memory (pinned_copy.py)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..errors import MeshcastError
from . import gpu_copies
from .persistent import CallNumber, PersistentTransfer
from .pinned import PinnedPool
from .pinned_copy import Passage

if TYPE_CHECKING:
    from .. import _C
    from ..groups.agreements import Agreed
    from ..groups.private import Job, PrivateGroup
    from .handle import Launch
    from .shards import Shards

__all__ = ["StagedTransfer"]


class StagedTransfer(PersistentTransfer):
    """A PersistentTransfer one of whose ends is on GPUs."""

    def _describe(self) -> str:
        return f"{super()._describe()}; from {self._device_types[0]} to {self._device_types[1]}"

    def launch_reverse(
        self, call: CallNumber, src: Shards, dst: Shards, timeout: float, *, driven: bool = False
    ) -> Launch:
        try:
            return super().launch_reverse(call, src, dst, timeout, driven=driven)
        except MeshcastError as error:  # of the passage: the others wait for this rank
            self.reject_reverse(call, error, timeout)
            raise

    def _staged(self, launch: Launch, src: Shards, dst: Shards, *, reverse: bool) -> tuple[Shards, Shards]:
        source, destination = (side == "cuda" for side in self._device_types)
        on_gpu = (destination, source) if reverse else (source, destination)
        group, copies = self._group, gpu_copies.COPIES
        pool = group.attached.get("pinned")
        if not isinstance(pool, PinnedPool):
            pool = group.attached["pinned"] = PinnedPool(copies.pinned)
        passage = launch.passage = Passage(copies, pool, launch, group.rank, src, dst, on_gpu)
        if launch.driven:  # who waits anyhow spares the group's thread, and others the wait for its lock
            try:
                passage.leave(group.cause)
            except MeshcastError as error:
                group.abort(str(error))
                raise
        return passage.src, passage.dst

    def _ready(self, launch: Launch, *, reverse: bool) -> Callable[[], bool]:
        ready, passage = super()._ready(launch, reverse=reverse), launch.passage
        return lambda: passage.has_left() and ready()

    def _start_job(self, launch: Launch, call: CallNumber, src: Shards, dst: Shards, *, reverse: bool) -> Job:
        start = super()._start_job(launch, call, src, dst, reverse=reverse)

        def job(core: _C.GroupCore | None, error: Exception | None) -> None:
            start(None if core is None else _StagedCall(core, launch, self._group), error)  # type: ignore[arg-type]

        return job

    def _agreed(self, core: Any, ordinal: int, launch: Launch) -> Agreed:
        return super()._agreed(core.control, ordinal, launch)


class _StagedCall:
    """One call as the job of a transfer sees its group: a start waits for the copy to the host."""

    def __init__(self, control: _C.GroupCore, launch: Launch, group: PrivateGroup) -> None:
        self.control = control
        self._launch = launch
        self._group = group
        self._work: Any = None

    def start(self, plan: Any, **arguments: Any) -> Any:
        passage: Passage = self._launch.passage
        try:
            passage.leave(self._group.cause)
        except MeshcastError as error:
            self.control.abort(str(error))  # the others have started it
            raise
        arguments["timeout"] = max(self._launch.remaining(), 1e-3)
        self._work = self.control.start(plan, **arguments)
        return passage.landing(self._work)

    def stats(self, _: Any) -> dict[str, float]:
        return self.control.stats(self._work)
