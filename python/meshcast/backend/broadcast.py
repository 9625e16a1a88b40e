"""torch.distributed.broadcast of large tensors in groups of backend "meshcast": a reshard from one rank to
all others."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import Replicate

from ..errors import MeshcastError
from ..groups.parent import ParentGroup, parent_group
from ..layout import Layout
from ..planning.plan import Problem
from ..transfers.transfer import kept_transfer

if TYPE_CHECKING:
    from .. import _C

__all__ = ["Broadcasts"]


class Broadcasts:
    """The multicasts of one group. Their ranks meet at the first of them, and agree once on each root and
    length: neither holds up the caller."""

    def __init__(self) -> None:
        self.key = 0  # of the backend that asks, which may outlive its Python object
        self._parent: weakref.ref[ParentGroup] | None = None
        self._ranks: list[int] = []  # global ones, in the order of the group

    def start(self, work: _C.PendingWork, data: torch.Tensor, root: int, timeout: float) -> None:
        """data: bytes in one piece, as many on every rank. root: in the group. timeout: seconds."""
        parent = self._find_parent()
        source = self._ranks[root]
        others = Layout([rank for rank in self._ranks if rank != source], [Replicate()])
        problem = Problem((data.numel(),), torch.uint8, Layout([source], [Replicate()]), others)
        transfer = kept_transfer(parent, [problem], "broadcast")
        sends = parent.rank == source
        call = transfer.launch([data if sends else None], [None if sends else data], timeout)

        def begun() -> None:
            if call.error is None:
                work.settle(call.work)
            else:
                work.fail(call.error)

        call.when_settled(begun)

    def _find_parent(self) -> ParentGroup:
        parent = None if self._parent is None else self._parent()
        if parent is None or parent.closed:
            group = _group_of(self.key)
            parent = parent_group(group, "broadcast").twin("broadcast")
            self._ranks = dist.get_process_group_ranks(group)
            self._parent = weakref.ref(parent)
        return parent


def _group_of(key: int) -> dist.ProcessGroup:
    """The process group that has this backend for the CPU, also below torch's debug wrapper."""
    for group in c10d._world.pg_map:
        try:
            found: Any = group._get_backend(torch.device("cpu"))
        except RuntimeError:
            continue  # it has none for the CPU
        if getattr(getattr(found, "wrapped_pg", found), "key", None) == key:
            return group
    raise MeshcastError("broadcast: no process group has this backend any more", op="broadcast")
