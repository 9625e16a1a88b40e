"""The transfers of reshard_state_dict: moves in batches, compiled once and run one after the other."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from ..base import checks
from ..errors import DeadlineExceededError, mark_told
from ..groups.parent import ParentGroup
from ..layout import Layout
from ..planning.plan import Problem
from ..transfers.gpu import require_gpu
from ..transfers.medium import Casts, DeviceTypes, Ends, ends_of
from ..transfers.transfer import Call, PersistentTransfer, PlanOptions, new_transfer, ranks_of
from .compiled import Reduction, check_reducible, reduced_layout, reduction_inside, wire_dtype
from .meshes import Source
from .state_arguments import StateCall
from .state_moves import Agreed, Move
from .state_specs import OP

__all__ = ["Batch", "Part", "compile_batches"]

_PAUSE = 0.0002  # seconds between two looks at whether a GPU is through
# Bytes that a compiled plan takes, about: for each tensor what Python keeps of it, for each box of each task
# and message what C++ does.
_PER_TENSOR, _PER_TASK, _PER_PIECE, _PER_HOP = 4000, 400, 400, 60

Observer = Callable[["Part", str, torch.Tensor], None]


@dataclass(frozen=True)
class Part:
    """A move on this rank. number: its position among all moves; problem: as it travels; ends: what the
    transfer is given and fills; reduction: of the source, before it travels."""

    number: int
    move: Move
    problem: Problem
    ends: Ends
    reduction: Reduction | None
    sends: bool
    receives: bool


class Batch:
    """Moves that travel together, at one pair of places. transfer is None on a rank that takes no part."""

    def __init__(
        self, parent: ParentGroup, parts: Sequence[Part], options: PlanOptions, device_types: DeviceTypes
    ) -> None:
        self.parts = parts
        self._device_types = device_types
        self._transfer: PersistentTransfer | None = None
        self._rank = parent.rank
        self._call: Call | None = None  # since wait_for_turn(), what was started
        problems = [part.problem for part in parts]
        if any(part.sends or part.receives for part in parts):
            casts = None
            if any(part.ends.source != part.ends.destination for part in parts):
                casts = Casts(tuple(part.ends for part in parts))
            self._transfer = new_transfer(
                parent, problems, OP, options, device_types=device_types, casts=casts
            )
        else:
            parent.private(ranks_of(problems), OP)  # the ranks must exist here as well

    @property
    def nbytes(self) -> int:
        """The approximate number of bytes that are kept for it."""
        plan = None if self._transfer is None else self._transfer._plan
        size = len(self.parts) * _PER_TENSOR
        if plan is not None:
            core = plan._core
            size += core.num_tasks * _PER_TASK + core.num_pieces * _PER_PIECE + core.num_hops * _PER_HOP
        return size

    def bound(self) -> float:
        """Seconds that no plan of it can beat."""
        return 0.0 if self._transfer is None else self._transfer.plan.lower_bound

    def wait_for_turn(self) -> None:
        """Nothing of the next run has moved."""
        self._call = None

    def progress(self) -> tuple[int, int]:
        """Bytes that this rank has sent and received of it, and how many it will, as far as that is known:
        the first run plans once the ranks have met. Any thread."""
        plan = None if self._transfer is None else self._transfer._plan
        if plan is None:
            return 0, 0
        call = self._call
        figures = None if call is None else call.figures()
        expected = plan.bytes_sent(self._rank) + plan.bytes_received(self._rank)
        return 0 if figures is None else int(figures["bytes_done"]), expected

    def refuse(self, error: Exception, limit: float) -> None:
        """Tells the other ranks that this one does not run it. limit: seconds."""
        if self._transfer is not None:
            self._transfer._group.refuse(0, error, limit)

    def run(
        self,
        sent: Mapping[str, torch.Tensor],
        arriving: Mapping[str, torch.Tensor],
        deadline: float,
        observe: Observer | None,
    ) -> Call | None:
        """Moves what this rank sends, from `sent` by source, into the local tensors `arriving` by target."""
        sources: list[torch.Tensor | None] = []
        targets: list[torch.Tensor | None] = []
        outgoing: dict[tuple[str, Ends], torch.Tensor] = {}
        landing: dict[str, torch.Tensor] = {}
        for part in self.parts:
            source = target = None
            if part.sends:
                key = (part.move.source, part.ends)
                if key not in outgoing:
                    outgoing[key] = _outgoing(part, sent[part.move.source])
                source = outgoing[key]
            if part.receives:
                name = part.move.target
                local = arriving[name]
                if part.ends.destination != local.dtype or (part.move.through_host and local.is_cuda):
                    if name not in landing:
                        device = "cpu" if part.move.through_host else local.device
                        landing[name] = torch.empty(local.shape, dtype=part.ends.destination, device=device)
                    local = landing[name]
                target = local
            sources.append(source)
            targets.append(target)
        call = None
        if self._transfer is not None:
            left = max(deadline - time.monotonic(), 1e-3)
            call = self._call = self._transfer.launch(sources, targets, left, driven=True)
        try:
            try:  # beside the transfer, which reads the same memory
                self._observe(observe, "src", sources)
            finally:
                if call is not None:
                    call.wait()
            if call is not None and self._device_types != ("cpu", "cpu"):
                _end_on_gpu(call, deadline)
            self._observe(observe, "dst", targets)
            for name, local in landing.items():
                arriving[name].copy_(local)
        except Exception as error:
            mark_told(error)  # the others are in this call, or through with it
            raise
        return call

    def _observe(self, observe: Observer | None, side: str, tensors: Sequence[torch.Tensor | None]) -> None:
        for part, tensor in zip(self.parts, tensors, strict=True):
            if observe is not None and tensor is not None:
                observe(part, side, tensor)


def _outgoing(part: Part, local: torch.Tensor) -> torch.Tensor:
    """This rank's shard of the source as the transfer is given it."""
    if part.reduction is not None:
        local = part.reduction.run(local)
    if part.move.through_host:
        local = local.cpu()
    return local if local.dtype == part.ends.source else local.to(part.ends.source)


def _end_on_gpu(call: Call, deadline: float) -> None:
    """Blocks until the GPU is through as well: what fails there must be known before any rank returns."""
    begin = time.monotonic()
    while not call.is_completed():
        if time.monotonic() >= deadline:
            raise DeadlineExceededError(
                f"{OP}: the GPU was not through with what arrived by the limit of the call",
                op=OP,
                phase="transfer",
                elapsed=time.monotonic() - begin,
            )
        time.sleep(_PAUSE)
    call.wait()  # raises what failed meanwhile


def compile_batches(parent: ParentGroup, agreed: Agreed, call: StateCall) -> list[Batch]:
    """Batches of at most max_bytes_in_flight, in the order of the targets. All moves of a target are in
    one."""
    limit = call.options["max_bytes_in_flight"]
    options = PlanOptions(call.options["strategy"], call.topology)
    groups: list[tuple[list[Part], int]] = []
    number = 0
    for target in agreed.targets.values():
        parts = []
        for move in target.moves:
            parts.append(_part(parent.rank, number, move, call))
            number += 1
        if not parts:
            continue
        size = sum(_traveling(part) for part in parts)
        types = parts[0].move.device_types
        joins = bool(groups) and groups[-1][0][-1].move.device_types == types
        if joins and (limit is None or groups[-1][1] + size <= limit):
            groups[-1][0].extend(parts)
            groups[-1] = (groups[-1][0], groups[-1][1] + size)
        else:
            groups.append((parts, size))
    return [Batch(parent, parts, options, parts[0].move.device_types) for parts, _ in groups]


def _traveling(part: Part) -> int:
    """Bytes of what the destination wants of a source, once."""
    shape, dtype, _, dst = part.problem
    if not dst.by_boxes:
        return checks.total_bytes(shape, dtype)
    tiles = dst._core(shape).tiles(shape)
    return sum(checks.total_bytes([hi - lo for lo, hi in box], dtype) for box, _ in tiles)


def _part(rank: int, number: int, move: Move, call: StateCall) -> Part:
    # A digest of values that are reduced on the way could not be taken at their source.
    source = Source(move.shape, move.dtype, move.src, None, reduce_first=call.options["digest"])
    src = move.src
    if src.has_partial:
        check_reducible(src, move.dtype, OP)
        if not source.reduced_on_the_way:
            src = reduced_layout(src)
    wire = wire_dtype(source, move.result_dtype)
    ends = ends_of(move.dtype, wire, move.result_dtype, move.device_types)
    sends, receives = rank in src.ranks, rank in move.dst.ranks
    for side, device in zip((sends, receives), move.device_types, strict=True):
        if side and device == "cuda":
            require_gpu(OP, copies_only=move.device_types != ("cuda", "cuda"))
    reduction = None
    if src is not move.src and sends:
        x = call.tensors[move.source]
        mesh, placements = x.device_mesh, x.placements  # type: ignore[attr-defined]  # Partial: a DTensor
        reduction = reduction_inside(mesh, Layout(mesh, placements), move.shape, move.dtype)
    return Part(number, move, Problem(move.shape, wire, src, move.dst), ends, reduction, sends, receives)
