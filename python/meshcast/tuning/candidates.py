"""The candidates of `choose`: the schedules that fit the placement of the stages, with times by simulation.

They are arithmetic on what the ranks have measured: no process group, no tensors.

Also the measurement of this rank's stages: F, B, I and W, transfers, and what a micro-batch holds in memory.
A few micro-batches run through the whole pipeline one after the other, so that nothing else runs while
something is measured. The modules are restored after each step.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
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
from ..pipelining.simulate import SimulationReport, best_warmup, most_held, simulate_actions
from ..pipelining.stage import PipelineStage

__all__ = [
    "Candidate",
    "Measured",
    "Placed",
    "Times",
    "as_before",
    "best_of",
    "counts_to_try",
    "kept_bytes",
    "measured",
    "restored",
    "times_at",
]


# Steps that differ by less count as equally long: measured times cannot distinguish them.
_EQUAL = 0.01
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

    def simulated(self, actions: Actions) -> SimulationReport:
        """Returns the step of these compute actions. The links between the stages are those with a time."""
        return simulate_actions(lower(actions, sorted(self.transfer)), self.costs())


def times_at(samples: float, known: Sequence[Times]) -> Times:
    """Returns the costs of a micro-batch of so many samples: on the line through two measured sizes; those of
    a single one as they are."""
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
    """A schedule with its options, and the result of its simulation.

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
    """Returns numbers of micro-batches: as many as ranks of the schedule, and twice that again and again."""
    count = min(samples, ranks)
    found = []
    while count <= min(samples, _MOST_FOR_A_RANK * ranks):
        found.append(count)
        count *= 2
    return found


def best_of(found: Sequence[Candidate]) -> Candidate:
    """Returns the fastest; of those that are as fast within what can be measured the one that holds least; of
    these the first, which is the simplest. Raises ScheduleError with the reasons where none can run."""
    able = [each for each in found if not each.why_not]
    if not able:
        reasons = "; ".join(f"{each.name} with {each.microbatches}: {each.why_not}" for each in found[:8])
        raise ScheduleError(f"no schedule fits: {reasons}")
    least = min(each.seconds for each in able)
    fastest = [each for each in able if each.seconds <= least * (1 + _EQUAL)]
    return min(fastest, key=lambda each: max(each.held, default=0.0))


_OF_TORCH = ("LoopedBFS", "InterleavedZeroBubble", "DualPipeV")  # orders that torch makes


@dataclass(frozen=True, slots=True)
class Placed:
    """Stages where they run, and what their ranks allow.

    Attributes:
        rows: the stages of each rank of the schedule, ranks in the order of their first stages.
        budgets: bytes that each rank of the schedule may hold; None: any number.
        after: seconds that each rank of the schedule needs behind its last action; empty: none.
    """

    rows: Sequence[Sequence[int]]
    budgets: Sequence[float | None]
    after: Sequence[float] = ()

    def candidates(self, counts: Sequence[int], samples: int, known: Sequence[Times]) -> list[Candidate]:
        """Returns every schedule that runs these stages where they are, simulated for each number of
        micro-batches.

        Args:
            counts: numbers of micro-batches. samples: of a batch.
            known: of the sizes that were measured, smallest first.

        Raises:
            ScheduleError: no schedule has its stages like that.
        """
        found: list[Candidate] = []
        for count in counts:
            times = times_at(samples / count, known)
            for each, actions in self._orders(count, times):
                found.append(each if each.why_not else self.rated(each, actions, times))
        if not found:
            raise ScheduleError(
                f"no schedule known here runs stages {[list(row) for row in self.rows]} together: it needs "
                "one stage on each rank, stage s on rank s mod p, or stages s and 2p - 1 - s on rank s"
            )
        return found

    def rated(self, candidate: Candidate, actions: Actions, times: Times) -> Candidate:
        """Returns the candidate with what its compute actions take and hold, by simulation."""
        held, between = times.held.__getitem__, times.between.__getitem__
        most = [most_held(actions[rank], held, between) for rank in sorted(actions)]
        why_not = ""
        for rank, (limit, own) in enumerate(zip(self.budgets, most, strict=True)):
            if limit is not None and own > limit:
                why_not = f"rank {rank} holds {own / 1e6:.4g} MB, budget {limit / 1e6:.4g} MB"
                break
        report = times.simulated(actions)
        ends = [0.0] * len(self.after)
        for span in report.timeline if any(self.after) else ():
            ends[span.rank] = max(ends[span.rank], span.end)
        seconds = max([report.makespan, *map(sum, zip(ends, self.after, strict=True))])
        return replace(candidate, seconds=seconds, bubble=report.bubble_fraction, held=most, why_not=why_not)

    def _orders(self, count: int, times: Times) -> Iterator[tuple[Candidate, Actions]]:
        """Yields each schedule with its actions; without any it has the reason."""
        ranks, stages = len(self.rows), sum(map(len, self.rows))
        placed = [sorted(row) for row in self.rows]

        def made(name: str, **options: Any) -> tuple[Candidate, Actions]:
            known = {key: value for key, value in options.items() if value}
            try:
                if name in _OF_TORCH:
                    return Candidate(name, count), order_of_torch(name, stages, ranks, count)
                placed_on = ranks if name == "Interleaved1F1B" else None
                return Candidate(name, count, known), build(name, stages, count, ranks=placed_on, **known)
            except (ValueError, AssertionError) as error:  # torch has no error of its own for it
                return Candidate(name, count, known, why_not=str(error) or type(error).__name__), {}

        if placed == [[stage] for stage in range(stages)]:
            for delayed in (False, True):
                yield made("GPipe", delay_weight_grad=delayed)
                yield made("1F1B", delay_weight_grad=delayed)
                if stages > 1:
                    yield made("Eager1F1B", delay_weight_grad=delayed)
                    between = self._warmup(count, times, delayed)
                    if between is not None:
                        yield made("1F1B", warmup=between, delay_weight_grad=delayed)
            yield made("ZBH1")
            yield made("ZBH2")
        elif placed == [list(range(rank, stages, ranks)) for rank in range(ranks)]:
            for delayed in (False, True):
                for warmup in ("1f1b", "eager"):
                    yield made("Interleaved1F1B", warmup=warmup, delay_weight_grad=delayed)
            yield made("LoopedBFS")
            yield made("InterleavedZeroBubble")
        if placed == [[rank, stages - 1 - rank] for rank in range(ranks)]:
            yield made("ZBV")
            yield made("DualPipeV")

    def _warmup(self, count: int, times: Times, delayed: bool) -> list[int] | None:
        """Returns one between 1F1B and Eager1F1B that the budget allows; None where that is one of the two,
        or nothing."""
        stages = len(self.rows)
        limits = [
            count if budget is None or not held else max(1, min(count, int(budget // held)))
            for budget, held in zip(self.budgets, times.held, strict=True)
        ]
        try:
            # The steady state has begun by then, and the search simulates each hop.
            few = min(count, 3 * stages)
            found = best_warmup(stages, few, limits, times.costs(), sorted(times.transfer), delayed)
        except ScheduleError:
            return None
        known = [[stages - stage for stage in range(stages)], [2 * (stages - s) - 1 for s in range(stages)]]
        return None if found in known else found


_STEPS = 2  # that are measured, behind one that is not


@dataclass(slots=True)
class Measured:
    """Measurements of one rank. stages: for each stage seconds by kind of action, and bytes as "held" and
    "between"; links: seconds of each."""

    stages: dict[int, dict[str, float]]
    links: dict[Link, float]


class _OneByOne(PipelineScheduleMulti):
    """Each micro-batch goes forward and backward before the next one begins."""

    def __init__(
        self, stages: list[PipelineStage], count: int, rows: Sequence[Sequence[int]], split: bool, **more: Any
    ) -> None:
        super().__init__(stages, count, **more)
        back = (ActionKind.I, ActionKind.W) if split else (ActionKind.B,)
        order: Actions = {}
        for rank, row in enumerate(rows):
            order[rank] = []
            for number in range(count):
                order[rank] += [Action(stage, ActionKind.F, number) for stage in sorted(row)]
                order[rank] += [
                    Action(stage, kind, number) for stage in sorted(row, reverse=True) for kind in back
                ]
        self.pipeline_order = torch_order(order)


def measured(
    stages: list[PipelineStage],
    pieces: Pieces,
    count: int,
    rows: Sequence[Sequence[int]],
    loss_fn: Callable[..., Any] | None,
    loss_kwargs: Mapping[str, Any] | None,
    **options: Any,
) -> Measured:
    """Measures this rank's stages. Every rank of the pipeline calls it at the same time, inside `as_before`.

    Args:
        pieces: micro-batches of one size, `count` of them; of what this rank's stages take.
        rows: the stages of each rank of the schedule.
        options: of the schedule.
    """
    found = Measured({stage.stage_index: {} for stage in stages}, {})
    times: dict[tuple[ActionKind, int | Link], list[float]] = {}
    for split in (False, True):
        schedule = _OneByOne(stages, count, rows, split, loss_fn=loss_fn, **options)
        try:
            for step in range(1 + _STEPS):
                _step(schedule, pieces, loss_kwargs)
                if step:
                    _read(schedule, times)
            with ExitStack() as looks:
                for stage in stages:
                    numbers = found.stages[stage.stage_index]
                    look = _between(stage, numbers) if split else _held(schedule, stage, numbers)
                    looks.enter_context(look)
                _step(schedule, pieces, loss_kwargs)
        finally:
            schedule.close()
    for (kind, place), seconds in times.items():
        middle = median(seconds)
        if isinstance(place, int):
            found.stages[place][kind.value] = middle
        else:
            found.links[place] = max(found.links.get(place, 0.0), middle)
    for stage in stages:
        if stage.is_whole:  # a difference between I and B is noise
            numbers = found.stages[stage.stage_index]
            numbers |= {"I": numbers["B"], "W": 0.0}
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
    """Reads the trace of the last step."""
    assert schedule._runtime is not None
    for action, begin, end in schedule._runtime.trace.events:
        if not action.kind.is_recv:  # which is the wait for a value
            place: int | Link = action.stage if action.kind.is_compute else link_of(action)
            times.setdefault((action.kind, place), []).append(end - begin)


@contextmanager
def _held(schedule: _OneByOne, stage: PipelineStage, found: dict[str, float]) -> Iterator[None]:
    """Inside, counts the bytes that autograd keeps of a stage's forward of micro-batch 0, and of its outputs.
    Parameters are there anyway, as is the batch, of which the first stage has a view."""
    before = stage._forward_contexts

    @contextmanager
    def context(info: Any) -> Iterator[None]:
        with ExitStack() as stack:
            for make in before.values():  # that of the user
                stack.enter_context(make(info))
            if info.microbatch_index or info.is_metadata_inference:
                yield
                return
            batch = schedule._feeds[stage.stage_index].arguments(0) if stage.is_first else []
            there = _storages(tree_leaves(batch))
            # FSDP2 gathers parameters as it goes, so they are known only when something is kept.
            with kept_bytes(stage.submod, there, parameters_move=stage.accumulates) as sizes:
                yield
            outputs = stage.ways[0].outputs if stage.ways else None
            found["held"] = sum(sizes.values()) + sum(
                torch.Size(shape).numel() * dtype.itemsize for shape, dtype in outputs or ()
            )

    stage._forward_contexts = OrderedDict({0: context})
    try:
        yield
    finally:
        stage._forward_contexts = before


@contextmanager
def kept_bytes(
    module: torch.nn.Module, there: Set[int] = frozenset(), *, parameters_move: bool = False
) -> Iterator[dict[int, int]]:
    """Inside, notes what autograd keeps, {storage: bytes}, except parameters and buffers of the module and
    storages that are `there` anyway."""
    sizes: dict[int, int] = {}

    def of_module() -> set[int]:
        return _storages([*module.parameters(), *module.buffers()])

    own = of_module()

    def pack(value: torch.Tensor) -> torch.Tensor:
        storage = _storage(value)
        if storage._cdata not in (of_module() if parameters_move else own) and storage._cdata not in there:
            sizes[storage._cdata] = storage.nbytes()
        return value.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda value: value):
        yield sizes


def _storages(values: Sequence[Any]) -> set[int]:
    return {_storage(value)._cdata for value in values if isinstance(value, torch.Tensor)}


def _storage(value: torch.Tensor) -> torch.UntypedStorage:
    return local_values(value.detach()).untyped_storage()


@contextmanager
def _between(stage: PipelineStage, found: dict[str, float]) -> Iterator[None]:
    """Inside, counts how many bytes more micro-batch 0 holds between I and W than before: the gradients that
    wait for W, less what I released."""
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
    try:
        yield
    finally:
        del stage.backward_one_chunk, stage.backward_weight_one_chunk


def _held_behind(outputs: Sequence[Any], and_outputs: bool) -> list[tuple[StorageWeakRef, int]]:
    """Returns the storages, with bytes, of what autograd keeps of a forward; and_outputs: and of these."""
    ends = [output for output in outputs if isinstance(output, torch.Tensor)]
    values = [*ends] if and_outputs else []
    for node in children_first(end.grad_fn for end in ends if end.grad_fn is not None):
        values += saved_values(node)
    storages = {storage._cdata: storage for storage in map(_storage, values)}
    return [(StorageWeakRef(storage), storage.nbytes()) for storage in storages.values()]


@contextmanager
def restored(modules: Sequence[torch.nn.Module], device: torch.device) -> Iterator[None]:
    """Afterwards buffers and random state are what they were."""
    buffers = [(each, each.detach().clone()) for module in modules for each in module.buffers()]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        try:
            yield
        finally:
            with torch.no_grad():
                for buffer, value in buffers:
                    buffer.copy_(value)


@contextmanager
def as_before(stages: Sequence[PipelineStage]) -> Iterator[None]:
    """Afterwards gradients, buffers and random state are what they were."""
    for stage in stages:
        stage.free_parameters()
    parameters = [each for stage in stages for each in stage.submod.parameters()]
    gradients = [parameter.grad for parameter in parameters]
    whole = [stage.is_whole for stage in stages]
    for stage in stages:
        stage.is_whole = False  # set by measuring, whose warning is about an order that was not requested
    for parameter in parameters:
        parameter.grad = None
    try:
        with restored([stage.submod for stage in stages], stages[0].device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for stage, known in zip(stages, whole, strict=True):
            stage.free_parameters()
            stage.is_whole = known
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
