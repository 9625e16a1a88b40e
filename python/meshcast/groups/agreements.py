"""What the ranks of a private group have agreed on, by kind of transfer."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .. import _C

__all__ = ["Agreements"]

# Kinds that a group remembers; far fewer than it has slots.
_KEPT = 256


class Agreements:
    """The kinds agreed on, the one used longest ago first.

    Every rank of a group runs its calls in one order, and this is only touched while one of them is being
    started, after it is known to start. So all ranks remember and forget the same kinds at the same calls,
    whatever else they have queued, refused or dropped. What is forgotten gives its slot back.
    """

    def __init__(self) -> None:
        self._kinds: OrderedDict[Hashable, _C.AgreedPlan] = OrderedDict()

    def __contains__(self, kind: Hashable) -> bool:
        return kind in self._kinds

    def use(self, kind: Hashable) -> _C.AgreedPlan | None:
        """What was agreed on `kind`, from now on the one used last; None if nothing was, or if it is
        forgotten."""
        found = self._kinds.get(kind)
        if found is not None:
            self._kinds.move_to_end(kind)
        return found

    def add(self, kind: Hashable, agreed: _C.AgreedPlan) -> None:
        """A new agreement, which may drive out another."""
        self._kinds[kind] = agreed
        if len(self._kinds) > _KEPT:
            self._kinds.popitem(last=False)
