"""The candidates of `choose`: the schedules that fit the placement of the stages, with times by simulation.

All of it is arithmetic on what the ranks have measured: no process group, no tensors.

Measures the real stages of this rank: F, B, I and W, transfers, and what a micro-batch holds in memory.

A few micro-batches run through the whole pipeline one after the other, so that nothing else is under way
while something is measured. What a step leaves in the modules is put back.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from ..pipelining._backward import children_first, saved_values
from ..pipelining.action import Action, ActionKind, Actions, Costs, Link, ScheduleError, link_of, lower
from ..pipelining.compat import order_of_torch, torch_order
from ..pipelining.microbatch import Pieces
from ..pipelining.orders import build
from ..pipelining.parallel import local_values
from ..pipelining.schedules import PipelineScheduleMulti
from ..pipelining.simulate import SimulationReport, resolve_warmup, simulate_actions
from ..pipelining.stage import PipelineStage

__all__ = [
    "Candidate",
    "Times",
    "as_before",
    "best_of",
    "candidates",
    "counts_to_try",
    "ended",
    "kept_bytes",
    "measured",
    "times_at",
]


# Steps that differ by less are taken for equally long: measured times do not tell them apart.
_ALIKE = 0.01
# Micro-batches for each rank of the schedule that are tried at most: a longer step is the same shape.
_MOST_FOR_A_RANK = 16


@dataclass(frozen=True, slots=True)
class Times:
    """The costs of a micro-batch. Lists have an entry for each stage, that of its slowest, or fullest, rank.

    Attributes:
        samples: of the micro-batch, over all ranks.
        forward, backward, inputs, weights: seconds of F, B, I and W.
        transfer: seconds of one micro-batch over each link, the longer of both directions.
        held: bytes from the forward to the backward (of the weights).
        between: bytes more between I and W, which may be less than nothing.
    """

    samples: float
    forward: list[float]
    backward: list[float]
    inputs: list[float]
    weights: list[float]
    transfer: dict[Link, float]
    held: list[float]
    between: list[float]

    def costs(self) -> Costs:
        compute = {
            ActionKind.F: self.forward,
            ActionKind.B: self.backward,
            ActionKind.I: self.inputs,
            ActionKind.W: self.weights,
        }
        return Costs(compute, self.transfer)


def times_at(samples: float, known: Sequence[Times]) -> Times:
    """For a micro-batch of so many samples: on the line through what was measured of two sizes, in
    proportion outside of them; a single one is taken as it is."""
    if len(known) == 1:
        return known[0]
    small, large = known[0], known[-1]
    part = (samples - small.samples) / (large.samples - small.samples)

    def on_line(low: float, high: float) -> float:
        return low + (high - low) * part

    def listed(name: str) -> list[float]:
        return [on_line(*pair) for pair in zip(getattr(small, name), getattr(large, name), strict=True)]

    names = ("forward", "backward", "inputs", "weights", "held")
    lists = {name: [max(0.0, each) for each in listed(name)] for name in names}
    lists["between"] = [max(-held, each) for held, each in zip(lists["held"], listed("between"), strict=True)]
    links = {link: max(0.0, on_line(small.transfer[link], large.transfer[link])) for link in small.transfer}
    return Times(samples=samples, transfer=links, **lists)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A schedule with its options, and what the simulation says.

    Attributes:
        schedule: name that `get_schedule_class` takes.
        microbatches: of a step.
        options: keyword arguments of the schedule.
        seconds: of a step; infinite where it cannot run.
        bubble: part of the time of all ranks in which they compute nothing.
        held: for each rank of the schedule, most bytes of activations at once.
        why_not: "" where it can run within the budget.
    """

    schedule: str
    microbatches: int
    options: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = float("inf")
    bubble: float = 0.0
    held: Sequence[float] = ()
    why_not: str = ""

    @property
    def name(self) -> str:
        """With what its options change."""
        warmup = self.options.get("warmup")
        words = [self.schedule]
        if isinstance(warmup, str):
            words.append(f"warm-up {warmup}")
        elif warmup is not None:
            words.append(f"warm-up {' '.join(map(str, warmup))}")
        if self.options.get("delay_weight_grad"):
            words.append("delayed")
        return ", ".join(words)


def counts_to_try(samples: int, ranks: int) -> list[int]:
    """Numbers of micro-batches: as many as ranks of the schedule, and twice that again and again."""
    count = min(samples, ranks)
    found = []
    while count <= min(samples, _MOST_FOR_A_RANK * ranks):
        found.append(count)
        count *= 2
    return found


def candidates(
    rows: Sequence[Sequence[int]],
    counts: Sequence[int],
    samples: int,
    known: Sequence[Times],
    links: Sequence[Link] | None,
    budgets: Sequence[float | None],
    after: Sequence[float] = (),
) -> list[Candidate]:
    """Every schedule that runs these stages where they are, simulated for each number of micro-batches.

    Args:
        rows: the stages of each rank of the schedule, ranks in the order of their first stages.
        counts: numbers of micro-batches. samples: of a batch.
        known: of the sizes that were measured, smallest first.
        budgets: bytes that each rank of the schedule may hold; None: any number.
        after: seconds that each rank of the schedule needs behind its last action; empty: none.

    Raises:
        ScheduleError: no schedule has its stages like that.
    """
    found: list[Candidate] = []
    for count in counts:
        times = times_at(samples / count, known)
        for name, options, actions in _orders(rows, count, times, links, budgets):
            if isinstance(actions, str):
                found.append(Candidate(name, count, options, why_not=actions))
            else:
                found.append(_simulated(name, count, options, actions, times, links, budgets, after))
    if not found:
        raise ScheduleError(
            f"no schedule known here runs stages {[list(row) for row in rows]} together: it needs one stage "
            "on each rank, stage s on rank s mod p, or stages s and 2p - 1 - s on rank s"
        )
    return found


def best_of(found: Sequence[Candidate]) -> Candidate:
    """The fastest; of those that are as fast within what can be measured the one that holds least, and of
    these the first, which is the simplest. Raises ScheduleError with the reasons where none can run."""
    able = [each for each in found if not each.why_not]
    if not able:
        reasons = "; ".join(f"{each.name} with {each.microbatches}: {each.why_not}" for each in found[:8])
        raise ScheduleError(f"no schedule fits: {reasons}")
    least = min(each.seconds for each in able)
    alike = [each for each in able if each.seconds <= least * (1 + _ALIKE)]
    return min(alike, key=lambda each: max(each.held, default=0.0))


_Order = tuple[str, dict[str, Any], "Actions | str"]


def _orders(
    rows: Sequence[Sequence[int]],
    count: int,
    times: Times,
    links: Sequence[Link] | None,
    budgets: Sequence[float | None],
) -> Iterator[_Order]:
    """Name, options and actions of each schedule; instead of actions why there are none."""
    ranks, stages = len(rows), sum(map(len, rows))
    placed = [sorted(row) for row in rows]

    def made(name: str, **options: Any) -> _Order:
        known = {key: value for key, value in options.items() if value is not None and value is not False}
        try:
            placed_on = ranks if name == "Interleaved1F1B" else None
            return name, known, build(name, stages, count, ranks=placed_on, **known)
        except ScheduleError as error:
            return name, known, str(error)

    def of_torch(name: str) -> _Order:
        try:
            return name, {}, order_of_torch(name, stages, ranks, count)
        except (ValueError, AssertionError) as error:
            return name, {}, str(error) or type(error).__name__

    if placed == [[stage] for stage in range(stages)]:
        for delayed in (False, True):
            yield made("GPipe", delay_weight_grad=delayed)
            yield made("1F1B", delay_weight_grad=delayed)
            if stages > 1:
                yield made("Eager1F1B", delay_weight_grad=delayed)
                between = _warmup(stages, count, times, links, budgets, delayed)
                if between is not None:
                    yield made("1F1B", warmup=between, delay_weight_grad=delayed)
        yield made("ZBH1")
        yield made("ZBH2")
    elif placed == [list(range(rank, stages, ranks)) for rank in range(ranks)]:
        for delayed in (False, True):
            for warmup in ("1f1b", "eager"):
                yield made("Interleaved1F1B", warmup=warmup, delay_weight_grad=delayed)
        yield of_torch("LoopedBFS")
        yield of_torch("InterleavedZeroBubble")
    if placed == [[rank, stages - 1 - rank] for rank in range(ranks)]:
        yield made("ZBV")
        yield of_torch("DualPipeV")


def _warmup(
    stages: int,
    count: int,
    times: Times,
    links: Sequence[Link] | None,
    budgets: Sequence[float | None],
    delayed: bool,
) -> list[int] | None:
    """Between 1F1B and Eager1F1B, what the budget allows; None where that is one of the two, or nothing."""
    limits = [
        count if budget is None or not held else max(1, min(count, int(budget // held)))
        for budget, held in zip(budgets, times.held, strict=True)
    ]
    try:
        # The steady state has begun by then, and the search simulates each hop.
        found = resolve_warmup(
            "auto", "1F1B", stages, min(count, 3 * stages), limits, times.costs(), links, delayed
        )
    except ScheduleError:
        return None
    assert isinstance(found, list)
    known = [[stages - stage for stage in range(stages)], [2 * (stages - s) - 1 for s in range(stages)]]
    return None if found in known else found


def _simulated(
    name: str,
    count: int,
    options: Mapping[str, Any],
    actions: Actions,
    times: Times,
    links: Sequence[Link] | None,
    budgets: Sequence[float | None],
    after: Sequence[float],
) -> Candidate:
    held = [_most_held(actions[rank], times) for rank in sorted(actions)]
    over = [rank for rank, limit in enumerate(budgets) if limit is not None and held[rank] > limit]
    why_not = ""
    if over:
        rank = over[0]
        why_not = f"rank {rank} holds {held[rank] / 1e6:.4g} MB, budget {(budgets[rank] or 0.0) / 1e6:.4g} MB"
    report = simulate_actions(lower(actions, links), times.costs())
    return Candidate(name, count, options, ended(report, after), report.bubble_fraction, held, why_not)


def ended(report: SimulationReport, after: Sequence[float]) -> float:
    """The end of the step, if each rank needs so many seconds behind its last action."""
    ends = [0.0] * len(after)
    for span in report.timeline if any(after) else ():
        ends[span.rank] = max(ends[span.rank], span.end)
    return max([report.makespan, *map(sum, zip(ends, after, strict=True))])


def _most_held(row: Sequence[Any], times: Times) -> float:
    """Most bytes at once; a rank's order tells, whatever the times."""
    now = most = 0.0
    for action in row:
        stage = action.stage
        if action.kind is ActionKind.F:
            now += times.held[stage]
        elif action.kind is ActionKind.I:
            now += times.between[stage]
        most = max(most, now)
        if action.kind is ActionKind.B:
            now -= times.held[stage]
        elif action.kind is ActionKind.W:
            now -= times.held[stage] + times.between[stage]
    return most


_STEPS = 2  # that are measured, behind one that is not

# Of a rank: {"stages": {stage: {kind of action or "held" or "between": number}}, "links": {"0>1": seconds}}
Measured = dict[str, dict[str, Any]]


class _OneByOne(PipelineScheduleMulti):
    """Each micro-batch goes forward and backward before the next one begins."""

    def __init__(
        self, stages: list[PipelineStage], count: int, rows: Sequence[Sequence[int]], split: bool, **more: Any
    ) -> None:
        super().__init__(stages, count, **more)
        back = (ActionKind.I, ActionKind.W) if split else (ActionKind.B,)
        self.pipeline_order = torch_order(
            {
                rank: [
                    action
                    for number in range(count)
                    for action in (
                        *(Action(stage, ActionKind.F, number) for stage in sorted(row)),
                        *(
                            Action(stage, kind, number)
                            for stage in sorted(row, reverse=True)
                            for kind in back
                        ),
                    )
                ]
                for rank, row in enumerate(rows)
            }
        )


def measured(
    stages: list[PipelineStage],
    pieces: Pieces,
    count: int,
    rows: Sequence[Sequence[int]],
    loss_fn: Callable[..., Any] | None,
    loss_kwargs: Mapping[str, Any] | None,
    **options: Any,
) -> Measured:
    """Every rank of the pipeline calls it at the same time, inside `as_before`.

    Args:
        pieces: micro-batches of one size, `count` of them; of what this rank's stages take.
        rows: the stages of each rank of the schedule.
        options: of the schedule.
    """
    found: Measured = {"stages": {str(stage.stage_index): {} for stage in stages}, "links": {}}
    times: dict[tuple[ActionKind, int | Link], list[float]] = {}
    for split in (False, True):
        schedule = _OneByOne(stages, count, rows, split, loss_fn=loss_fn, **options)
        try:
            for step in range(1 + _STEPS):
                _step(schedule, pieces, loss_kwargs)
                if step:
                    _read(schedule, times)
            look = _between(stages, found) if split else _held(schedule, stages, found)
            with look:
                _step(schedule, pieces, loss_kwargs)
        finally:
            schedule.close()
    links: dict[str, float] = {}
    for (kind, place), seconds in times.items():
        middle = median(seconds)
        if isinstance(place, int):
            found["stages"][str(place)][kind.value] = middle
        else:
            name = f"{place[0]}>{place[1]}"
            links[name] = max(links.get(name, 0.0), middle)
    for stage in stages:
        if stage.is_whole:  # what I takes beyond B, or below it, is noise
            numbers = found["stages"][str(stage.stage_index)]
            numbers |= {"I": numbers["B"], "W": 0.0}
    found["links"] = links
    return found


def _step(schedule: _OneByOne, pieces: Pieces, loss_kwargs: Mapping[str, Any] | None) -> None:
    schedule.step(
        arg_mbs=pieces.args,
        kwarg_mbs=pieces.kwargs,
        target_mbs=pieces.targets,
        return_outputs=False,
        local_batch=pieces.local,
        loss_kwargs=dict(loss_kwargs or {}),
    )


def _read(schedule: _OneByOne, times: dict[tuple[ActionKind, int | Link], list[float]]) -> None:
    """From the trace of the last step."""
    assert schedule._runtime is not None
    for name, category, begin, end in schedule._runtime.trace.events:
        if category == "wait":
            continue
        action = Action.parse(name)
        place: int | Link = action.stage if action.kind.is_compute else link_of(action)
        times.setdefault((action.kind, place), []).append(end - begin)


@contextmanager
def _held(schedule: _OneByOne, stages: Sequence[PipelineStage], found: Measured) -> Iterator[None]:
    """Inside, counts the bytes that autograd keeps of each stage's forward of micro-batch 0, and of its
    outputs. Parameters are there anyway, as is the batch, of which the first stage has a view."""
    with ExitStack() as stack:
        for stage in stages:
            stack.enter_context(_watched(schedule, stage, found["stages"][str(stage.stage_index)]))
        yield


@contextmanager
def _watched(schedule: _OneByOne, stage: PipelineStage, found: dict[str, Any]) -> Iterator[None]:
    before = stage._forward_contexts

    @contextmanager
    def context(info: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for make in before.values():  # that of the user
                stack.enter_context(make(info))
            if info.microbatch_index == 0 and not info.is_metadata_inference:
                given = schedule._feeds[stage.stage_index].arguments(0) if stage.is_first else []
                stack.enter_context(_counting(stage, _storages(tree_leaves(given)), found))
            yield

    stage._forward_contexts = OrderedDict({0: context})
    try:
        yield
    finally:
        stage._forward_contexts = before


@contextmanager
def _counting(stage: PipelineStage, there: set[int], found: dict[str, Any]) -> Iterator[None]:
    """there: storages that do not count."""
    # FSDP2 gathers parameters as it goes, so what they are is known only when something is kept.
    with kept_bytes(stage.submod, there, parameters_move=stage.accumulates) as sizes:
        yield
    outputs = stage.ways[0].outputs if stage.ways else None
    found["held"] = sum(sizes.values()) + sum(
        torch.Size(shape).numel() * dtype.itemsize for shape, dtype in outputs or ()
    )


@contextmanager
def kept_bytes(
    module: torch.nn.Module, there: Set[int] = frozenset(), *, parameters_move: bool = False
) -> Iterator[dict[int, int]]:
    """Inside, notes what autograd keeps, {storage: bytes}, but for the parameters and buffers of the module
    and the storages that are `there` anyway."""
    sizes: dict[int, int] = {}
    own = _of_module(module)

    def pack(value: torch.Tensor) -> torch.Tensor:
        mine = _of_module(module) if parameters_move else own
        storage = local_values(value).untyped_storage()
        if storage._cdata not in mine and storage._cdata not in there:
            sizes[storage._cdata] = storage.nbytes()
        return value.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        yield sizes


def _of_module(module: torch.nn.Module) -> set[int]:
    return _storages([*module.parameters(), *module.buffers()])


def _storages(values: Sequence[Any]) -> set[int]:
    return {_storage(value)._cdata for value in values if isinstance(value, torch.Tensor)}


def _storage(value: torch.Tensor) -> torch.UntypedStorage:
    return local_values(value.detach()).untyped_storage()


@contextmanager
def _between(stages: Sequence[PipelineStage], found: Measured) -> Iterator[None]:
    """Inside, counts how many bytes more micro-batch 0 holds between I and W than before: the gradients that
    wait for W, less what I let go of."""
    for stage in stages:
        _count_between(stage, found["stages"][str(stage.stage_index)])
    try:
        yield
    finally:
        for stage in stages:
            del stage.backward_one_chunk, stage.backward_weight_one_chunk


def _count_between(stage: PipelineStage, found: dict[str, Any]) -> None:
    inputs, weights = stage.backward_one_chunk, stage.backward_weight_one_chunk
    held: list[tuple[StorageWeakRef, int]] = []

    def before(bwd_chunk_id: int, *given: Any, **options: Any) -> None:
        if bwd_chunk_id == 0:
            outputs, _ = stage.fwd_cache[0]
            held.extend(_held_behind(tree_leaves(outputs), and_outputs=not stage.is_last))
        inputs(bwd_chunk_id, *given, **options)

    def after(bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id == 0:
            split = stage._late.get(0)
            waiting = 0 if split is None else split.kept_bytes
            found["between"] = waiting - sum(nbytes for storage, nbytes in held if storage.expired())
        weights(bwd_chunk_id, last_backward)

    stage.backward_one_chunk = before  # type: ignore[method-assign]
    stage.backward_weight_one_chunk = after  # type: ignore[method-assign]


def _held_behind(outputs: Sequence[Any], and_outputs: bool) -> list[tuple[StorageWeakRef, int]]:
    """The storages, with their bytes, of what autograd keeps of a forward; and_outputs: and of these."""
    ends = [output for output in outputs if isinstance(output, torch.Tensor)]
    values = [*ends] if and_outputs else []
    for node in children_first(end.grad_fn for end in ends if end.grad_fn is not None):
        values += saved_values(node)
    storages = {storage._cdata: storage for storage in map(_storage, values)}
    return [(StorageWeakRef(storage), storage.nbytes()) for storage in storages.values()]


@contextmanager
def as_before(stages: Sequence[PipelineStage]) -> Iterator[None]:
    """Afterwards gradients, buffers and random state are what they were."""
    for stage in stages:
        stage.free_parameters()
    parameters = [each for stage in stages for each in stage.submod.parameters()]
    gradients = [parameter.grad for parameter in parameters]
    buffers = [(each, each.detach().clone()) for stage in stages for each in stage.submod.buffers()]
    told = [stage.is_whole for stage in stages]
    for stage in stages:
        stage.is_whole = False  # which measuring finds out; it warns of an order that nobody asked for
    device = stages[0].device
    random = torch.get_rng_state()
    on_gpu = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
    for parameter in parameters:
        parameter.grad = None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for stage, known in zip(stages, told, strict=True):
            stage.free_parameters()
            stage.is_whole = known
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.set_rng_state(random)
        if on_gpu is not None:
            torch.cuda.set_rng_state(on_gpu, device)
