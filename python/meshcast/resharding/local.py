"""reshard_local: plain tensors and layouts, no DTensor, no DeviceMesh, no autograd."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from typing_extensions import Unpack

from ..base import checks
from ..errors import LayoutError
from ..groups.parent import ParentGroup, parent_group, seconds
from ..groups.telling import raise_refused
from ..layout import Layout
from ..planning.plan import Problem
from ..transfers.gpu_offer import DeviceTypes, device_types_of, require_gpu
from ..transfers.handle import Handle
from ..transfers.make import kept_transfer
from ..transfers.persistent import CallOptions, PersistentTransfer, PlanOptions
from .dtensors import copied
from .memory import check_storage, overlaps, storage_of
from .reduction import check_reducible

if TYPE_CHECKING:
    import torch.distributed as dist

    from ..topology import Topology

__all__ = ["reshard_local"]

_OP = "reshard_local"


@overload
def reshard_local(
    src: torch.Tensor | None,
    src_layout: Layout,
    dst: torch.Tensor | None,
    dst_layout: Layout,
    *,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str | tuple[str, str] = "cpu",
    async_op: Literal[False] = False,
    **options: Unpack[CallOptions],
) -> torch.Tensor | None: ...
@overload
def reshard_local(
    src: torch.Tensor | None,
    src_layout: Layout,
    dst: torch.Tensor | None,
    dst_layout: Layout,
    *,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str | tuple[str, str] = "cpu",
    async_op: Literal[True],
    copy: bool = False,
    **options: Unpack[CallOptions],
) -> Handle[torch.Tensor | None]: ...
@torch.no_grad()
def reshard_local(
    src: torch.Tensor | None,
    src_layout: Layout,
    dst: torch.Tensor | None,
    dst_layout: Layout,
    *,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: str | tuple[str, str] = "cpu",
    group: dist.ProcessGroup | None = None,
    strategy: str = "auto",
    topology: Topology | None = None,
    async_op: bool = False,
    copy: bool = False,
    timeout: float | timedelta | None = None,
) -> torch.Tensor | Handle[torch.Tensor | None] | None:
    """Fills dst, this rank's shard under dst_layout, from the src shards of all ranks under src_layout.

    Called by every rank of both layouts in one order; other ranks may skip it. Gradients do not flow. After
    an error the contents of dst are undefined.

    Args:
        src: this rank's shard, of the shape that src_layout gives it and of `dtype`, any strides; None on a
            rank outside src_layout, or whose shard is empty.
        src_layout, dst_layout: who has what before and after; Partial only before.
        dst: this rank's shard under dst_layout, any strides under which each element has an address of its
            own. It may share memory with src, which is then copied first; in one storage with dst, src is not
            watched for changes before wait(). None inside dst_layout: it is allocated.
        shape: of the global tensor.
        dtype: of both; nothing is cast.
        device: "cpu" or "cuda", where the shards of all ranks are, or (that of the source, that of the
            destination). What is allocated on cuda is on the current GPU.
        group: process group that holds the ranks of both layouts; None for the default group.
        strategy, topology: see meshcast.plan.
        async_op: return a Handle at once.
        copy: with async_op, src is copied at once, and may be changed from then on.
        timeout: seconds or timedelta for the whole call; None for the group's.

    Returns:
        dst, None outside dst_layout; or with async_op a Handle whose wait() returns that.

    Raises:
        LayoutError: also for a shard of another shape or dtype than its layout says.
        Others as meshcast.reshard.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        rows = meshcast.Layout([0, 1], [Shard(0)])
        columns = meshcast.Layout([1, 2, 3], [Shard(1)])
        rank = dist.get_rank()
        mine = torch.full((2, 6), float(rank)) if rank in (0, 1) else None
        column = meshcast.reshard_local(mine, rows, None, columns, shape=(4, 6), dtype=torch.float32)
        if rank in (1, 2, 3):
            assert column[:, 0].tolist() == [0, 0, 1, 1]
    """
    try:
        parent = parent_group(group, _OP)
        limit = seconds(timeout, parent.timeout)
        for name, layout in (("src_layout", src_layout), ("dst_layout", dst_layout)):
            if not isinstance(layout, Layout):
                raise LayoutError(f"{_OP}: {name} must be a meshcast.Layout, found {type(layout).__name__}")
        private = parent.private(sorted({*src_layout.ranks, *dst_layout.ranks}), _OP)
        if parent.rank not in private.ranks:
            return Handle(None, None, lambda: 0.0) if async_op else None
        transfer = _transfer(
            parent, src_layout, dst_layout, shape, dtype, device, PlanOptions(strategy, topology)
        )
        if dst is None:
            local_shape = dst_layout.local_shapes(shape).get(parent.rank)
            where = "cuda" if transfer._device_types[1] == "cuda" else None
            dst = None if local_shape is None else torch.empty(local_shape, dtype=dtype, device=where)
        else:
            check_storage(dst, _OP)
        src = copied(src) if copy and async_op else src
        given = src
        watched = [] if src is None else [src]
        if src is not None and dst is not None:
            if overlaps(src, dst):
                given = src.clone()  # neighbours would read what already came in from others
            if storage_of(src) == storage_of(dst):
                watched = []  # this very call writes there
        call = transfer.launch([given], [dst], limit, driven=not async_op)
    except Exception as error:
        raise_refused(error, _OP, [src_layout, dst_layout], group, timeout)
    if dst is not None:
        call.wrote(dst)
    handle = Handle(call, dst, lambda: transfer.plan.lower_bound, watched)
    return handle if async_op else handle.wait()


def _transfer(
    parent: ParentGroup,
    src_layout: Layout,
    dst_layout: Layout,
    shape: Any,
    dtype: Any,
    device: Any,
    options: PlanOptions,
) -> PersistentTransfer:
    if dst_layout.has_partial:
        raise LayoutError(f"{_OP}: dst_layout {dst_layout} holds Partial; ask for Replicate or Shard instead")
    check_reducible(src_layout, dtype, _OP)
    device_types = _device_types(device)
    holds = (parent.rank in src_layout.ranks, parent.rank in dst_layout.ranks)
    if ("cuda", True) in zip(device_types, holds, strict=True):
        require_gpu(_OP, copies_only=device_types != ("cuda", "cuda"))
    problem = Problem(tuple(shape), dtype, src_layout, dst_layout)
    return kept_transfer(parent, [problem], _OP, options, device_types=device_types)


def _device_types(device: Any) -> DeviceTypes:
    given = (device, device) if isinstance(device, str) else device
    if not isinstance(given, tuple) or len(given) != 2:
        raise LayoutError(
            f'{_OP}: device must be "cpu", "cuda" or a pair of them, for the source and the destination, '
            f"found {checks.shown(device)}"
        )
    source, destination = given
    return device_types_of(source, destination, _OP)
