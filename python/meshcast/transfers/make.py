"""Makes the transfer of a call: one kept from before, or a new one over the medium that its devices need."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..groups.parent import ParentGroup
from ..planning.plan import Problem
from .casts import types_of
from .gpu_medium import GpuMedium
from .gpu_offer import DeviceTypes
from .medium import Medium
from .persistent import DEFAULT_OPTIONS, REVERSE_LANE, PersistentTransfer, PlanOptions, ranks_of
from .pinned_medium import PinnedMedium

if TYPE_CHECKING:
    from .casts import Casts

__all__ = ["kept_transfer", "new_transfer"]

_KEPT = 256  # transfers of a group, which this rank keeps for later calls


def kept_transfer(
    parent: ParentGroup,
    problems: Sequence[Problem],
    op: str,
    options: PlanOptions = DEFAULT_OPTIONS,
    *,
    backward: Sequence[Problem] | None = None,
    device_types: DeviceTypes = ("cpu", "cpu"),
    casts: Casts | None = None,
) -> PersistentTransfer:
    """The transfer of an ordinary call: one kept from before, or a new one. It agrees within a launch, unless
    the ranks have agreed on one of its kind, so that every call takes one ordinal in either case."""
    kept = parent.private(ranks_of(problems), op).transfers
    kind = (op, tuple(problems), None if backward is None else tuple(backward), options, device_types, casts)
    transfer: PersistentTransfer | None = kept.get(kind)
    if transfer is None:
        transfer = new_transfer(
            parent,
            problems,
            op,
            options,
            backward=backward,
            device_types=device_types,
            casts=casts,
            kind=kind,
        )
        if len(kept) >= _KEPT:
            kept.pop(next(iter(kept)), None)
        kept[kind] = transfer
    return transfer


def new_transfer(
    parent: ParentGroup,
    problems: Sequence[Problem],
    op: str,
    options: PlanOptions = DEFAULT_OPTIONS,
    *,
    backward: Sequence[Problem] | None = None,
    device_types: DeviceTypes = ("cpu", "cpu"),
    casts: Casts | None = None,
    **more: Any,
) -> PersistentTransfer:
    """A transfer with a slot of its own, which it agrees on within its first launch. device_types: see
    gpu_offer.device_types_of; casts: what it casts, between GPUs alone; more: lane, kind of
    PersistentTransfer."""
    medium: Medium | None = None
    if device_types != ("cpu", "cpu"):
        group = parent.private(ranks_of(problems), op)
        if device_types == ("cuda", "cuda"):
            lane = more.get("lane", 0)
            # Of both directions: in a backward, ranks may come by too late to make one.
            lanes = (lane,) if backward is None else (lane, REVERSE_LANE)
            medium = GpuMedium(group, op, lanes, _types(problems, backward, casts))
        else:
            medium = PinnedMedium(group, device_types)
    return PersistentTransfer(
        parent,
        problems,
        op,
        options,
        backward=backward,
        medium=medium,
        device_types=device_types,
        casts=casts,
        **more,
    )


def _types(problems: Sequence[Problem], backward: Sequence[Problem] | None, casts: Casts | None) -> Any:
    """Of the tensors on the way there and, in the backward, back; see types_of."""
    if casts is None:
        return (), ()
    forth = [dtype for _, dtype, _, _ in problems]
    back = [dtype for _, dtype, _, _ in backward or ()]
    return types_of(forth, casts.forth), types_of(back, casts.back)
