"""Views of the last steps of a schedule, and of a simulated step."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from meshcast.errors import LayoutError, MeshcastError
from meshcast.pipelining.board import PipelineBoard
from meshcast.pipelining.draw import draw_panels, panel_of
from meshcast.pipelining.estimate import transfer_times
from meshcast.pipelining.lower import Link
from meshcast.pipelining.measured import Event, exposed_seconds
from meshcast.pipelining.pipeline_stage import PipelineStage
from meshcast.pipelining.recipe import Recipe
from meshcast.pipelining.runtime import Runtime
from meshcast.pipelining.stage_times import RecentTimes, StageTimes
from meshcast.pipelining.table import StageTable
from meshcast.pipelining.varying import Wirings
from meshcast.topology import Topology

__all__ = ["ScheduleViews"]


class ScheduleViews:
    """Base of `PipelineSchedule`."""

    _runtime: Runtime | None
    _rank: int
    _board: PipelineBoard
    _summaries: int
    _recipe: Recipe
    _wirings: Wirings
    _mine: Mapping[int, PipelineStage]
    _n_microbatches: int
    _agreed: Callable[[], StageTable]
    _recent: RecentTimes | None = None  # where measure() was called
    _recuts = 0  # agreements about other cuts

    @property
    def bytes_sent(self) -> int:
        """Bytes this rank has sent to other ranks over the edges of the pipeline, both directions, in all
        steps so far."""
        return 0 if self._runtime is None else self._runtime.bytes_sent

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes this rank's part of the last step as a Chrome trace."""
        if self._runtime is None:
            raise MeshcastError("there is no step to trace yet", op="pipeline")
        self._runtime.trace.write(path, self._rank)

    def summary(self, *, together: bool = False) -> str:
        """One line about this rank's last step: its time, the parts that went into computing and into waiting
        for values, the bubble (all that is not computing), micro-batches held, memory and bytes sent.

        Args:
            together: every rank of the pipeline calls it; the line then also says how long this rank waited
                for values that were on their way, by the clocks of the hosts: communication that was not
                hidden.
        """
        if self._runtime is None:
            raise MeshcastError("there is no step to sum up yet", op="pipeline")
        trace = self._runtime.trace
        if not together:
            return trace.summary(self._rank)
        mine = trace.on_the_clock(self._rank)
        sends = [[each.name, each.begin, each.end] for each in mine if "SEND" in each.name]
        topic = f"sends/{self._summaries}"
        self._board.publish(topic, {"sends": sends})
        found = self._board.collect(topic)
        if self._summaries:  # all have read that one, or they would not be here
            self._board.forget(f"sends/{self._summaries - 1}")
        self._summaries += 1
        others = [
            Event(rank, *send) for rank, said in found.items() if rank != self._rank for send in said["sends"]
        ]
        return trace.summary(self._rank, exposed_seconds([*mine, *others]).get(self._rank, 0.0))

    def measure(self, last: int = 10) -> None:
        """From now on keeps how long this rank's stages compute in the last so many training steps, for
        `stage_times` and `meshcast.elastic.rebalance`. 0: not any more, as at first.

        The first step of a schedule is left out, as it gets memory and connections. A step that is measured
        costs a look through its trace, and on a GPU a wait for its end.

        Raises LayoutError for what is no number of steps.
        """
        recent = RecentTimes(last, skip=self._runtime is None)
        self._recent = recent if recent.last else None

    def stage_times(self) -> dict[int, StageTimes]:
        """{stage: seconds of a micro-batch} of this rank's stages, medians of the steps that `measure` keeps;
        empty before the first of them.

        Raises LayoutError where `measure` was not called.

        Example, on every rank::

            from meshcast.pipelining import PipelineStage, ScheduleGPipe

            rank, ranks = dist.get_rank(), dist.get_world_size()
            stage = PipelineStage(torch.nn.Linear(8, 8), rank, ranks, torch.device("cpu"))
            schedule = ScheduleGPipe(stage, 4, loss_fn=torch.nn.functional.mse_loss)
            schedule.measure(last=5)
            for _ in range(3):  # the first one is left out
                schedule.step(torch.randn(32, 8), target=torch.randn(32, 8))
            assert schedule.stage_times()[rank].backward > 0
        """
        if self._recent is None:
            raise LayoutError(
                "no steps were measured: call measure() on the schedule, on every rank, before the steps",
                op="pipeline",
            )
        return self._recent.times()

    def draw(self, path: str | os.PathLike[str], **times: Any) -> None:
        """Writes the simulated timeline of a step; the suffix of `path` tells the format.

        Args:
            times: forward, backward, weight and transfer as `simulate` takes them; default: those that the
                schedule was made with.
        """
        table = self._agreed()
        report = self._recipe.simulated(len(table.rows), train=table.trains, **times)
        name = type(self).__name__.removeprefix("Schedule")
        title = f"{name}, {self._recipe.stages} stages, {self._n_microbatches} micro-batches, simulated"
        draw_panels([panel_of(title, report)], Path(path))

    def transfer_times(self, topology: Topology | None = None) -> dict[Link, float]:
        """Seconds that a micro-batch of the last step takes over each link by the planner's cost model: what
        ``draw`` and ``times`` take as ``transfer``, beside seconds of compute. topology: as `plan` takes
        it; default: that of the stages."""
        wiring = self._wirings.last
        if wiring is None:
            raise MeshcastError("there is no step yet, so no shapes of values", op="pipeline")
        stage = next(iter(self._mine.values()))
        return transfer_times(wiring, self._agreed(), topology or stage.topology, stage.strategy)
