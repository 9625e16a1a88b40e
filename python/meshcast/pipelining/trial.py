"""Measures the real stages of this rank: F, B, I and W, transfers, and what a micro-batch holds in memory.

A few micro-batches run through the whole pipeline one after the other, so that nothing else is under way
while something is measured. What a step leaves in the modules is put back.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import ExitStack, contextmanager
from statistics import median
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from meshcast.pipelining._backward import children_first, saved_values
from meshcast.pipelining.action import Action, ActionKind, Link, link_of
from meshcast.pipelining.classes import PipelineScheduleMulti
from meshcast.pipelining.compat import torch_order
from meshcast.pipelining.inference import local_values
from meshcast.pipelining.microbatch import Pieces
from meshcast.pipelining.stage import PipelineStage

__all__ = ["as_before", "kept_bytes", "measured"]

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
