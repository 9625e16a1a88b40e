"""The c10d backend "meshcast". torch knows its name once `register` was called; the rest is loaded with the
first process group of it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch.distributed as dist

if TYPE_CHECKING:
    from .. import _C

__all__ = ["NAME", "register"]

NAME = "meshcast"


def register() -> None:
    """Makes `init_process_group("meshcast")` and `new_group(backend="meshcast")` known to torch. Idempotent;
    opens no socket and starts no thread. Does nothing where torch was built without torch.distributed."""
    if dist.is_available() and NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create, extended_api=True, devices=["cpu", "cuda"])


def _create(group: Any, options: Any) -> _C.ProcessGroupMeshcast:
    from .backend import create

    return create(group, options)
