"""Differences between stages on the CPU and on GPUs: the device itself and the transfers of its tensors."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from meshcast.errors import LayoutError
from meshcast.groups.parent import parent_group
from meshcast.planning.plan import Problem
from meshcast.transfers.gpu import own_obstacle
from meshcast.transfers.transfer import DEFAULT_OPTIONS, PersistentTransfer, PlanOptions, new_transfer

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


__all__ = ["current", "make_transfer", "stage_device"]


def stage_device(what: str, device: Any, mesh: DeviceMesh | None) -> torch.device:
    """The device of a stage; of "cuda" without a number the current one. what: names the stage in errors.
    mesh: of the user, if any. Raises LayoutError where this process cannot use it, or the mesh is on
    another."""
    found = torch.device(device)
    if found.type == "cuda":
        reason = own_obstacle(copies_only=False)
        if reason:
            raise LayoutError(f"{what}: device is {device}, but {reason}")
        count = torch.cuda.device_count()
        if found.index is None:
            found = torch.device("cuda", torch.cuda.current_device())
        elif found.index >= count:
            raise LayoutError(f"{what}: device is {device}, but this process sees {count} GPUs, cuda:0 first")
    if mesh is not None and mesh.device_type != found.type and "cuda" in (mesh.device_type, found.type):
        raise LayoutError(
            f"{what}: device is {found}, but mesh= is on {mesh.device_type}: make both the same"
        )
    return found


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Makes a GPU the current one: what a transfer finds where a rank has no shard that names it."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def make_transfer(
    device: torch.device,
    group: dist.ProcessGroup | None,
    problems: Sequence[Problem],
    lane: int,
    op: str,
    timeout: float,
    options: PlanOptions = DEFAULT_OPTIONS,
) -> PersistentTransfer:
    """A transfer of the pipeline's for tensors on the device of a stage. The ranks agree on it in the
    background, those on GPUs in its first call, which `EdgeTransfers.warm_up` makes."""
    kind = "cuda" if device.type == "cuda" else "cpu"
    parent = parent_group(group, op)
    transfer = new_transfer(parent, problems, op, options, device_types=(kind, kind), lane=lane)
    if kind == "cpu":
        transfer.agree_ahead(timeout)
    return transfer
