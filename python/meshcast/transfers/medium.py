"""Medium: where the tensors of a transfer are, and what moves them between ranks."""

from __future__ import annotations

from typing import Any, Protocol

from .. import _C
from .call import Call
from .shards import Shards

__all__ = ["HostMedium", "Medium", "Started", "StartingMedium", "Statistics"]


class Statistics:
    """Figures of a work of a core, once it has completed, and its messages, at any time."""

    def __init__(self, work: Any, core: Any = _C) -> None:
        """core: that started it; any may be asked where it is one of C++."""
        self._work, self._core = work, core

    def __call__(self) -> dict[str, Any]:
        return self._core.stats(self._work)

    def traffic(self) -> list[tuple[int, bool, int, int]]:
        """Returns peer, whether it is sent to, messages and bytes of each direction of each peer."""
        return self._core.traffic(self._work)


Started = tuple[Any, Statistics]  # a work, and what it tells


class Medium(Protocol):
    """Place of the tensors of a transfer, as the transfer needs it. One object serves one transfer."""

    by_host: bool
    """Whether the host moves the bytes, over the interfaces of its group."""

    def check(self, shards: Shards) -> None:
        """In the caller's thread. Raises LayoutError for shards it cannot move."""

    def bring(self, call: Call, src: Shards, dst: Shards, *, reverse: bool) -> tuple[Shards, Shards]:
        """The shards where they can be moved; in the caller's thread, before the call is counted. What it
        raises is told to the other ranks."""

    def text(self) -> str:
        """For descriptors: "" for the host, whose texts name no place."""


class StartingMedium(Medium, Protocol):
    """One that starts the plan itself."""

    def ready(self, call: Call) -> bool:
        """Whether a start would not have to wait. Only while no command of the group is running."""

    def connect(self, core: _C.GroupCore, call: Call, ordinal: int) -> None:
        """Once the ranks have agreed on the call `ordinal`: makes connections of its own, where some lack."""

    def start(self, core: _C.GroupCore, call: Call, agreed: _C.AgreedPlan, **arguments: Any) -> Started:
        """Starts the plan; the arguments are those of GroupCore.start."""


class HostMedium:
    """Tensors on CPUs: the private group's own connections move them, and need nothing from here."""

    by_host = True

    def check(self, shards: Shards) -> None:
        pass

    def bring(self, call: Call, src: Shards, dst: Shards, *, reverse: bool) -> tuple[Shards, Shards]:  # noqa: ARG002
        return src, dst

    def text(self) -> str:
        return ""
