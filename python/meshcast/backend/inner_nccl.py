"""InnerNccl: the ProcessGroupNCCL inside a group of backend "meshcast", made when a tensor on a GPU first
needs it. It is torch's own, made by torch's Python: nothing here is compiled against CUDA.

pg_options of backend "meshcast": those of its inner backends, gloo on the CPU and NCCL on GPUs.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import LayoutError, MeshcastError

__all__ = ["InnerNccl", "nccl_obstacle", "split"]


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
    """Makes the inner backend of one group.

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
        with self._lock:
            if self._made is None:
                obstacle = _obstacle_here()
                if obstacle:
                    raise LayoutError(
                        f"rank {self._rank} of the group: {op}: the tensors are on cuda, but {obstacle}; or "
                        "keep the tensors of this call on the CPU",
                        rank=self._rank,
                        op=op,
                    )
                try:
                    self._made = self._create()
                except Exception as cause:
                    raise MeshcastError(
                        f"rank {self._rank} of the group: {op}: torch could not make the ProcessGroupNCCL "
                        f"for tensors on cuda: {cause}",
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
