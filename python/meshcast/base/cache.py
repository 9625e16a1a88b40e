"""A dictionary of bounded size, for what can be made again."""

from __future__ import annotations

from typing import TypeVar

__all__ = ["Cache"]

K = TypeVar("K")
V = TypeVar("V")


class Cache(dict[K, V]):
    """The `most` entries that were set last; looking one up costs what it costs in a dict."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most

    def __setitem__(self, key: K, value: V) -> None:
        self.pop(key, None)
        while len(self) >= self.most:
            self.pop(next(iter(self)), None)  # another thread may have dropped it
        super().__setitem__(key, value)
