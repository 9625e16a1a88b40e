"""Makes a rank leave its process groups at once, whatever it waits for in them."""

from __future__ import annotations

import contextlib
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor.debug import _clear_sharding_prop_cache

from ..groups.parent import known_parents

__all__ = ["abort_groups", "forget_meshes", "leave_groups"]

_NEVER_SENT = (1 << 31) - 1  # tag
_lock = threading.Lock()  # of the groups that torch knows


def abort_groups(reason: str) -> None:
    """Ends what this rank waits for in all groups, and their connections: its peers get errors too. From any
    thread; the groups are of no use after it."""
    with _lock:
        for parent in known_parents():
            parent.abort(reason)
        for group in list(c10d._world.pg_map):
            for device in group._device_types:
                with contextlib.suppress(RuntimeError):
                    _abort(group._get_backend(device), group.rank())


def _abort(backend: Any, rank: int) -> None:
    backend = getattr(backend, "wrapped_pg", backend)  # under TORCH_DISTRIBUTED_DEBUG
    backend = getattr(backend, "inner", backend)  # of backend meshcast
    if "gloo" not in backend.name():
        backend.abort()
        return
    # Gloo has no call for it. It closes all connections of a group when one message is late, but not when its
    # sender is already known to be gone: so one of each.
    for peer in set(range(backend.size())) - {rank}:
        with contextlib.suppress(RuntimeError):
            late = backend.recv([torch.empty(1)], peer, _NEVER_SENT)
            late.wait(timedelta(milliseconds=1))


def leave_groups(reason: str) -> None:
    """Aborts and destroys all process groups. Objects of torch that hold one may live on."""
    if not dist.is_initialized():
        return
    abort_groups(reason)
    with _lock:
        for parent in known_parents():
            parent.close(time.monotonic())
        dist.destroy_process_group()
    forget_meshes()


def forget_meshes() -> None:
    """Drops what DTensor keeps for the meshes that it has met. It finds that by meshes that are equal, and it
    has the names of the groups of then: they are of no group now, or of another one. What other threads
    keep, as those that run a backward on GPUs, stays."""
    _clear_sharding_prop_cache()
