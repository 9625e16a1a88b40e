"""The choice of a schedule, its options and a number of micro-batches: the real stages are measured, then
schedules are simulated. ScheduleAuto chooses at its first step.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.pipelining import schedules as torch_schedules

from ..base.checks import shown, table, typed_arguments
from ..base.wire import pack, unpack
from ..errors import AbortedError, Caller, LayoutError, MeshcastError
from ..groups.parent import parent_group, seconds
from ..pipelining.action import Link, ScheduleError, chain
from ..pipelining.board import PipelineBoard, refusals_reported
from ..pipelining.edge import check_kinds, group_of, links_of
from ..pipelining.microbatch import Pieces, cut
from ..pipelining.parallel import current
from ..pipelining.schedule import PipelineSchedule, ScheduleOptions
from ..pipelining.schedules import (
    CLASSES,
    PipelineScheduleMulti,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleZBVZeroBubble,
)
from ..pipelining.stage import PipelineStage
from .candidates import (
    Candidate,
    Measured,
    Placed,
    Times,
    as_before,
    best_of,
    counts_to_try,
    measured,
)

__all__ = ["Choice", "ScheduleAuto", "choose"]


_SHOWN = 12  # rows of the table: the fastest, and the fastest of each schedule that is not among them


@dataclass(frozen=True, slots=True)
class Choice:
    """The result of `choose`, the same on every rank.

    Attributes:
        schedule: the class.
        microbatches: into how many it cuts a batch.
        options: keyword arguments of the class that belong to it: ``warmup``, ``delay_weight_grad``.
        candidates: all that were simulated, with seconds of a step and bytes held; those that cannot run say
            why not.
        times: what was measured, one entry for each size of a micro-batch.
    """

    schedule: type[PipelineSchedule]
    microbatches: int
    options: Mapping[str, Any]
    candidates: Sequence[Candidate]
    times: Sequence[Times]
    chosen: Candidate

    def make(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        loss_fn: Callable[..., Any] | None = None,
        **more: Any,
    ) -> PipelineSchedule:
        """The schedule. more: further arguments of its class."""
        listed = _listed(stages)
        given: Any = listed if issubclass(self.schedule, PipelineScheduleMulti) else listed[0]
        made: Any = self.schedule
        return made(given, self.microbatches, loss_fn=loss_fn, **{**self.options, **more})

    def explain(self) -> str:
        """The table: what was measured, and what the schedules would take, fastest first."""
        chosen, most = self.chosen, max(self.chosen.held, default=0.0)
        lines = [
            (
                f"{chosen.name} with {self.microbatches} micro-batches: a step of {_ms(chosen.seconds)} ms, "
                f"bubble {chosen.bubble:.1%}, at most {most / 1e6:.4g} MB of activations on a rank"
            ),
            "",
        ]
        for times in self.times:
            lines += [f"measured, micro-batches of {times.samples:.4g} samples, ms and MB:", _measured(times)]
        lines += ["", "simulated, ms and MB:", _simulated(self.candidates, self.chosen)]
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.explain()


def _listed(stages: PipelineStage | Sequence[PipelineStage]) -> list[PipelineStage]:
    """Returns the stages as a list, also where there is only one."""
    return list(stages) if isinstance(stages, Sequence) else [stages]


def _ms(value: float) -> str:
    return f"{value * 1e3:.4g}"


def _measured(times: Times) -> str:
    rows = [["stage", "forward", "backward", "I", "W", "sends", "held", "more between I and W"]]
    for stage, forward in enumerate(times.forward):
        sends = max((value for (source, _), value in times.transfer.items() if source == stage), default=0.0)
        shown_times = (forward, times.backward[stage], times.inputs[stage], times.weights[stage], sends)
        held = (times.held[stage], times.between[stage])
        rows.append([str(stage), *map(_ms, shown_times), *(f"{each / 1e6:.4g}" for each in held)])
    return table(rows)


def _simulated(found: Sequence[Candidate], chosen: Candidate) -> str:
    ordered = sorted(found, key=lambda each: (bool(each.why_not), each.seconds))
    fastest: dict[str, Candidate] = {}
    for each in ordered:
        fastest.setdefault(each.schedule, each)
    kept = [
        each for each in ordered if each in ordered[:_SHOWN] or each in fastest.values() or each is chosen
    ]
    rows: list[list[str]] = [["schedule", "micro-batches", "step", "bubble", "held", ""]]
    for each in kept:
        ran = each.seconds != float("inf")
        rows.append(
            [
                each.name,
                str(each.microbatches),
                _ms(each.seconds) if ran else "-",
                f"{each.bubble:.1%}" if ran else "-",
                f"{max(each.held) / 1e6:.4g}" if each.held else "-",
                "chosen" if each is chosen else each.why_not,
            ]
        )
    return table(rows)


_AT_ONCE = 2  # micro-batches of a step that is measured


@typed_arguments()
def choose(
    stages: PipelineStage | Sequence[PipelineStage],
    loss_fn: Callable[..., Any] | None,
    example: Any,
    microbatches: int | Sequence[int] | None = None,
    memory_budget: float | None = None,
    *,
    target: Any = None,
    kwargs: Mapping[str, Any] | None = None,
    loss_kwargs: Mapping[str, Any] | None = None,
    columns: dist.ProcessGroup | None = None,
    timeout: float | timedelta | None = None,
    show: bool = True,
) -> Choice:
    """Finds the schedule that makes a step shortest. Every rank of every stage calls it, before training.

    It runs a few micro-batches through the real stages, one after the other, and measures on every rank the
    forward, the backward, its two parts I and W, the transfers and the bytes that a micro-batch holds. It
    then simulates every schedule that runs these stages where they are, with each number of micro-batches,
    warm-ups in between, and weights delayed or not. Of those within the budget the fastest is taken; steps
    within one percent count as equally long, and the one that holds least is taken of these.

    Gradients, buffers and random state are put back. Summing gradients over data-parallel ranks takes the
    same time under every schedule and is left out of the times.

    Args:
        stages: this rank's, as a schedule takes them.
        loss_fn: as schedules take it; counts on the last stage.
        example: a batch as ``step`` takes it, a tensor or a tuple of arguments; counts on the first stage.
            Batches of training are taken to have as many samples.
        microbatches: how many there may be: a number, several, or None for as many as ranks of the schedule,
            and twice that again and again while there are samples.
        memory_budget: bytes of activations that this rank may hold at once; None: no limit. Ranks may have
            different ones.
        target: targets of the batch; counts on the last stage.
        kwargs: keyword arguments of this rank's stages, whole.
        loss_kwargs: more arguments for ``loss_fn``.
        columns: a group of all ranks of all pipelines that DDP or FSDP2 joins, where each has its own
            ``group=``: all of them get one choice. Every rank of it calls this function.
        timeout: limit for each transfer and each agreement, seconds or timedelta; default: the group's.
        show: the first rank prints the table.

    Returns:
        The same choice on every rank: ``choice.make(stages, loss_fn)`` is the schedule.

    Raises:
        LayoutError: bad arguments, the ranks contradict each other, or no schedule fits the placement of the
            stages or the budget.
        MeshcastError: as ``step`` raises them.

    Example, on every rank::

        from meshcast.pipelining import PipelineStage, choose

        rank, ranks = dist.get_rank(), dist.get_world_size()
        stage = PipelineStage(torch.nn.Linear(8, 8), rank, ranks, torch.device("cpu"))
        x, y = torch.randn(32, 8), torch.randn(32, 8)
        loss_fn = torch.nn.functional.mse_loss
        choice = choose(stage, loss_fn, x, target=y, memory_budget=1e9)
        schedule = choice.make(stage, loss_fn)
        schedule.step(*([x] if stage.is_first else []), target=y if stage.is_last else None)
    """
    given = example if isinstance(example, tuple) else () if example is None else (example,)
    search = _Search(_listed(stages), loss_fn, loss_kwargs, columns, timeout)
    return search.find(_Example(given, dict(kwargs or {}), target), microbatches, memory_budget, show)


@dataclass(frozen=True, slots=True)
class _Example:
    """An example, whole or in micro-batches already; what ``step`` would get on this rank."""

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    target: Any
    specs: tuple[Any, Any] = (None, None)
    pieces: Pieces = field(default_factory=Pieces)

    def has_inputs(self) -> bool:
        return bool(self.args or self.kwargs or self.pieces.args or self.pieces.kwargs)

    def has_target(self) -> bool:
        return self.target is not None or self.pieces.targets is not None

    def samples(self) -> int:
        """Returns the number of samples in the first stage's batch, or of micro-batches where it is cut."""
        if self.pieces.args is not None or self.pieces.kwargs is not None:
            return len(self.pieces.args or self.pieces.kwargs or ())
        return sum(cut(self.args, dict(self.kwargs), 1, *self.specs, "example")[2])

    def first(self, count: int, stages: Sequence[PipelineStage]) -> tuple[Pieces, int]:
        """Returns the first micro-batches of a batch that is cut into so many, as these stages take them, and
        how many they are."""
        few = min(count, _AT_ONCE)
        pieces = self.pieces
        args, kwargs, targets = pieces.args, pieces.kwargs, pieces.targets
        if args is None and kwargs is None and (self.args or self.kwargs):
            args, kwargs, _ = cut(self.args, dict(self.kwargs), count, *self.specs, "example")
        if targets is None and self.target is not None:
            cuts, _, _ = cut((self.target,), {}, count, None, None, "example, target")
            targets = [each[0] for each in cuts]
        is_first, is_last = (any(getattr(s, what) for s in stages) for what in ("is_first", "is_last"))
        found = Pieces(
            args[:few] if args and is_first else None,
            kwargs[:few] if kwargs and any(kwargs) else None,
            targets[:few] if targets and is_last else None,
            pieces.local,
        )
        return found, few


class _Search:
    """One conversation of all ranks about what to choose."""

    def __init__(
        self,
        stages: list[PipelineStage],
        loss_fn: Callable[..., Any] | None,
        loss_kwargs: Mapping[str, Any] | None,
        columns: dist.ProcessGroup | None,
        timeout: float | timedelta | None,
    ) -> None:
        with refusals_reported(columns if columns is not None else group_of(stages)):
            check_kinds(stages)
            if not all(isinstance(each, PipelineStage) for each in stages):
                raise LayoutError("the stages are none of meshcast.pipelining: they cannot run here")
            self._stages, self._loss_fn, self._loss_kwargs = stages, loss_fn, loss_kwargs
            self._first = stages[0]
            self._columns = columns
            self._caller = Caller("choose", self._first.rank)
            group = self._first.group if columns is None else columns
            self._timeout = seconds(timeout, parent_group(group, "choose").timeout)
            edges = self._first.edges
            self._links = None if edges is None else links_of(edges)
            # Behind all that is refused: see `refusals_reported`.
            self._board = PipelineBoard(group, self._timeout)

    def find(
        self,
        batch: _Example,
        microbatches: int | Sequence[int] | None,
        budget: float | None,
        show: bool,
    ) -> Choice:
        """Returns the choice of all ranks. Arguments as `choose` takes them."""
        with self._caller:
            plan = self._agreed(batch, microbatches, budget)
            decision = self._measured(batch, plan)
        chosen = decision.candidates[decision.best]
        choice = Choice(
            CLASSES[chosen.schedule],
            chosen.microbatches,
            dict(chosen.options),
            decision.candidates,
            decision.times,
            chosen,
        )
        if show and self._first.rank == self._board.ranks[0]:
            print(choice.explain(), flush=True)
        return choice

    def _measured(self, batch: _Example, plan: _Plan) -> _Decision:
        """Measures this rank's stages, and returns what the first rank decides."""
        found: dict[int, Measured] = {}
        try:
            with as_before(self._stages), current(self._first.device):
                for count in plan.measured:
                    found[count] = measured(
                        self._stages,
                        *batch.first(count, self._stages),
                        plan.rows,
                        self._loss_fn,
                        self._loss_kwargs,
                        args_chunk_spec=batch.specs[0],
                        kwargs_chunk_spec=batch.specs[1],
                        timeout=self._timeout,
                    )
        except BaseException as error:
            self._board.fail(
                "times", f"rank {self._first.rank}: {error or type(error).__name__}", agreement=True
            )
            raise

        def decide(said: Mapping[int, Any]) -> dict[str, Any]:
            ranks = [unpack(dict[int, Measured], each["found"]) for each in said.values()]
            try:
                return {"decision": pack(self._decided(ranks, plan))}
            except ScheduleError as error:
                return {"refused": str(error)}

        answer = self._board.agree("times", {"found": pack(found, dict[int, Measured])}, decide)
        if "refused" in answer:
            raise LayoutError(answer["refused"])
        return unpack(_Decision, answer["decision"])

    def _agreed(
        self,
        batch: _Example,
        microbatches: int | Sequence[int] | None,
        budget: float | None,
    ) -> _Plan:
        """Returns the plan of all ranks, before anything runs."""
        mine: Exception | None = None
        said: dict[str, Any] = {}
        try:
            counts = _counts(microbatches)
            if budget is not None and not budget > 0:
                raise LayoutError(f"memory_budget must be a number of bytes above 0, found {shown(budget)}")
            for stage in self._stages:
                stage.learn_wrappers()
            if self._columns is None and any(stage.joins_pipelines for stage in self._stages):
                raise LayoutError(
                    f"DDP or FSDP2 joins stage {self._first.stage_index} with other "
                    "pipelines, which need the same schedule: give columns= a group of all their ranks"
                )
            last = any(stage.is_last for stage in self._stages)
            if last and (self._loss_fn is None or not batch.has_target()):
                raise LayoutError("the last stage measures the backward: it needs loss_fn and target=")
            samples = None
            if any(stage.is_first for stage in self._stages):
                if not batch.has_inputs():
                    raise LayoutError("the first stage needs a batch: choose(stages, loss_fn, x, ...)")
                samples = batch.samples()
                if batch.pieces.local and not batch.pieces.given:  # of this rank alone
                    samples *= self._first.batch_parts
            stages = sorted(stage.stage_index for stage in self._stages)
            said = {"facts": pack(_RankFacts(stages, self._first.num_stages, counts, budget, samples))}
        except Exception as error:
            mine = error
            said = {"refused": f"rank {self._first.rank}: {error or type(error).__name__}"}
        if mine is not None:  # the others read it when they enter
            self._board.refuse("placement", said, _placed, mine)
            raise mine
        answer = self._board.agree("placement", said, _placed)
        if "wrong" in answer:
            raise LayoutError(answer["wrong"])
        if "refused" in answer:
            rank, text = answer["refused"]
            raise AbortedError(text, peer=rank, phase="agree")
        return unpack(_Plan, answer["plan"])

    def _decided(self, ranks: Sequence[Mapping[int, Measured]], plan: _Plan) -> _Decision:
        """Decides, on the first rank. Raises ScheduleError where no schedule fits."""
        known = [
            _together([each[count] for each in ranks], plan.samples / count, self._links)
            for count in sorted(plan.measured, reverse=True)
        ]
        found = Placed(plan.rows, plan.budgets).candidates(plan.counts, plan.samples, known)
        return _Decision(found, found.index(best_of(found)), known)


class _RankFacts(NamedTuple):
    """Stages of a rank, their number in all ranks, and its arguments."""

    mine: list[int]
    stages: int
    counts: list[int] | None
    budget: float | None
    samples: int | None


class _Plan(NamedTuple):
    """Rows of the schedule, numbers of micro-batches that are tried and those that are measured, samples of a
    batch, and bytes that each row may hold."""

    rows: list[list[int]]
    counts: list[int]
    measured: list[int]
    samples: int
    budgets: list[float | None]


class _Decision(NamedTuple):
    """best: position among the candidates."""

    candidates: list[Candidate]
    best: int
    times: list[Times]


def _counts(microbatches: int | Sequence[int] | None) -> list[int] | None:
    if microbatches is None:
        return None
    listed = [microbatches] if isinstance(microbatches, int) else list(microbatches)
    if not listed or not all(isinstance(n, int) and not isinstance(n, bool) and n >= 1 for n in listed):
        raise LayoutError(
            f"microbatches must be a number of at least 1, or several, found {shown(microbatches)}"
        )
    return sorted(set(listed))


def _placed(said: Mapping[int, Any]) -> dict[str, Any]:
    """Returns the answer that the first rank makes from the facts of all ranks."""
    refused = [(rank, each["refused"]) for rank, each in said.items() if "refused" in each]
    if refused:
        return {"refused": refused[0]}
    facts = {rank: unpack(_RankFacts, each["facts"]) for rank, each in said.items()}
    first = min(facts)
    for what in ("stages", "counts"):
        mine = getattr(facts[first], what)
        for rank, each in facts.items():
            if getattr(each, what) != mine:
                text = f"the ranks disagree on {what}: rank {first} has {mine}, rank {rank} has "
                return {"wrong": f"{text}{getattr(each, what)}"}
    rows = sorted({tuple(each.mine) for each in facts.values()})
    if sorted(stage for row in rows for stage in row) != list(range(facts[first].stages)):
        text = f"the ranks have stages {[list(row) for row in rows]} of {facts[first].stages}: each stage is "
        return {"wrong": f"{text}on ranks that all have the same ones"}
    samples = min(each.samples for each in facts.values() if each.samples is not None)
    counts = facts[first].counts or counts_to_try(samples, len(rows))
    if max(counts) > samples:
        return {"wrong": f"the example has {samples} samples, too few for {max(counts)} micro-batches"}
    budgets = []
    for row in rows:
        limits = [each.budget for each in facts.values() if tuple(each.mine) == row]
        budgets.append(min((limit for limit in limits if limit is not None), default=None))
    both = sorted({min(counts), max(counts)})
    return {"plan": pack(_Plan([list(row) for row in rows], counts, both, samples, budgets))}


def _together(found: Sequence[Measured], samples: float, links: Sequence[Link] | None) -> Times:
    """Joins the measurements of all ranks: the times of a stage's slowest rank, the bytes of its fullest."""
    of_stage: dict[int, dict[str, float]] = {}
    of_link: dict[Link, float] = {}
    for each in found:
        for stage, numbers in each.stages.items():
            known = of_stage.setdefault(stage, {})
            for what, value in numbers.items():
                known[what] = max(known.get(what, value), value)
        for link, value in each.links.items():
            of_link[link] = max(of_link.get(link, 0.0), value)
    for link in chain(len(of_stage)) if links is None else links:
        of_link.setdefault(link, 0.0)  # between stages of the same ranks nothing travels

    def listed(what: str) -> list[float]:
        return [of_stage[stage].get(what, 0.0) for stage in sorted(of_stage)]

    return Times(
        samples,
        forward=listed("F"),
        backward=listed("B"),
        inputs=listed("I"),
        weights=listed("W"),
        transfer=of_link,
        held=listed("held"),
        between=listed("between"),
    )


class ScheduleAuto(torch_schedules._PipelineSchedule):
    """Chooses as `choose` does, with the batch of the first step, and runs what was chosen from then on.

    Args:
        stages: this rank's stage, or a list of them.
        n_microbatches: of a step; None lets it be chosen too.
        loss_fn, args_chunk_spec, kwargs_chunk_spec, output_merge_spec, scale_grads: as schedules take them.
        memory_budget: bytes of activations that this rank may hold at once; None: no limit.
        columns: as `choose` takes it.
        show: the first rank prints the table.
        options: of every schedule, see `PipelineSchedule`, except for those that are chosen: warmup and
            delay_weight_grad.

    Attributes:
        choice: what was chosen; None before the first step.

    Raises:
        LayoutError: bad arguments; at the first step as `choose`.

    Example, on every rank::

        from meshcast.pipelining import PipelineStage, get_schedule_class

        rank, ranks = dist.get_rank(), dist.get_world_size()
        stage = PipelineStage(torch.nn.Linear(8, 8), rank, ranks, torch.device("cpu"))
        schedule = get_schedule_class("auto")(stage, 8, loss_fn=torch.nn.functional.mse_loss)
        x, y = torch.randn(32, 8), torch.randn(32, 8)
        for _ in range(2):  # the first step chooses
            schedule.step(*([x] if stage.is_first else []), target=y if stage.is_last else None)
    """

    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        n_microbatches: int | None = None,
        loss_fn: Callable[..., Any] | None = None,
        args_chunk_spec: tuple[Any, ...] | None = None,
        kwargs_chunk_spec: dict[str, Any] | None = None,
        output_merge_spec: dict[str, Any] | tuple[Any, ...] | None = None,
        scale_grads: bool = True,
        *,
        memory_budget: float | None = None,
        columns: dist.ProcessGroup | None = None,
        show: bool = True,
        **options: Any,
    ) -> None:
        with refusals_reported(group_of(stages)):
            chosen_here = {"warmup", "times", "delay_weight_grad"}.intersection(options)
            if chosen_here:
                raise LayoutError(f"ScheduleAuto chooses {', '.join(sorted(chosen_here))}: leave it out")
            unknown = set(options) - set(ScheduleOptions.__annotations__)
            if unknown:
                raise TypeError(
                    f"ScheduleAuto got an unexpected keyword argument: {', '.join(sorted(unknown))}"
                )
            self._listed = _listed(stages)
            check_kinds(self._listed)
        self.choice: Choice | None = None
        self._schedule: PipelineSchedule | None = None
        self._early: PipelineSchedule | None = None  # that evaluates before the first step
        count: Any = n_microbatches  # None until it is chosen
        super().__init__(
            count,
            loss_fn,
            args_chunk_spec,
            kwargs_chunk_spec,
            output_merge_spec,
            scale_grads,
        )
        self._budget, self._columns, self._show = memory_budget, columns, show
        self._options = dict(options)

    def __repr__(self) -> str:
        return f"<ScheduleAuto: {self._schedule or 'nothing is chosen yet'}>"

    def step(self, *args: Any, **named: Any) -> Any:
        """Runs a step as `PipelineSchedule.step` does; the first call chooses the schedule before that."""
        if self._schedule is None:
            bound = inspect.signature(PipelineSchedule.step).bind(self, *args, **named)
            bound.apply_defaults()
            given = bound.arguments
            batch = _Example(
                given["args"],
                given["kwargs"],
                given["target"],
                (self._args_chunk_spec, self._kwargs_chunk_spec),
                Pieces(given["arg_mbs"], given["kwarg_mbs"], given["target_mbs"], given["local_batch"]),
            )
            self._choose(batch, given["loss_kwargs"])
        return self._chosen.step(*args, **named)

    def eval(self, *args: Any, **named: Any) -> Any:
        """Runs an evaluation as `PipelineSchedule.eval` does. Before the first step forwards run in an order
        that fits every placement, in as many micro-batches as there are ranks in the pipeline, unless their
        number was given."""
        if self._schedule is not None:
            return self._schedule.eval(*args, **named)
        if self._early is None:
            self._early = self._made(self._plain(), self._n_microbatches or self._listed[0].num_stages, {})
        return self._early.eval(*args, **named)

    def _step_microbatches(
        self,
        arg_mbs: list[Any] | None = None,
        kwarg_mbs: list[Any] | None = None,
        target_mbs: list[Any] | None = None,
        losses: list[Any] | None = None,
        return_outputs: bool = True,
        loss_kwargs: dict[str, Any] | None = None,
    ) -> None:
        """Runs a step on micro-batches, as in torch."""
        if self._schedule is None:
            pieces = Pieces(arg_mbs, kwarg_mbs, target_mbs)
            self._choose(_Example((), {}, None, (None, None), pieces), loss_kwargs)
        self._chosen._step_microbatches(arg_mbs, kwarg_mbs, target_mbs, losses, return_outputs, loss_kwargs)

    def close(self) -> None:
        """Drops the transfers."""
        for each in (self._schedule, self._early):
            if each is not None:
                each.close()

    @property
    def _chosen(self) -> PipelineSchedule:
        assert self._schedule is not None
        return self._schedule

    def __getattr__(self, name: str) -> Any:
        """An attribute of the chosen schedule: ``trace``, ``summary``, ``draw``, ``pipeline_order``, ..."""
        chosen = self.__dict__.get("_schedule")
        if chosen is None or name.startswith("__"):
            raise AttributeError(f"ScheduleAuto has no {name!r} before its first step chooses a schedule")
        return getattr(chosen, name)

    def _choose(self, batch: _Example, loss_kwargs: Mapping[str, Any] | None) -> None:
        with refusals_reported(group_of(self._listed) if self._columns is None else self._columns):
            if not torch.is_grad_enabled():
                raise MeshcastError(
                    "step trains and needs gradients enabled; use eval under torch.no_grad", op="pipeline"
                )
        search = _Search(
            self._listed, self._loss_fn, loss_kwargs, self._columns, self._options.get("timeout")
        )
        self.choice = search.find(batch, self._n_microbatches, self._budget, self._show)
        self._n_microbatches = self.choice.microbatches
        self._schedule = self._made(self.choice.schedule, self._n_microbatches, self.choice.options)
        if self._early is not None:
            self._early.close()
            self._early = None

    def _made(self, kind: Any, microbatches: int, options: Mapping[str, Any]) -> PipelineSchedule:
        single = issubclass(kind, torch_schedules.PipelineScheduleSingle)
        specs: dict[str, Any] = {
            "args_chunk_spec": self._args_chunk_spec,
            "kwargs_chunk_spec": self._kwargs_chunk_spec,
        }
        if issubclass(kind, torch_schedules.ScheduleLoopedBFS):  # which has none
            if any(each is not None for each in specs.values()):
                raise LayoutError("ScheduleLoopedBFS was chosen, which takes no chunk specs")
            specs = {}
        return kind(
            self._listed[0] if single else self._listed,
            microbatches,
            loss_fn=self._loss_fn,
            output_merge_spec=self._output_merge_spec,
            scale_grads=self.scale_grads,
            **specs,
            **{**self._options, **options},
        )

    def _plain(self) -> type[PipelineSchedule]:
        numbers, count = sorted(stage.stage_index for stage in self._listed), self._listed[0].num_stages
        if len(numbers) == 1:
            return ScheduleGPipe
        return ScheduleZBVZeroBubble if sum(numbers) == count - 1 else ScheduleInterleaved1F1B
