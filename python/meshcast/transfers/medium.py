"""Medium: where the tensors of a transfer are, and what moves them between ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from .call import Call
from .shards import Shards

if TYPE_CHECKING:
    from .. import _C

__all__ = ["HostMedium", "Medium", "Started", "Statistics"]


class Statistics:
    """What a work of a core tells: its figures once it has completed, and its messages at any time."""

    def __init__(self, core: _C.GroupCore | _C.GpuGroupCore, work: Any) -> None:
        self._core, self._work = core, work

    def __call__(self) -> dict[str, Any]:
        return self._core.stats(self._work)

    def traffic(self) -> list[tuple[int, bool, int, int]]:
        """As GroupCore.traffic."""
        return self._core.traffic(self._work)


Started = tuple[Any, Statistics]  # a work, and what it tells


class Medium(Protocol):
    """What a persistent transfer asks of the place of its tensors. One object serves one transfer."""

    by_host: bool
    """Whether the host moves the bytes, over the interfaces of its group."""

    def check(self, shards: Shards) -> None:
        """In the caller's thread. Raises LayoutError for shards it cannot move."""

    def bring(self, call: Call, src: Shards, dst: Shards, *, reverse: bool) -> tuple[Shards, Shards]:
        """The shards where they can be moved; in the caller's thread, before the call is counted. What it
        raises is told to the other ranks."""

    def ready(self, call: Call) -> bool:
        """Whether a start would not have to wait. Only while no command of the group is running."""

    def connect(self, core: _C.GroupCore, call: Call, ordinal: int) -> None:
        """Once the ranks have agreed on the call `ordinal`: makes connections of its own, where some lack."""

    def start(self, core: _C.GroupCore, call: Call, agreed: _C.AgreedPlan, **arguments: Any) -> Started:
        """Starts the plan; the arguments are those of GroupCore.start."""

    def text(self) -> str:
        """For descriptors: "" for the host, whose texts name no place."""


class HostMedium:
    """Tensors on CPUs: the private group's own connections move them."""

    by_host = True

    def check(self, shards: Shards) -> None:
        pass

    def bring(self, call: Call, src: Shards, dst: Shards, *, reverse: bool) -> tuple[Shards, Shards]:  # noqa: ARG002
        return src, dst

    def ready(self, call: Call) -> bool:  # noqa: ARG002
        return True

    def connect(self, core: _C.GroupCore, call: Call, ordinal: int) -> None:
        pass

    def start(self, core: _C.GroupCore, call: Call, agreed: _C.AgreedPlan, **arguments: Any) -> Started:  # noqa: ARG002
        work = core.start(agreed, **arguments)
        return work, Statistics(core, work)

    def text(self) -> str:
        return ""
