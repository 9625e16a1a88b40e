"""The actions that a schedule's options make: built, checked against the ranks of the stages, lowered and
validated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshcast.errors import LayoutError
from meshcast.pipelining.action import Actions
from meshcast.pipelining.auto_warmup import AutoWarmup, Budget, check_budget, resolve_warmup
from meshcast.pipelining.costs import Costs
from meshcast.pipelining.lower import AHEAD, Link, lower, stage_ranks
from meshcast.pipelining.orders import build, forward_only, spec_of
from meshcast.pipelining.simulate import SimulationReport, simulate_actions
from meshcast.pipelining.validate import validate

__all__ = ["Recipe"]

# Of one micro-batch, in any unit: what warmup="auto" and draw() assume unless they are told otherwise.
_NOMINAL_TIMES: Mapping[str, Any] = {"forward": 1.0, "backward": 2.0, "weight": 1.0, "transfer": 0.5}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One schedule's options, the same on every rank, so that all make the same actions of them.

    links: pairs of stages; None: each stage feeds the next. warmup, budget, times, delayed: as
    `PipelineSchedule` explains them. given: the actions of each row, in place of those of a schedule known by
    name; lowered_already: with their transfers.
    """

    name: str
    stages: int
    microbatches: int
    links: Sequence[Link] | None
    warmup: AutoWarmup | None
    budget: Budget
    times: Mapping[str, Any]
    delayed: bool
    given: Actions | None = None
    lowered_already: bool = False

    def check_options(self) -> None:
        """Raises ScheduleError, before anything is agreed on, for options that no placement makes good."""
        if spec_of(self.name).open_ranks:
            # It depends on the number of ranks, known only after the agreement: any will do for the warm-up.
            replace(self, budget=None)._built(self.stages)
        elif self.warmup is not None or self.budget is not None:
            self._built(None)

    def check_placement(self, rows: Sequence[Sequence[int]], rank: int) -> None:
        """Raises LayoutError, the same on every rank, if the stages are not where the schedule runs them.
        rows: the stages of each set of ranks."""
        wanted: list[list[int]] = [[] for _ in rows]
        for stage, row in sorted(stage_ranks(self._built(len(rows))).items()):
            wanted[row].append(stage)
        if sorted(wanted) != sorted(map(list, rows)):
            raise LayoutError(
                f"{self.name} runs stages {wanted} together on {len(wanted)} sets of ranks, "
                f"found stages {rows}",
                rank=rank,
                op="pipeline",
            )

    def lowered(self, rows: int, *, train: bool) -> Actions:
        """Lowered and validated actions, by row of the schedule. rows: how many sets of ranks there are."""
        built = self._built(rows)
        if self.lowered_already and train:
            lowered = built
        else:
            built = {rank: [each for each in row if each.kind.is_compute] for rank, row in built.items()}
            lowered = lower(built if train else forward_only(built), self.links, AHEAD)
        validate(lowered, self.stages, self.microbatches, links=self.links, forward_only=not train)
        return lowered

    def simulated(self, rows: int, *, train: bool, **times: Any) -> SimulationReport:
        """A step. times: those that differ from the schedule's own."""
        return simulate_actions(self.lowered(rows, train=train), self._costs(**times))

    def _built(self, rows: int | None) -> Actions:
        """Actions of a training step, by row of the schedule; compute only but for `lowered_already`."""
        if self.given is not None:
            return self.given
        costs = self._costs()
        warmup = resolve_warmup(
            self.warmup,
            self.name,
            self.stages,
            self.microbatches,
            self.budget,
            costs,
            self.links,
            self.delayed,
        )
        built = build(
            self.name,
            self.stages,
            self.microbatches,
            ranks=rows if spec_of(self.name).open_ranks else None,
            warmup=warmup,
            delay_weight_grad=self.delayed,
        )
        if self.budget is not None:
            report = simulate_actions(lower(built, self.links), costs)
            check_budget(self.budget, report.peak_activations)
        return built

    def _costs(self, **times: Any) -> Costs:
        return Costs.of(self.stages, **{**_NOMINAL_TIMES, **self.times, **times})
