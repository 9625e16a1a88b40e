"""What a call compiles to, once per kind of call: its members (one per tensor) and the transfer of them
all."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch.distributed.tensor import DTensor

from ..errors import LayoutError
from ..transfers.casts import Casts
from ..transfers.make import agreed_transfer
from ..transfers.persistent import CallNumber, Problem, Transfer, ranks_of
from .memory import note_written, overlaps
from .tensor_move import Destination, Member, Source, compile_member

if TYPE_CHECKING:
    from ..groups.parent import ParentGroup
    from ..topology import Topology
    from ..transfers.handle import Launch

__all__ = ["Compiled", "casts_of", "compile_call", "compile_members"]


class Compiled:
    """One kind of call. transfer is None on a rank of no mesh, which only gets shells."""

    def __init__(
        self, members: Sequence[Member], transfer: Transfer | None, problems: Sequence[Problem]
    ) -> None:
        self.members = tuple(members)
        self.transfer = transfer
        self.problems = list(problems)
        # Positions of the members that the backward transfer carries.
        self.differentiable = tuple(i for i, member in enumerate(members) if member.gradient is not None)

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
    ) -> tuple[list[DTensor], Launch | None, CallNumber | None]:
        """Starts the transfer of xs, one per member (None on ranks outside the source). The results' local
        tensors are filled once the launch has been waited for: new ones, or those of `outs`.
        observe(i, shard) sees what travels from here, in the type it travels in, before it does. driven: the
        caller waits at once."""
        results, sources, targets = [], [], []
        last_steps: list[Callable[[], None]] = []
        for index, (member, x) in enumerate(zip(self.members, xs, strict=True)):
            out = None if outs is None else outs[index]
            result = member.allocate() if out is None else out
            results.append(result)
            source = member.outgoing(x._local_tensor) if member.is_holder and x is not None else None
            if observe is not None and source is not None:
                observe(index, source.to(member.wire_dtype))
            target = None
            if member.local_shape is not None:
                local = result._local_tensor
                target = local
                if member.ends.destination != member.dtype:
                    kind = member.ends.destination
                    target = torch.empty(member.local_shape, dtype=kind, device=member.device)
                    last_steps.append(_copying(local, target))
                if out is not None:
                    last_steps.append(_noting_change(out))
                    if source is not None and overlaps(source, target):
                        # Neighbours would read what already came in from others.
                        source = source.clone()
            sources.append(source)
            targets.append(target)
        if self.transfer is None:
            return results, None, None
        launch, number = self.transfer.launch(sources, targets, timeout, driven=driven)
        if last_steps:
            launch.on_success(lambda: _run_all(last_steps))
        return results, launch, number


def compile_members(
    parent: ParentGroup, sources: Sequence[Source], destinations: Sequence[Destination], op: str
) -> tuple[list[Member], list[Problem], list[Problem] | None]:
    """Members, their problems, and those of the backward transfer (None without any gradient). Raises
    LayoutError for what is wrong with the arguments."""
    members, problems = [], []
    backward: list[Problem] = []
    for source, destination in zip(sources, destinations, strict=True):
        member, problem, reverse = compile_member(parent.rank, source, destination, op)
        members.append(member)
        problems.append(problem)
        if reverse is not None:
            backward.append(reverse)
    if len({member.sides for member in members}) > 1:
        raise LayoutError(f"{op}: some tensors are on cpu and some on cuda; move them in separate calls")
    return members, problems, backward or None


def compile_call(
    parent: ParentGroup,
    sources: Sequence[Source],
    destinations: Sequence[Destination],
    *,
    op: str,
    strategy: str,
    topology: Topology | None,
) -> Compiled:
    """Checks the arguments and compiles. Raises LayoutError before any byte moves."""
    members, problems, backward = compile_members(parent, sources, destinations, op)
    transfer = None
    if any(member.takes_part for member in members):
        transfer = agreed_transfer(
            parent,
            problems,
            backward,
            op=op,
            strategy=strategy,
            topology=topology,
            sides=members[0].sides,
            casts=casts_of(members),
        )
    else:
        parent.private(ranks_of(problems), op)  # the ranks must exist here as well
    return Compiled(members, transfer, problems)


def casts_of(members: Sequence[Member]) -> Casts | None:
    """What the transfer of these members casts itself, and its backward; None where that is nothing."""
    forth = tuple(member.ends for member in members)
    back = tuple(member.gradient.ends for member in members if member.gradient is not None)
    casts = any(ends.source != ends.destination for ends in (*forth, *back))
    return Casts(forth, back) if casts else None


def _copying(to: torch.Tensor, from_: torch.Tensor) -> Callable[[], None]:
    def step() -> None:
        with torch.no_grad():
            to.copy_(from_)
        if from_.is_cuda:  # made under the stream of the call, read under that of the wait
            from_.record_stream(torch.cuda.current_stream(from_.device))

    return step


def _noting_change(out: DTensor) -> Callable[[], None]:
    return lambda: note_written(out, out._local_tensor)


def _run_all(steps: Sequence[Callable[[], None]]) -> None:
    for step in steps:
        step()
