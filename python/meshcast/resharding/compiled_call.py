"""The compiled form of a call, made once per kind of call: its moves (one per tensor) and the transfer of
them all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from ..errors import LayoutError
from ..transfers.casts import Casts
from ..transfers.make import kept_transfer, new_transfer
from ..transfers.persistent import PersistentTransfer, PlanOptions, ranks_of
from .lost import living
from .memory import overlaps
from .mesh_family import slices_called
from .tensor_move import Destination, Source, TensorMove, compile_move

if TYPE_CHECKING:
    from ..groups.parent import ParentGroup
    from ..planning.plan import Problem
    from ..transfers.persistent import Call

__all__ = ["Compiled", "compile_call"]


class Compiled:
    """One kind of call. transfer is None on a rank of no mesh, which only gets shells."""

    def __init__(
        self, moves: Sequence[TensorMove], transfer: PersistentTransfer | None, problems: Sequence[Problem]
    ) -> None:
        self.moves = tuple(moves)
        self.transfer = transfer
        self.problems = list(problems)
        # Positions of the moves that the backward transfer carries.
        self.differentiable = tuple(i for i, move in enumerate(moves) if move.gradient is not None)

    def bound(self) -> float:
        """Seconds that no plan of this call can beat."""
        return self.transfer.plan.lower_bound if self.transfer is not None else 0.0

    def begin(
        self,
        xs: Sequence[DTensor | None],
        timeout: float,
        outs: Sequence[DTensor | None] | None = None,
        observe: Callable[[int, torch.Tensor], None] | None = None,
        *,
        driven: bool = False,
    ) -> tuple[list[DTensor], Call | None]:
        """Starts the transfer of xs, one per move (None on ranks outside the source). The results' local
        tensors are filled once the call has been waited for: new ones, or those of `outs`.
        observe(i, shard) sees what travels from here, in the type it travels in, before it does. driven: the
        caller waits at once."""
        results, sources, targets = [], [], []
        cast: list[tuple[torch.Tensor, torch.Tensor]] = []
        written: list[torch.Tensor] = []
        for index, (move, x) in enumerate(zip(self.moves, xs, strict=True)):
            out = None if outs is None else outs[index]
            result = move.allocate() if out is None else out
            results.append(result)
            source = move.outgoing(x._local_tensor) if move.is_holder and x is not None else None
            if observe is not None and source is not None:
                observe(index, source.to(move.wire_dtype))
            target = None
            if move.local_shape is not None:
                local = result._local_tensor
                target = local
                if move.ends.destination != move.dtype:
                    kind = move.ends.destination
                    target = torch.empty(move.local_shape, dtype=kind, device=move.device)
                    cast.append((local, target))
                if out is not None:
                    written += (out, local)
                    if source is not None and overlaps(source, target):
                        # Neighbours would read what already came in from others.
                        source = source.clone()
            sources.append(source)
            targets.append(target)
        if self.transfer is None:
            return results, None
        call = self.transfer.launch(sources, targets, timeout, driven=driven)
        for local, target in cast:
            call.copy_at_end(local, target)
        for tensor in written:
            call.wrote(tensor)
        return results, call


def _moves(
    parent: ParentGroup, sources: Sequence[Source], destinations: Sequence[Destination], op: str
) -> tuple[list[TensorMove], list[Problem], list[Problem] | None]:
    """Moves, their problems, and those of the backward transfer (None without any gradient). Raises
    LayoutError for what is wrong with the arguments."""
    moves, problems = [], []
    backward: list[Problem] = []
    for source, destination in zip(sources, destinations, strict=True):
        move, problem, reverse = compile_move(parent.rank, source, destination, op)
        moves.append(move)
        problems.append(problem)
        if reverse is not None:
            backward.append(reverse)
    if len({move.device_types for move in moves}) > 1:
        raise LayoutError(f"{op}: some tensors are on cpu and some on cuda; move them in separate calls")
    return moves, problems, backward or None


def compile_call(
    parent: ParentGroup,
    sources: Sequence[Source],
    destinations: Sequence[Destination],
    op: str,
    options: PlanOptions,
    *,
    kept: bool = True,
    lost: Sequence[int] = (),
) -> Compiled:
    """Checks the arguments and compiles. kept: other calls of this kind share the transfer and what was
    agreed on. lost: ranks of source meshes that hold nothing any more. Raises LayoutError before any byte
    moves."""
    sources, destinations = _with_slices(sources, destinations, lost)
    if lost:
        sources = living(sources, destinations, lost, parent.rank, op)
    moves, problems, backward = _moves(parent, sources, destinations, op)
    transfer = None
    if any(move.takes_part for move in moves):
        make = kept_transfer if kept else new_transfer
        transfer = make(
            parent,
            problems,
            op,
            options,
            backward=backward,
            device_types=moves[0].device_types,
            casts=_casts(moves),
        )
    else:
        parent.private(ranks_of(problems), op)  # the ranks must exist here as well
    return Compiled(moves, transfer, problems)


def _with_slices(
    sources: Sequence[Source], destinations: Sequence[Destination], lost: Sequence[int]
) -> tuple[list[Source], list[Destination]]:
    """With the slices of their meshes that each call has."""
    out: tuple[list[Source], list[Destination]] = ([], [])
    for source, destination in zip(sources, destinations, strict=True):
        if source.mesh is not None:
            first, second = slices_called(source.mesh, destination.mesh, lost)
            source = replace(source, slices=first)
            destination = replace(destination, slices=second)
        out[0].append(source)
        out[1].append(destination)
    return out


def _casts(moves: Sequence[TensorMove]) -> Casts | None:
    """Returns what the transfer of these moves and its backward cast themselves; None if nothing."""
    forth = tuple(move.ends for move in moves)
    back = tuple(move.gradient.ends for move in moves if move.gradient is not None)
    casts = any(ends.source != ends.destination for ends in (*forth, *back))
    return Casts(forth, back) if casts else None
