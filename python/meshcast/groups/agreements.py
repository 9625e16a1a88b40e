"""What the ranks of a private group have agreed on: which kinds of transfer, and the slot that each goes
by."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from dataclasses import dataclass

__all__ = ["Agreed", "Agreements"]

# Kinds that a group remembers; far fewer than it has slots.
_KEPT = 256


@dataclass
class Agreed:
    """A kind of transfer under its agreed slot; runs: how often it has been started, alike on all ranks."""

    slot: int
    runs: int = 0


class Agreements:
    """The kinds agreed on, the one used longest ago first.

    Every rank of a group runs its calls in one order, and this is only touched while one of them is being
    started, after it is known to start. So all ranks remember and forget the same kinds at the same calls,
    whatever else they have queued, refused or dropped.
    """

    def __init__(self) -> None:
        self._kinds: OrderedDict[Hashable, Agreed] = OrderedDict()

    def __contains__(self, kind: Hashable) -> bool:
        return kind in self._kinds

    def use(self, kind: Hashable) -> Agreed | None:
        """What was agreed on `kind`, from now on the one used last; None if nothing was, or if it is
        forgotten."""
        found = self._kinds.get(kind)
        if found is not None:
            self._kinds.move_to_end(kind)
        return found

    def add(self, kind: Hashable, slot: int) -> tuple[Agreed, int | None]:
        """A new agreement, and the slot of the one that it drives out."""
        agreed = self._kinds[kind] = Agreed(slot)
        if len(self._kinds) <= _KEPT:
            return agreed, None
        return agreed, self._kinds.popitem(last=False)[1].slot
