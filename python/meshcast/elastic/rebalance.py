"""rebalance: layers of a running pipeline go to other stages where that makes its steps shorter."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..base import checks
from ..errors import Caller, LayoutError
from ..pipelining.checkpoint import WholeState
from ..pipelining.schedule import PipelineSchedule
from ..topology import Topology
from ..tuning.recut import RebalanceRequest, Recut, agreed_cut, all_well
from ..tuning.search import Layer
from .remesh import remesh

__all__ = ["Rebalanced", "rebalance"]

OP = "rebalance"
_MODEL, _OPTIMIZER = "model.", "optimizer."

Cut = tuple[int, ...]
Built = tuple[PipelineSchedule, torch.optim.Optimizer | None]


@dataclass(frozen=True)
class Rebalanced:
    """The result of `rebalance`: what training continues with.

    Attributes:
        schedule, optimizer: as `build` made them, with the state of before.
        cut: how many layers each stage has.
        before, after: seconds of a step under the cut of before and under this one, as simulated.
        moving: seconds that the move was expected to take, `overhead` included.
        seconds: that it took on this rank, from the decision on.
    """

    schedule: PipelineSchedule
    optimizer: torch.optim.Optimizer | None
    cut: Cut
    before: float
    after: float
    moving: float
    seconds: float


def rebalance(
    schedule: PipelineSchedule,
    optimizer: torch.optim.Optimizer | None,
    build: Callable[[Cut], Built],
    cut: Sequence[int],
    *,
    names: Callable[[Cut, int, str], str] | None = None,
    layers: Sequence[Layer] | None = None,
    times: Mapping[str, Any] | None = None,
    threshold: float = 0.1,
    horizon: int = 1000,
    overhead: float = 1.0,
    topology: Topology | None = None,
    timeout: float | timedelta | None = None,
) -> Rebalanced | None:
    """Gives slow ranks fewer layers: where another cut makes the steps of a pipeline shorter, all ranks go
    over to it. A collective of all ranks of the pipeline, between two steps.

    Stages keep their meshes. The time that they take for their layers shows the speed of their ranks,
    and the cut with the shortest simulated step under this schedule is looked for. The first rank decides.

    Args:
        schedule: that runs. `measure` must have been called on it, unless `times` are given.
        optimizer: of the parameters of this rank's stages; None: there is none.
        build: ``build(cut)`` makes this rank's stages under another cut, on the same meshes, with modules of
            their own, and returns the schedule and the optimizer. Initial values do not matter. It is called
            on all ranks or on none.
        cut: how many layers each stage has now, such as ``[4, 2, 2]``.
        names: ``names(cut, stage, name)`` is the whole model's name of what the module of a stage calls
            `name` under a cut. None: as for `meshcast.pipelining.save`.
        layers: what the layers cost relative to each other, as `meshcast.pipelining.partition` takes them;
            None: all the same. The first one includes what the first stage has besides, such as an embedding,
            and the last one what the last has. Of these, times and bytes of parameters count.
        times: seconds of a micro-batch, instead of what was measured: forward and backward of each stage,
            and weight and transfer where known, as `meshcast.pipelining.simulate` takes them.
        threshold: part of the present step that another cut must save.
        horizon: steps over which the seconds of the move are shared out, as a part of the new step.
        overhead: seconds that any move takes in addition to sending state: stages, connections and plans are
            made again.
        topology: for the times of transfers; default: that of the stages.
        timeout: of the move, seconds or timedelta; default: the group's.

    All arguments from `cut` to `topology` are the same on every rank.

    Returns:
        What training continues with, on every rank; None on every rank where no cut saves as much, or nothing
        was measured of this schedule yet. Parameters, buffers, the optimizer's state and hyperparameters, and
        the number of steps are those of before. Plain buffers are those of the lowest rank of their stage.
        Gradients are not moved. The old schedule is closed, and its modules are as they were.

    Raises:
        LayoutError: bad arguments, ranks that contradict each other, no step yet, a `build` that fails or
            makes other stages. On all ranks, before anything moves: training may continue as it was.
        MeshcastError: what should be copies differs among ranks, or the move failed. On all ranks; the old
            schedule and optimizer are as they were.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        # Rank 1 takes twice as long for a layer as the others.
        from collections import OrderedDict

        from meshcast import elastic, pipelining

        rank = dist.get_rank()

        def build(cut):
            first = sum(cut[:rank])
            layers = {f"layer{i}": torch.nn.Linear(8, 8) for i in range(first, first + cut[rank])}
            module = torch.nn.Sequential(OrderedDict(layers))
            stage = pipelining.PipelineStage(module, rank, 4, torch.device("cpu"))
            schedule = pipelining.Schedule1F1B(stage, 8, loss_fn=torch.nn.functional.mse_loss)
            return schedule, torch.optim.AdamW(module.parameters())

        cut = (2, 2, 2, 2)
        schedule, optimizer = build(cut)
        schedule.step(torch.randn(32, 8), target=torch.randn(32, 8))
        optimizer.step()
        times = {"forward": [0.02, 0.04, 0.02, 0.02], "backward": [0.04, 0.08, 0.04, 0.04]}
        moved = elastic.rebalance(schedule, optimizer, build, cut, times=times)
        assert moved is not None and moved.cut[1] == 1
        schedule, optimizer, cut = moved.schedule, moved.optimizer, moved.cut
    """
    with Caller(OP, dist.get_rank() if dist.is_initialized() else None):
        if not isinstance(schedule, PipelineSchedule) or not getattr(schedule, "_runs", False):
            raise LayoutError(
                f"schedule must be one of meshcast.pipelining with stages that run, found "
                f"{checks.shown(schedule)}"
            )
        named = names is not None
        request = RebalanceRequest(
            optimizer, cut, layers, times, threshold, horizon, overhead, topology, build, named
        )
        recut = agreed_cut(schedule, request)
        if recut is None:
            return None
        begin = time.monotonic()
        move = _Move(schedule, optimizer, tuple(cut), recut, names)
        failed: Exception | None = None
        try:
            move.build(build)
        except Exception as error:
            failed = error
        try:
            all_well(schedule, failed)
            try:
                move.run(topology, timeout)
            except Exception as error:
                failed = error
            all_well(schedule, failed)
        except BaseException:
            move.undo()
            raise
        made, new_optimizer = move.finished()
        seconds = time.monotonic() - begin
        return Rebalanced(made, new_optimizer, recut.cut, recut.before, recut.after, recut.moving, seconds)


class _Move:
    """A move from one cut to another. The old stages stay as they were until `finished`."""

    def __init__(
        self, schedule: PipelineSchedule, optimizer: Any, cut: Cut, recut: Recut, names: Any
    ) -> None:
        self._schedule, self._optimizer = schedule, optimizer
        self._cut, self._recut, self._names = cut, recut, names
        # An optimizer that has made no step has no state; to read it makes some.
        self._fresh = optimizer is not None and not any(optimizer.state.values())
        self._built: Any = None

    def build(self, build: Callable[[Cut], Built]) -> None:
        """All of this rank's part that can fail."""
        cuda = [self._schedule._device] if self._schedule._device.type == "cuda" else []
        with torch.random.fork_rng(devices=cuda):
            self._built = build(self._recut.cut)
        self._check()
        schedule, optimizer = self._built
        self._old = self._view(self._schedule, self._optimizer, self._cut)
        self._new = self._view(schedule, optimizer, self._recut.cut)
        self._held, self._wanted = _flat(self._old.state()), _flat(self._new.state())

    def _view(self, schedule: PipelineSchedule, optimizer: Any, cut: Cut) -> WholeState:
        return WholeState.of(schedule, optimizer, None if self._names is None else partial(self._names, cut))

    def _check(self) -> None:
        """Raises LayoutError for what cannot take the place of what is there."""
        built = self._built
        if not (isinstance(built, tuple | list) and len(built) == 2):
            raise LayoutError(f"build must return (schedule, optimizer), found {checks.shown(built)}")
        schedule, optimizer = built
        if not isinstance(schedule, PipelineSchedule) or not getattr(schedule, "_runs", False):
            raise LayoutError(f"build must return a schedule, found {checks.shown(schedule)}")
        if type(optimizer) is not type(self._optimizer):
            raise LayoutError(
                f"build returned the optimizer {checks.shown(optimizer)}, expected one like "
                f"{checks.shown(self._optimizer)}"
            )
        mine, theirs = (
            {index: (each.num_stages, each.mesh.ranks, each.group) for index, each in one._mine.items()}
            for one in (self._schedule, schedule)
        )
        if mine != theirs or schedule is self._schedule:
            found = f"stages {sorted(theirs)}" if mine != theirs else "the schedule that runs"
            raise LayoutError(
                f"build must make a new schedule of stages {sorted(mine)} on their meshes; found {found}"
            )
        both = {id(each) for each in _tensors(self._schedule)} & {id(each) for each in _tensors(schedule)}
        if both:
            raise LayoutError(
                f"build put {len(both)} parameters or buffers of the old modules into the new ones; "
                "make new modules, whose values do not matter"
            )

    def run(self, topology: Topology | None, timeout: float | timedelta | None) -> None:
        """Fills what was built. A collective."""
        own = [_MODEL + name for view in (self._old, self._new) for name in view.buffers()]
        stage = next(iter(self._schedule._mine.values()))
        found = remesh(
            self._held,
            None,
            self._wanted,
            own=own,
            group=stage.group,
            topology=topology or stage.topology,
            timeout=timeout,
        )
        taken = {name: found.get(name, value) for name, value in self._wanted.items()}
        self._new.take(_nested(taken))
        if self._fresh:
            for optimizer in (self._optimizer, self._built[1]):
                optimizer.state.clear()

    def undo(self) -> None:
        """Discards what was built."""
        if isinstance(self._built, tuple | list) and self._built:
            made = self._built[0]
            if isinstance(made, PipelineSchedule) and made is not self._schedule:
                made.close()
        if self._fresh:
            self._optimizer.state.clear()

    def finished(self) -> Built:
        schedule, optimizer = self._built
        schedule._steps = self._schedule._steps
        if self._schedule._recent is not None:
            schedule.measure(self._schedule._recent.last)
        self._schedule.close()
        return schedule, optimizer


def _tensors(schedule: PipelineSchedule) -> list[torch.Tensor]:
    return [
        each
        for stage in schedule._mine.values()
        for each in (*stage.submod.parameters(), *stage.submod.buffers())
    ]


def _flat(state: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of `remesh`. A hyperparameter that is a tensor is that of many parameters: each gets a copy."""
    found = {_MODEL + name: value for name, value in state["model"].items()}
    for key, value in state.get("optimizer", {}).items():
        several = key.startswith("param_groups.") and isinstance(value, torch.Tensor)
        found[_OPTIMIZER + key] = value.clone() if several else value
    return found


def _nested(entries: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    found: dict[str, dict[str, Any]] = {"model": {}, "optimizer": {}}
    for name, value in entries.items():
        part, _, rest = name.partition(".")
        found[part][rest] = value
    return found
