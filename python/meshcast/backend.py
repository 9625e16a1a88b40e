"""The c10d backend "meshcast": large broadcasts are multicasts, all other collectives go to gloo."""

from __future__ import annotations

import functools
import os
from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

from .errors import MeshcastError

if TYPE_CHECKING:
    from . import _C

__all__ = ["NAME", "register"]

NAME = "meshcast"

_LARGE = 1 << 20  # bytes; where the switch pays is measured in docs/backend.md


def register() -> None:
    """Makes `init_process_group("meshcast")` and `new_group(backend="meshcast")` known to torch. Idempotent;
    opens no socket and starts no thread. Does nothing where torch was built without torch.distributed."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> _C.ProcessGroupMeshcast:
    """Called by torch for each new group. Gloo is built here because torch ships no header for it."""
    from . import _C
    from .broadcast import Broadcasts

    inner = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    inner._set_sequence_number_for_group()  # as torch does for gloo itself
    _open_monitored_barrier()
    broadcasts = Broadcasts()
    backend = _C.ProcessGroupMeshcast(inner, rank, size, broadcasts.start, _multicast_from())
    broadcasts.key = backend.key
    return backend


def _multicast_from() -> int:
    """Bytes from which a broadcast is a multicast, alike on all ranks: MESHCAST_BROADCAST_BYTES, or 1 MiB."""
    text = os.environ.get("MESHCAST_BROADCAST_BYTES", "").strip() or str(_LARGE)
    if not text.isdecimal() or int(text) == 0:
        raise MeshcastError(
            f"MESHCAST_BROADCAST_BYTES={text}: expected the number of bytes, 1 or more, from which a "
            "broadcast is a multicast, the same on all ranks",
            op="init_process_group",
        )
    return int(text)


def _open_monitored_barrier() -> None:
    """torch.distributed.monitored_barrier asks for gloo by name. From the first group of this backend on, it
    takes those of this one too; every other group still goes to torch's own function. Idempotent."""
    from torch.distributed import distributed_c10d as c10d

    torchs = c10d.monitored_barrier
    if getattr(torchs, "__meshcast__", False):
        return

    @functools.wraps(torchs)
    def monitored_barrier(
        group: dist.ProcessGroup | None = None,
        timeout: timedelta | None = None,
        wait_all_ranks: bool = False,
    ) -> None:
        if c10d._rank_not_in_group(group) or dist.get_backend(group) != NAME:
            return torchs(group, timeout, wait_all_ranks)
        if timeout is None:
            timeout = dist.default_pg_timeout  # as for gloo: not that of the group
        elif isinstance(timeout, int | float):  # gloo takes them too
            timeout = timedelta(seconds=timeout)
        c10d._check_valid_timeout(timeout)
        found = c10d._get_default_group() if group is None else group
        found.monitored_barrier(timeout, wait_all_ranks=wait_all_ranks)  # type: ignore[attr-defined]

    monitored_barrier.__meshcast__ = True  # type: ignore[attr-defined]
    c10d.monitored_barrier = dist.monitored_barrier = monitored_barrier
