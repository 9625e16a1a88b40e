"""Makes the transfer of a call: one kept from before, or a new one of the kind that its devices ask for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..groups.parent import ParentGroup
from .gpu_medium import CudaTransfer
from .gpu_offer import DeviceTypes
from .persistent import PersistentTransfer, Problem, ranks_of
from .pinned_medium import StagedTransfer

if TYPE_CHECKING:
    from ..topology import Topology
    from .casts import Casts

__all__ = ["agreed_transfer", "unagreed_transfer"]

_KEPT = 256  # compiled transfers of a group, which this rank keeps for later calls


def agreed_transfer(
    parent: ParentGroup,
    problems: Sequence[Problem],
    backward: Sequence[Problem] | None,
    *,
    op: str,
    strategy: str,
    topology: Topology | None,
    device_types: DeviceTypes = ("cpu", "cpu"),
    casts: Casts | None = None,
) -> PersistentTransfer:
    """The transfer of an ordinary call: one kept from before, or a new one. It agrees within a launch, unless
    the ranks have agreed on one of its kind, so that every call takes one ordinal in either case."""
    kept = parent.private(ranks_of(problems), op).transfers
    reverse = None if backward is None else tuple(backward)
    kind = (op, tuple(problems), reverse, strategy, topology, device_types, casts)
    transfer = kept.get(kind)
    if transfer is None:
        transfer = unagreed_transfer(
            parent,
            problems,
            backward,
            op=op,
            strategy=strategy,
            topology=topology,
            device_types=device_types,
            casts=casts,
        )
        transfer._kind = kind
        if len(kept) >= _KEPT:
            kept.pop(next(iter(kept)), None)
        kept[kind] = transfer
    return transfer


def unagreed_transfer(
    parent: ParentGroup,
    problems: Sequence[Problem],
    backward: Sequence[Problem] | None,
    *,
    op: str,
    strategy: str,
    topology: Topology | None,
    device_types: DeviceTypes = ("cpu", "cpu"),
    casts: Casts | None = None,
    lane: int = 0,
) -> PersistentTransfer:
    """A new transfer with a slot of its own, which it agrees on within its first launch.
    device_types: see gpu_offer.device_types_of; casts: what it casts, between GPUs alone."""
    if device_types == ("cpu", "cpu"):
        transfer = PersistentTransfer.__new__(PersistentTransfer)
    elif device_types == ("cuda", "cuda"):
        transfer = CudaTransfer.__new__(CudaTransfer)
    else:
        transfer = StagedTransfer.__new__(StagedTransfer)
    transfer._device_types = device_types
    transfer._setup(parent, problems, backward, lane, op, strategy, topology, casts)
    return transfer
