"""reshard and similar functions with digests: the tensors travel as a state dict of the ranks of both meshes,
whose call ends with a report to all of them of what each has seen."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from ..errors import Caller, LayoutError
from ..groups.parent import ParentGroup
from ..transfers.handle import Handle
from ..transfers.transfer import PlanOptions
from .compiled import ReshardGoal, compile_move, destination_of, source_of
from .meshes import slices_called
from .state_arguments import Given
from .state_run import ReshardedState, StateRun, conversation, started

__all__ = ["Digested"]

T = TypeVar("T")


class Digested:
    """One call, of the ranks of both meshes that are not lost, as it is without digests."""

    def __init__(
        self,
        parent: ParentGroup,
        op: str,
        xs: Sequence[Any],
        goals: Sequence[ReshardGoal],
        out: Any,
        lost: Sequence[int],
        options: PlanOptions,
    ) -> None:
        """Raises LayoutError where the ranks of the call are not known from its arguments. Other errors in
        them are reported to these ranks."""
        self._parent, self._op = parent, op
        self._names = ["x"] if op != "reshard_many" else [f"xs[{index}]" for index in range(len(xs))]
        self._without, self._inside = self._others(xs, goals, lost)
        self._given, self._wrong = Given(None, None), None
        self._shells: list[DTensor] = []
        try:
            self._given = self._checked(xs, goals, out, lost, options)
        except Exception as error:
            self._wrong = Caller(op, parent.rank).typed(error)

    def _others(
        self, xs: Sequence[Any], goals: Sequence[ReshardGoal], lost: Sequence[int]
    ) -> tuple[set[int], bool]:
        """Ranks of the group that the call has nothing to do with, and whether this rank is in it."""
        ranks: set[int] = set()
        for x, (mesh, *_) in zip(xs, goals, strict=True):
            at = x.device_mesh if isinstance(x, DTensor) else getattr(x, "mesh", None)
            if not (isinstance(at, DeviceMesh) and isinstance(mesh, DeviceMesh)):
                raise LayoutError(
                    "expected a DTensor or a meshcast.TensorSpec, and a DeviceMesh to move it to, found "
                    f"{type(x).__name__} and {type(mesh).__name__}"
                )
            for side in slices_called(at, mesh, lost):
                ranks.update(itertools.chain(*side))
        outside = ranks.difference(self._parent.ranks, lost)
        if outside:
            raise LayoutError(
                f"ranks {sorted(outside)} are not in the group; pass group= a group that holds all meshes"
            )
        ranks.difference_update(lost)
        return set(self._parent.ranks.difference(ranks)), self._parent.rank in ranks

    def _checked(
        self,
        xs: Sequence[Any],
        goals: Sequence[ReshardGoal],
        out: Any,
        lost: Sequence[int],
        options: PlanOptions,
    ) -> Given:
        where, dtypes = {}, {}
        if torch.is_grad_enabled() and any(x.requires_grad for x in xs):
            raise LayoutError("with digest=True no gradient is recorded; call it under torch.no_grad()")
        for name, x, goal in zip(self._names, xs, goals, strict=True):
            source = source_of(x, self._parent.rank, False)
            destination = destination_of(goal, source, lost)
            where[name] = (destination.mesh, tuple(destination.layout.placements))
            dtype = destination.dtype
            if dtype != source.dtype:
                if not (dtype.is_floating_point and source.dtype.is_floating_point):
                    raise LayoutError(
                        f"with digest=True only floating-point tensors are cast, found {source.dtype} to "
                        f"{dtype}"
                    )
                dtypes[name] = dtype
            move = compile_move(self._parent.rank, source, destination)  # also checks both
            if not self._inside:
                self._shells.append(move.allocate())
        here = isinstance(out, DTensor) and self._parent.rank in out.device_mesh.mesh
        return Given(
            dict(zip(self._names, xs, strict=True)),
            where,
            {"x": out} if here else None,
            dtype=dtypes or None,
            digest=True,
            strategy=options.strategy,
            topology=options.topology,
            lost=tuple((rank, rank) for rank in lost),
        )

    def run(self, limit: float) -> list[DTensor]:
        """limit: seconds. Blocks; the results in order."""
        if not self._inside:
            return self._shells_only()
        deadline = time.monotonic() + limit
        return self._results(conversation(self._parent, self._without).run(self._prepared(), deadline))

    def start(self, limit: float, answer: Callable[[list[DTensor]], T], copy: bool) -> Handle[T]:
        """The same in the background, in an order with other such calls. answer: from the results what the
        handle gives. copy: of the sources, at once."""
        if not self._inside:
            return Handle(None, answer(self._shells_only()), lambda: 0.0)
        run = self._prepared()
        begun = started(self._parent, run, limit, lost=self._without, copy=copy)
        if run.refused is not None:
            raise run.refused
        return _Answer(begun, lambda result: answer(self._results(result)))

    def _prepared(self) -> StateRun:
        return StateRun(self._parent.rank, self._given, op=self._op, wrong=self._wrong)

    def _shells_only(self) -> list[DTensor]:
        if self._wrong is not None:
            raise self._wrong
        return self._shells

    def _results(self, result: ReshardedState) -> list[DTensor]:
        return [result[name] for name in self._names]


class _Answer(Handle[T]):
    """A handle that gives something made of what another one gives."""

    def __init__(self, begun: Handle[ReshardedState], answer: Callable[[ReshardedState], T]) -> None:
        super().__init__(begun._call, begun._result, begun._bound)  # type: ignore[arg-type]
        self._answer = answer

    def _wait(self, until: Any) -> T:
        return self._answer(super()._wait(until))  # type: ignore[arg-type]
