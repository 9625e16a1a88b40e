"""The c10d backend "meshcast": ordinary collectives go to gloo, and reshard finds its peers through it."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

import torch.distributed as dist

if TYPE_CHECKING:
    from . import _C

__all__ = ["NAME", "register"]

NAME = "meshcast"


def register() -> None:
    """Makes `init_process_group("meshcast")` and `new_group(backend="meshcast")` known to torch. Idempotent;
    opens no socket and starts no thread. Does nothing where torch was built without torch.distributed."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, devices=["cpu"])


def _create(store: dist.Store, rank: int, size: int, timeout: timedelta) -> _C.ProcessGroupMeshcast:
    """Called by torch for each new group. Gloo is built here because torch ships no header for it."""
    from . import _C

    inner = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), rank, size, timeout)
    return _C.ProcessGroupMeshcast(inner, rank, size)
