"""Compiled calls that reshard_state_dict keeps for later ones, limited by the memory that they take."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from .state_batches import Batch, Part
from .state_moves import Agreed

__all__ = ["Kept", "Known"]

_MOST_BYTES = 256 << 20  # of a process group's kinds of call, as Batch.nbytes counts


@dataclass
class Known:
    """The compiled form of a kind of call. Calls of one number are of one kind on all ranks. values: entries
    that are no tensors, by the rank that told them last, as text."""

    number: int
    agreed: Agreed
    batches: list[Batch]
    values: dict[int, dict[str, Any]]
    parts: list[Part] = field(init=False)
    sources: list[str] = field(init=False)  # names of what travels, each once

    def __post_init__(self) -> None:
        self.parts = [part for batch in self.batches for part in batch.parts]
        self.sources = list(dict.fromkeys(part.move.source for part in self.parts))

    @property
    def nbytes(self) -> int:
        return sum(batch.nbytes for batch in self.batches)


class Kept:
    """Kinds of call; those that were used longest ago go first. One that alone is too large is kept until the
    next."""

    def __init__(self, most_bytes: int = _MOST_BYTES) -> None:
        self._most_bytes = most_bytes
        self._known: OrderedDict[Any, tuple[Known, int]] = OrderedDict()
        self._bytes = 0

    def __len__(self) -> int:
        return len(self._known)

    def get(self, key: Any) -> Known | None:
        found = self._known.get(key)
        if found is None:
            return None
        self._known.move_to_end(key)
        return found[0]

    def add(self, key: Any, known: Known) -> None:
        """Once it has run: before, nobody knows how large its plan is."""
        self._drop(key)
        self._known[key] = (known, known.nbytes)
        self._bytes += known.nbytes
        while self._bytes > self._most_bytes and len(self._known) > 1:
            self._drop(next(iter(self._known)))

    def _drop(self, key: Any) -> None:
        found = self._known.pop(key, None)
        if found is not None:
            self._bytes -= found[1]
