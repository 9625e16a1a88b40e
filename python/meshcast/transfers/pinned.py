"""PinnedPool: pinned host memory of a private group, used again by its later calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from .. import _C

__all__ = ["PinnedPool"]

_LEAST = 4096  # bytes of a block


class PinnedPool:
    """Blocks of pinned memory, of sizes that are powers of two, so that tensors of unlike shapes share them.

    Pinning costs far more than a copy: a block is allocated once, lent to one call at a time, and lent again
    when that call is through with it on the host and on the GPU. Those of a call that failed are given up:
    nobody knows what still writes to them. Thread-safe.
    """

    def __init__(self, pinned: Callable[[int], torch.Tensor]) -> None:
        self._pinned = pinned  # allocates so many bytes
        self._free: dict[int, list[torch.Tensor]] = {}
        self._loans: list[tuple[_C.Call, list[torch.Tensor]]] = []
        self._lock = threading.Lock()

    def lend(self, sizes: Sequence[int]) -> list[torch.Tensor]:
        """A block of at least so many bytes for each size. They are the pool's again if they come with
        watch(); else they are freed with their last reference."""
        with self._lock:
            self._collect()
            return [self._block(size) for size in sizes]

    def watch(self, call: _C.Call, blocks: list[torch.Tensor]) -> None:
        """The blocks are the call's until it has ended, on the GPU as well."""
        with self._lock:
            self._loans.append((call, blocks))

    def abort(self, reason: str) -> None:
        """Nothing: the calls that failed are told apart when memory is collected."""

    def close(self) -> None:
        """Nothing: blocks end with their last reference."""

    def _collect(self) -> None:
        in_use = []
        for call, blocks in self._loans:
            if not call.is_completed():
                in_use.append((call, blocks))
            elif _succeeded(call):
                for block in blocks:
                    self._free.setdefault(block.numel(), []).append(block)
        self._loans = in_use

    def _block(self, size: int) -> torch.Tensor:
        rounded = max(_LEAST, 1 << (size - 1).bit_length())
        free = self._free.get(rounded)
        return free.pop() if free else self._pinned(rounded)


def _succeeded(call: _C.Call) -> bool:
    """Of a call that has ended."""
    if call.error is not None:
        return False
    try:
        call.work.wait()  # does not block any more
    except Exception:
        return False
    return True
