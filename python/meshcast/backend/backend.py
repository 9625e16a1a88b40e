"""Process groups of the backend: on the CPU large broadcasts are multicasts, and point-to-point messages go
over UCX where it can be used, inside a host through shared memory; all else goes to gloo there, and to NCCL
on GPUs.

pg_options of it are those of its inner backends, gloo on the CPU and NCCL on GPUs.
"""

from __future__ import annotations

import copy
import functools
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..base import settings
from ..errors import LayoutError, MeshcastError
from . import NAME

if TYPE_CHECKING:
    from .. import _C

__all__ = ["InnerNccl", "create", "nccl_obstacle", "split"]


def create(group: Any, options: Any) -> _C.ProcessGroupMeshcast:
    """Called by torch for each new group, once for both devices; for which of them, it does not say. Gloo is
    built here because torch ships no header for it.

    group: as torch describes it. options: the user's pg_options. Raises LayoutError for those of another
    backend.
    """
    from .. import _C
    from .point_to_point import Broadcasts, announce, settle

    store, rank, size, timeout = group.store, group.group_rank, group.group_size, group.timeout
    gloo_options, nccl_options = split(options)
    # From torch 2.14 on: no other rank need be there before the first `reconfigure`. Gloo has all calls then.
    later = getattr(group, "enable_reconfigure", False)
    generation = None if later else announce(dist.PrefixStore("messages", store), rank, size)
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
    messages = None if later else settle(generation, rank, ranks, timeout.total_seconds())

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
        return create(part, options)

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


def split(options: Any) -> tuple[Any, Any]:
    """pg_options as options for gloo and for NCCL, each None for torch's defaults. Takes those of either, or
    a dict of both by device type, {"cpu": ..., "cuda": ...}. Raises LayoutError for anything else."""
    if options is None:
        return None, None
    if isinstance(options, Mapping):
        by_device = dict(options)
    else:
        by_device = {
            next((device for device in _KINDS if isinstance(options, _class_of(device))), ""): options
        }
    for device, given in by_device.items():
        if device not in _KINDS or not (given is None or isinstance(given, _class_of(device))):
            raise LayoutError(
                f"pg_options: expected {' or '.join(_KINDS.values())}, or a dict of them by device type, "
                f'{{"cpu": ..., "cuda": ...}}; found {_described(options)}',
                op="init_process_group",
            )
    return by_device.get("cpu"), by_device.get("cuda")


_KINDS = {"cpu": "ProcessGroupGloo.Options", "cuda": "ProcessGroupNCCL.Options (where torch has NCCL)"}


def _class_of(device: str) -> type | tuple[()]:
    """The empty tuple, of which nothing is an instance, where torch was built without that backend."""
    if device == "cpu":
        return dist.ProcessGroupGloo._Options  # type: ignore[attr-defined]
    return dist.ProcessGroupNCCL.Options if dist.is_nccl_available() else ()


def _described(options: Any) -> str:
    if isinstance(options, Mapping):
        entries = (f"{key!r}: {type(value).__name__}" for key, value in options.items())
        return f"{{{', '.join(entries)}}}"
    return f"{type(options).__module__}.{type(options).__qualname__}"


class InnerNccl:
    """Makes the ProcessGroupNCCL inside a group, when a tensor on a GPU first needs it. It is torch's own,
    made by torch's Python: nothing here is compiled against CUDA.

    store: of the group. rank, size, timeout: of the group. options: ProcessGroupNCCL.Options or None. name,
    ranks: the group's, for NCCL's logs; ranks are global ones, none for the default group.
    """

    def __init__(
        self,
        store: dist.Store,
        rank: int,
        size: int,
        timeout: timedelta,
        options: Any = None,
        name: str = "",
        ranks: Sequence[int] = (),
    ) -> None:
        self._store, self._rank, self._size, self._timeout = store, rank, size, timeout
        self._options, self._name, self._ranks = options, name, list(ranks)
        self._lock = threading.Lock()  # two made from one store would take each other for their peers
        self._made: Any = None

    def possible(self) -> bool:
        """Returns whether this process can have an inner backend."""
        return not _obstacle_here()

    def make(self, op: str) -> Any:
        """The backend, made at the first call; opens no connection and asks no other rank, which NCCL does in
        its first collective. Raises LayoutError where there is no GPU or no NCCL, MeshcastError where torch
        cannot make it."""
        what = f"rank {self._rank} of the group: {op}"
        with self._lock:
            if self._made is None:
                obstacle = _obstacle_here()
                if obstacle:
                    raise LayoutError(
                        f"{what}: the tensors are on cuda, but {obstacle}; or keep the tensors of this call "
                        "on the CPU",
                        rank=self._rank,
                        op=op,
                    )
                try:
                    self._made = self._create()
                except Exception as cause:
                    raise MeshcastError(
                        f"{what}: torch could not make the ProcessGroupNCCL for tensors on cuda: {cause}",
                        rank=self._rank,
                        op=op,
                    ) from cause
            return self._made

    def _create(self) -> Any:
        # A copy: groups may share what the user gave, and theirs are made at any time.
        given = self._options
        options = dist.ProcessGroupNCCL.Options() if given is None else copy.copy(given)
        options._timeout = self._timeout
        options.group_name = self._name
        options.global_ranks_in_group = self._ranks
        return dist.ProcessGroupNCCL(dist.PrefixStore("nccl", self._store), self._rank, self._size, options)


def nccl_obstacle(torch_cuda: str | None, has_nccl: bool, available: bool) -> str:
    """Returns why a process cannot have NCCL, with what to do; empty if it can. torch_cuda: CUDA of torch, or
    what stands for it."""
    release = torch.__version__
    if torch_cuda is None:
        return f"torch {release} is a CPU build: install a CUDA build of torch and build meshcast for it"
    if not has_nccl:
        return f"torch {release} was built without NCCL: install one that has it"
    if not available:
        return "torch sees no GPU here: look at CUDA_VISIBLE_DEVICES and the driver"
    return ""


def _obstacle_here() -> str:
    # On AMD's GPUs torch calls its RCCL by NCCL's name.
    return nccl_obstacle(
        torch.version.cuda or torch.version.hip, dist.is_nccl_available(), torch.cuda.is_available()
    )
