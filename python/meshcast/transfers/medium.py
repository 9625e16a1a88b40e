"""Medium: moves the tensors of a transfer that are not all on CPUs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from .. import _C
from ..errors import typed
from .shards import Shards

__all__ = ["Medium", "Started", "Statistics"]


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


class Medium(ABC):
    """Place of the tensors of a transfer, as its calls need it. One object serves one transfer."""

    by_host: ClassVar[bool]
    """Whether the host moves the bytes, over the interfaces of its group."""

    def check(self, shards: Shards) -> None:  # noqa: B027  most can move all
        """Raises LayoutError for shards it cannot move. In the caller's thread."""

    @abstractmethod
    def bring(self, call: _C.MediumCall, src: Shards, dst: Shards, *, reverse: bool) -> tuple[Shards, Shards]:
        """Returns the shards where they can be moved; in the caller's thread, before the call is counted.
        What it raises is reported to the other ranks."""

    @abstractmethod
    def ready(self, call: _C.MediumCall) -> bool:
        """Returns whether a start would not have to wait. Only while no command of the group is running."""

    def connect(self, core: _C.GroupCore, call: _C.MediumCall, ordinal: int) -> None:  # noqa: B027
        """Makes connections of its own, where some lack, once the ranks have agreed on the call `ordinal`."""

    @abstractmethod
    def start(
        self, core: _C.GroupCore, call: _C.MediumCall, agreed: _C.AgreedPlan, **arguments: Any
    ) -> Started:
        """Starts the plan; the arguments are those of GroupCore.start."""

    def begin(
        self, core: _C.GroupCore, call: _C.MediumCall, agreed: _C.AgreedPlan, **arguments: Any
    ) -> Started:
        """The same for the group; raises typed errors."""
        try:
            return self.start(core, call, agreed, **arguments)
        except Exception as error:
            found = typed(error, call.op, call.flight.rank)
            raise found from error.__cause__ if found is error else error

    @abstractmethod
    def text(self) -> str:
        """Returns what a descriptor says of it; that of CPUs names no place."""
