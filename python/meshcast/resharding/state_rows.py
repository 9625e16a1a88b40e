"""Rounds of reshard_state_dict: a row of integers from every rank to every rank, and texts where a row says
that there is one."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import Replicate, Shard

from ..errors import DeadlineExceededError
from ..layout import Layout
from ..transfers.make import agreed_transfer

if TYPE_CHECKING:
    from ..groups.parent import ParentGroup
    from ..groups.private import PrivateGroup

__all__ = ["Rounds"]

_OP = "reshard_state_dict"
_PAUSE = 0.002  # seconds between two looks at the store


class Rounds:
    """The conversation of one group of ranks. All ranks make the same calls in one order."""

    def __init__(self, parent: ParentGroup) -> None:
        self._parent = parent
        self.ranks = sorted(parent.ranks)
        self._group: PrivateGroup = parent.private(self.ranks, _OP)
        self._rows = Layout(self.ranks, [Shard(0)])
        self._all = Layout(self.ranks, [Replicate()])
        self._posted: list[str] = []

    def connect(self, limit: float) -> None:
        if self._group.board is None:
            self._group.connect(limit)

    def gather(self, row: Sequence[int], limit: float) -> dict[int, list[int]]:
        """Every rank's row, all of one length."""
        shape = (len(self.ranks), len(row))
        transfer = agreed_transfer(
            self._parent,
            [(shape, torch.int64, self._rows, self._all)],
            None,
            op=_OP,
            strategy="auto",
            topology=None,
        )
        mine = torch.tensor([list(row)], dtype=torch.int64)
        rows = torch.empty(shape, dtype=torch.int64)
        launch, _ = transfer.launch([mine], [rows], limit, driven=True)
        launch.wait()
        return dict(zip(self.ranks, rows.tolist(), strict=True))

    def post(self, topic: str, text: str) -> None:
        key = f"{topic}/{self._parent.rank}"
        self._group.board.set(key, text)
        self._posted.append(key)

    def read(self, topic: str, rank: int, deadline: float) -> str:
        """What `rank` posted, or will post at once."""
        key = f"{topic}/{rank}"
        begin = time.monotonic()
        while not self._group.board.check([key]):
            if time.monotonic() >= deadline:
                raise DeadlineExceededError(
                    f"{_OP}: rank {rank} did not say what it holds",
                    rank=self._parent.rank,
                    peer=rank,
                    op=_OP,
                    phase="agree",
                    elapsed=time.monotonic() - begin,
                )
            time.sleep(_PAUSE)
        return self._group.board.get(key).decode()

    def forget(self) -> None:
        """Deletes what this rank posted. Only after a round that followed the reading of it."""
        for key in self._posted:
            self._group.board.delete_key(key)
        self._posted.clear()
