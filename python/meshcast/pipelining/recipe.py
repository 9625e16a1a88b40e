"""The actions that a schedule's options make: built, checked against the ranks of the stages, lowered and
validated. A lowered schedule may run if the following holds:

1. Each stage is on one rank, and does each micro-batch once forward and once backward (B, or I before W),
   forward first.
2. A receive precedes its use, a send follows what makes its value, and each has its other end. Between two
   stages of one rank there is no transfer; the consumer comes after the producer.
3. Both ends of a link see its micro-batches in the same order: transfers of a link and direction match by
   order.
4. It does not deadlock, whether sends are buffered or wait for their receive. The runtime's sends never
   wait, so the second is stricter than it needs; a schedule that passes runs with bounded buffers.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NoReturn

from torch.distributed.pipelining.schedules import REDUCE_GRAD

from ..base.checks import typed_arguments
from ..errors import LayoutError
from .action import (
    AHEAD,
    Action,
    ActionKind,
    Actions,
    Cell,
    Costs,
    Link,
    ScheduleError,
    chain,
    crossing,
    format_grid,
    lower,
    stage_ranks,
)
from .compat import actions_of, fused_pairs
from .orders import forward_only, spec_of
from .simulate import (
    AutoWarmup,
    Budget,
    SendModel,
    SimulationReport,
    check_budget,
    scheduled,
    simulate_actions,
)

__all__ = ["GivenOrder", "Recipe", "validate"]


_SEND_MODELS: tuple[SendModel, ...] = ("buffered", "rendezvous")


@typed_arguments(ScheduleError)
def validate(
    actions: Mapping[int, Sequence[Action]],
    stages: int,
    microbatches: int,
    *,
    links: Sequence[Link] | None = None,
    forward_only: bool = False,
    send_models: Sequence[SendModel] = _SEND_MODELS,
) -> None:
    """Raises ScheduleError unless the lowered schedule can run. The message names rank, step, stage and
    micro-batch and shows the grid. `lower` has an example.

    Args:
        actions: actions of each rank, transfers included.
        stages, microbatches: what the schedule must cover.
        links: pairs of stages (from, to); default: each stage feeds the next.
        forward_only: no backward is expected.
        send_models: the models under which it must not deadlock.
    """
    check = _Check({rank: list(row) for rank, row in actions.items()})
    check.coverage(stages, microbatches, forward_only)
    check.transfers(chain(stages) if links is None else links, microbatches, forward_only)
    check.order()
    costs = Costs.of(stages, 1.0, 2.0, None, 1.0)
    for model in send_models:
        simulate_actions(check.actions, costs, model)


class _Check:
    def __init__(self, actions: Actions) -> None:
        self.actions = actions
        self.at: dict[Action, Cell] = {}
        stage_ranks(actions)
        for rank, row in actions.items():
            for step, action in enumerate(row):
                if action in self.at:
                    self.fail(f"{action} comes twice", (rank, step), self.at[action])
                self.at[action] = (rank, step)

    def fail(self, what: str, *cells: Cell) -> NoReturn:
        lines = []
        for rank, step in cells:
            action = self.actions[rank][step]
            lines.append(
                f"rank {rank}, step {step}, stage {action.stage}, micro-batch {action.microbatch}: {action}"
            )
        raise ScheduleError(
            "\n".join([f"invalid schedule: {what}", *lines, format_grid(self.actions, cells)])
        )

    def before(self, first: Action, second: Action, why: str) -> None:
        """`first` must be on the rank of `second` and come earlier."""
        cell = self.at[second]
        found = self.at.get(first)
        if found is None:
            self.fail(f"{second} needs {first} before it ({why}), which is missing", cell)
        if found[0] != cell[0] or found[1] > cell[1]:
            self.fail(f"{second} needs {first} before it on its rank ({why})", cell, found)

    def coverage(self, stages: int, microbatches: int, forward_only: bool) -> None:
        for action, cell in self.at.items():
            if not action.stage < stages or not action.microbatch < microbatches:
                self.fail(f"{action} is outside {stages} stages and {microbatches} micro-batches", cell)
            if forward_only and action.kind.is_backward:
                self.fail(f"{action} does not belong into a forward-only schedule", cell)
        for stage in range(stages):
            if not any(action.stage == stage for action in self.at):
                raise ScheduleError(
                    f"invalid schedule: stage {stage} is on no rank\n{format_grid(self.actions)}"
                )
            for microbatch in range(microbatches):
                self.compute(stage, microbatch, forward_only)

    def compute(self, stage: int, microbatch: int, forward_only: bool) -> None:
        forward, whole, inputs, weights = (
            Action(stage, kind, microbatch)
            for kind in (ActionKind.F, ActionKind.B, ActionKind.I, ActionKind.W)
        )
        if forward not in self.at:
            raise ScheduleError(
                f"invalid schedule: {forward} (stage {stage}, micro-batch {microbatch}) is "
                f"missing\n{format_grid(self.actions)}"
            )
        if forward_only:
            return
        if whole in self.at:
            self.before(forward, whole, "backward follows forward")
            for part in (inputs, weights):
                if part in self.at:
                    self.fail(
                        f"{whole} is the whole backward, {part} is a part of it",
                        self.at[whole],
                        self.at[part],
                    )
        elif inputs in self.at and weights in self.at:
            self.before(forward, inputs, "backward follows forward")
            self.before(inputs, weights, "weight gradients follow input gradients")
        else:
            found = inputs if inputs in self.at else weights if weights in self.at else forward
            self.fail(
                f"stage {stage}, micro-batch {microbatch} has no backward: {whole}, or {inputs} and "
                f"{weights}",
                self.at[found],
            )

    def transfers(self, links: Sequence[Link], microbatches: int, forward_only: bool) -> None:
        """A send follows what makes its value, a receive precedes what uses it. Inside a rank the consumer
        comes after the producer; backward the other way round."""
        expected: set[Action] = set()
        crossed = set(crossing(links, stage_ranks(self.actions)))
        for (source, target), microbatch in itertools.product(sorted(links), range(microbatches)):
            made, used = (Action(stage, ActionKind.F, microbatch) for stage in (source, target))
            back, last = (self.backward_of(stage, microbatch) for stage in (target, source))
            if (source, target) not in crossed:
                self.before(made, used, "a forward uses what its producer made")
                if not forward_only:
                    self.before(back, last, "a backward uses the gradient of its consumer")
                continue
            sends = [(Action(source, ActionKind.SEND_F, microbatch, target), made, used, "value", "forward")]
            if not forward_only:
                send = Action(target, ActionKind.SEND_B, microbatch, source)
                sends.append((send, back, last, "gradient", "backward"))
            for send, maker, user, value, use in sends:
                expected.add(send)
                self.both_ends(send)
                self.before(maker, send, f"a {value} is sent once it exists")
                self.before(send.matching(), user, f"a {use} uses what was received")
        for action, cell in self.at.items():
            send = action.matching() if action.kind.is_recv else action
            if not action.kind.is_compute and send not in expected:
                self.fail(f"{action} belongs to no link; links are {sorted(links)}", cell)

    def both_ends(self, send: Action) -> None:
        for end, other in ((send, send.matching()), (send.matching(), send)):
            if end in self.at:
                continue
            if other in self.at:
                self.fail(f"{other} has no other end, {end} is missing", self.at[other])
            raise ScheduleError(
                f"invalid schedule: {send} and {send.matching()} (stages {send.stage} and {send.peer}, "
                f"micro-batch {send.microbatch}) are missing\n{format_grid(self.actions)}"
            )

    def backward_of(self, stage: int, microbatch: int) -> Action:
        whole = Action(stage, ActionKind.B, microbatch)
        return whole if whole in self.at else Action(stage, ActionKind.I, microbatch)

    def order(self) -> None:
        """Per link and direction, the k-th send must be the k-th receive."""
        sends: dict[tuple[int, int, ActionKind], list[Action]] = defaultdict(list)
        receives: dict[tuple[int, int, ActionKind], list[Action]] = defaultdict(list)
        for row in self.actions.values():
            for action in row:
                if action.kind.is_send:
                    sends[action.stage, action.peer, action.kind].append(action)
                elif action.kind.is_recv:
                    receives[action.peer, action.stage, action.matching().kind].append(action)
        for pair, sent in sends.items():
            for send, receive in zip(sent, receives[pair], strict=True):
                if send.microbatch != receive.microbatch:
                    self.fail(
                        f"stage {pair[0]} sends {send} where stage {pair[1]} receives {receive}",
                        self.at[send],
                        self.at[receive],
                    )


# Times of one micro-batch, in any unit, that warmup="auto" and draw() assume by default.
_NOMINAL_TIMES: Mapping[str, Any] = {"forward": 1.0, "backward": 2.0, "weight": 1.0, "transfer": 0.5}


@dataclass(frozen=True, slots=True)
class Recipe:
    """One schedule's options, the same on every rank, so that all make the same actions of them.

    links: pairs of stages; None: each stage feeds the next. warmup, budget, times, delayed: as
    `PipelineSchedule` explains them. given: the actions of each row, instead of those of a schedule known by
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

    def check_placement(self, rows: Sequence[Sequence[int]]) -> None:
        """Raises LayoutError, the same on every rank, if the stages are not where the schedule runs them.
        rows: the stages of each set of ranks."""
        wanted: list[list[int]] = [[] for _ in rows]
        for stage, row in sorted(stage_ranks(self._built(len(rows))).items()):
            wanted[row].append(stage)
        if sorted(wanted) != sorted(map(list, rows)):
            raise LayoutError(
                f"{self.name} runs stages {wanted} together on {len(wanted)} sets of ranks, "
                f"found stages {rows}"
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
        """Actions of a training step, by row of the schedule; compute alone, unless `lowered_already`."""
        if self.given is not None:
            return self.given
        built = scheduled(
            self.name,
            self.stages,
            self.microbatches,
            self._costs(),
            self.links,
            ranks=rows if spec_of(self.name).open_ranks else None,
            warmup=self.warmup,
            budget=self.budget,
            delay_weight_grad=self.delayed,
        )
        check_budget(self.budget, built)
        return built

    def _costs(self, **times: Any) -> Costs:
        return Costs.of(self.stages, **{**_NOMINAL_TIMES, **self.times, **times})


class GivenOrder:
    """Actions that were given as torch's, instead of those that are built for a schedule's name.

    order: those of each of torch's ranks. lowered: with their transfers.
    """

    def __init__(self, order: dict[int, list[Any]], lowered: bool) -> None:
        self.order, self.lowered = order, lowered
        self.pairs = fused_pairs(order)
        actions = actions_of(order)
        text = str(sorted((rank, list(map(str, row))) for rank, row in actions.items()))
        self.digest = hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
        self._rows = [row for row in actions.values() if row]

    @staticmethod
    def of(schedule: Any) -> GivenOrder | None:
        """The order that ``_load_csv`` or ``_prepare_schedule_with_comms`` got last, else ``pipeline_order``,
        else ``pipeline_order_with_comms``. None where the schedule runs what is built by its name."""
        prepared, order = schedule._given_order, schedule.pipeline_order
        if prepared is None and schedule.name is not None and order is schedule._built_order:
            return None
        given = prepared or (order, False)
        if not given[0]:
            given = getattr(schedule, "pipeline_order_with_comms", None), True
        if not given[0]:
            raise LayoutError(
                f"{type(schedule).__name__} has no actions: give it a pipeline_order, or load a file"
            )
        return GivenOrder(*given)

    def rows(self, row_of: Callable[[int], int]) -> Actions:
        """By row of the schedule. row_of: a stage."""
        return dict(sorted((row_of(row[0].stage), row) for row in self._rows))

    def row_of(self, stages: set[int]) -> list[Any]:
        """torch's actions of the rank that has these stages."""
        return next(row for row in self.order.values() if any(a and a.stage_index in stages for a in row))

    def reduced(self, stages: Iterable[int]) -> list[int]:
        """The stages whose gradients are scaled: an order that holds its transfers says which."""
        with_lowered = {
            each.stage_index
            for row in self.order.values()
            for each in row
            if each is not None and each.computation_type == REDUCE_GRAD
        }
        return [stage for stage in stages if not self.lowered or stage in with_lowered]

    def side_by_side(self, row: list[Action]) -> list[Action]:
        """A lowered row with the parts of each fused action next to each other: receives between them come
        before, sends behind."""
        for _, parts in self.pairs.values():
            if parts[0] not in row:
                continue
            first, last = row.index(parts[0]), row.index(parts[-1])
            between = [each for each in row[first : last + 1] if each not in parts]
            receives = [each for each in between if each.kind.is_recv]
            sends = [each for each in between if not each.kind.is_recv]
            row = [*row[:first], *receives, *parts, *sends, *row[last + 1 :]]
        return row
