"""The c10d backend "meshcast": on the CPU large broadcasts are multicasts, and point-to-point messages go
over UCX where it can be used; all else goes to gloo there, and to NCCL on GPUs."""

from __future__ import annotations

import functools
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from ..base import settings

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
    """Called by torch for each new group, once for both devices; for which of them, it does not say. Gloo is
    built here because torch ships no header for it.

    group: what torch tells of it. options: the user's pg_options. Raises LayoutError for those of another
    backend.
    """
    from .. import _C
    from .inner_nccl import InnerNccl, split
    from .point_to_point import Broadcasts, announce, settle

    store, rank, size, timeout = group.store, group.group_rank, group.group_size, group.timeout
    gloo_options, nccl_options = split(options)
    # From torch 2.14 on: no other rank need be there before the first `reconfigure`. Gloo has all calls then.
    later = getattr(group, "enable_reconfigure", False)
    life = None if later else announce(dist.PrefixStore("messages", store), rank, size)
    inner = _gloo(dist.PrefixStore("gloo", store), rank, size, timeout, gloo_options, later)
    inner.options.global_ranks_in_group = list(group.global_ranks_in_group)  # both as torch sets them
    inner.options.group_name = group.group_id
    _open_monitored_barrier()
    broadcasts = Broadcasts()
    cuda = InnerNccl(
        store, rank, size, timeout, nccl_options, group.group_id, list(group.global_ranks_in_group)
    )
    at_least = settings.BROADCAST_BYTES.integer(op="init_process_group")
    ranks = list(group.global_ranks_in_group) or list(range(size))
    messages = None if later else settle(life, rank, ranks, timeout.total_seconds())

    def part_of(part_store: Any, members: list[int], part_options: Any) -> _C.ProcessGroupMeshcast | None:
        """The backend of a part of the group; None on ranks outside. members: ranks of the group."""
        if rank not in members:
            return None
        part = SimpleNamespace(
            store=part_store,
            group_rank=members.index(rank),
            group_size=len(members),
            timeout=part_options._timeout,
            group_id=part_options.group_name,
            global_ranks_in_group=[ranks[member] for member in members],
        )
        return _create(part, options)

    backend = _C.ProcessGroupMeshcast(
        inner,
        rank,
        size,
        broadcasts.start,
        settings.BROADCAST_BYTES.limits[1] if later else at_least,
        messages,
        cuda,
        part_of,
    )
    broadcasts.key = backend.key
    return backend


def _gloo(store: dist.Store, rank: int, size: int, timeout: timedelta, options: Any, later: bool) -> Any:
    """later: connects no rank before `reconfigure`."""
    if options is None:
        regime = {"enable_reconfigure": True} if later else {}  # torch before 2.14 has no such argument
        return dist.ProcessGroupGloo(store, rank, size, timeout, **regime)
    if hasattr(options, "enable_reconfigure"):
        options.enable_reconfigure = later
    options._timeout = timeout  # the group's own always holds, as in torch for NCCL
    if not options._devices:
        options._devices = [dist.ProcessGroupGloo.create_default_device()]
    return dist.ProcessGroupGloo(store, rank, size, options)


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
        if c10d._rank_not_in_group(group) or not _serves_cpu(group):
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


def _serves_cpu(group: dist.ProcessGroup | None) -> bool:
    return f"cpu:{NAME}" in dist.get_backend_config(group).split(",")
