"""prepare: private groups and their connections ahead of the first call."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ..base import checks
from ..errors import LayoutError
from .parent import parent_group, seconds
from .telling import raise_refused

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

__all__ = ["prepare"]

_OP = "prepare"


def prepare(
    meshes: DeviceMesh | Sequence[DeviceMesh] | Sequence[int],
    *,
    group: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
) -> None:
    """Connects the ranks of all the meshes with each other, as the first call between these meshes would do.

    Optional, and a collective of those ranks; others may skip it. Blocks until every rank is connected.

    Args:
        meshes: those of a later call, source and destination together, or simply its global ranks.
        group: process group that holds these ranks; None for the default group.
        timeout: seconds or timedelta for the call; None for the group's.

    Raises:
        LayoutError: no ranks, or ranks outside `group`.
        DeadlineExceededError: names the ranks that did not come.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        meshcast.prepare([0, 1, 3])
        source, target = DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [3])
        x = distribute_tensor(torch.ones(4, 2), source, [Shard(0)])
        y = meshcast.reshard(x, target, [Replicate()])  # finds its connections there
    """
    try:
        parent = parent_group(group, _OP)
        limit = seconds(timeout, parent.timeout)
        ranks = sorted(set(_ranks(meshes)))
        if not ranks:
            raise LayoutError(f"{_OP}: no ranks; give the meshes of a later call, or its ranks")
        private = parent.private(ranks, _OP)
    except Exception as error:
        raise_refused(error, _OP, [meshes], group, timeout, prepares=True)
    if parent.rank in ranks:
        private.connect(limit)


def _ranks(given: Any) -> Iterable[int]:
    if hasattr(given, "mesh_dim_names"):  # a DeviceMesh
        return [int(rank) for rank in given.mesh.flatten().tolist()]
    if isinstance(given, str) or not isinstance(given, Iterable):
        raise LayoutError(f"{_OP}: expected meshes or global ranks, found {checks.shown(given)}")
    found: list[int] = []
    for item in given:
        if hasattr(item, "mesh_dim_names"):
            found.extend(_ranks(item))
        else:
            found.append(checks.integer(f"{_OP}: rank", item, 0, (1 << 31) - 1))
    return found
