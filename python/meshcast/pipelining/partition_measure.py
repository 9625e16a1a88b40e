"""Measures a module for `partition`: times and bytes of its layers, and what crosses between them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass, field, replace
from fnmatch import fnmatch
from statistics import median
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel
from torch.utils._pytree import tree_flatten, tree_map_only

from meshcast.errors import LayoutError
from meshcast.pipelining.partition_layers import Layer, Value
from meshcast.pipelining.trial import kept_bytes

__all__ = ["measured_layers"]

_ROUNDS = 5  # behind one that is not counted
_CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict)


@dataclass(slots=True)
class _Call:
    """The model's call of a layer. Inputs and outputs are kept, so that no other tensor gets their place."""

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    outputs: list[torch.Tensor] = field(default_factory=list)

    def inputs(self) -> list[torch.Tensor]:
        return _tensors((self.args, self.kwargs))


def measured_layers(
    model: nn.Module,
    example: tuple[Any, ...],
    names: Sequence[str] | None,
    degrees: Sequence[int],
    plan: Mapping[str, ParallelStyle],
) -> list[Layer]:
    """The layers of the model in the order in which it calls them.

    The model runs once, and copies of its layers run with the inputs that these had. Buffers, gradients and
    random state of the model stay.

    Args:
        example: the arguments of a micro-batch.
        names: of the submodules that are layers; None: the children, those of containers instead of these.
        degrees: tensor-parallel degrees to measure, of at least 2.
        plan: {name of a submodule, "*" for any part: ColwiseParallel() or RowwiseParallel()}.

    Raises:
        LayoutError: names, degrees or plans that do not fit; layers that are not called once.
    """
    calls = _called(model, example, names)
    owned = {id(each) for call in calls for each in call.module.parameters()}
    left = [name for name, each in model.named_parameters() if id(each) not in owned]
    if left:
        raise LayoutError(f"partition: parameter {left[0]} belongs to no layer: name its module in layers=")
    for pattern, style in plan.items():
        if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
            raise LayoutError(
                f"partition: tensor_plan has {type(style).__name__} for {pattern!r}; it can measure "
                "ColwiseParallel and RowwiseParallel"
            )
        if not any(_planned(call, {pattern: style}) for call in calls):
            raise LayoutError(
                f"partition: tensor_plan has {pattern!r}, which no submodule of a layer is called"
            )
    values = _values(calls)
    found = []
    for call, made in zip(calls, values, strict=True):
        whole = _measured(call, call.module, {})
        shared = {degree: _shared(call, plan, degree) for degree in degrees if _planned(call, plan)}
        found.append(replace(whole, values=made, tensor=shared, name=call.name))
    return found


def _called(model: nn.Module, example: tuple[Any, ...], names: Sequence[str] | None) -> list[_Call]:
    """Runs the model once."""
    modules = (
        dict(_children(model, "")) if names is None else {name: _submodule(model, name) for name in names}
    )
    if not modules:
        raise LayoutError(f"partition: {type(model).__name__} has no submodules to cut between")
    calls: list[_Call] = []

    def before(name: str) -> Callable[..., None]:
        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            calls.append(_Call(name, module, args, kwargs))

        return note

    def after(_module: nn.Module, _args: Any, _kwargs: Any, output: Any) -> None:
        calls[-1].outputs = _tensors(output)

    with _as_before(model), ExitStack() as hooks:
        for name, module in modules.items():
            for handle in (
                module.register_forward_pre_hook(before(name), with_kwargs=True),
                module.register_forward_hook(after, with_kwargs=True),
            ):
                hooks.callback(handle.remove)
        with torch.enable_grad():
            model(*example)
    called = [call.name for call in calls]
    for name in modules:
        if called.count(name) != 1:
            raise LayoutError(
                f"partition: the model calls layer {name} {called.count(name)} times, and a layer is called "
                "once: name other layers in layers="
            )
    return calls


def _children(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    for name, child in module.named_children():
        if isinstance(child, _CONTAINERS):
            yield from _children(child, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", child


def _submodule(model: nn.Module, name: str) -> nn.Module:
    try:
        return model.get_submodule(name)
    except AttributeError:
        raise LayoutError(f"partition: the model has no submodule {name!r}, which layers= names") from None


@contextmanager
def _as_before(model: nn.Module) -> Iterator[None]:
    """Afterwards buffers and random state are what they were."""
    buffers = [(each, each.detach().clone()) for each in model.buffers()]
    with torch.random.fork_rng(enabled=True):
        yield
    with torch.no_grad():
        for buffer, value in buffers:
            buffer.copy_(value)


def _values(calls: Sequence[_Call]) -> list[tuple[Value, ...]]:
    """The values that each layer makes for later ones. What the model itself computes between two layers
    counts as a part of the first of them, since a stage would do it there."""
    first_known: dict[int, int] = {}
    made: list[dict[int, tuple[torch.Tensor, list[int]]]] = [{} for _ in calls]
    for index, call in enumerate(calls):
        for value in call.inputs():
            maker = first_known.setdefault(id(value), max(0, index - 1))
            if maker < index:
                _, users = made[maker].setdefault(id(value), (value, []))
                users.append(index)
        for value in call.outputs:
            first_known.setdefault(id(value), index)
    return [
        tuple(
            Value(tuple(value.shape), value.dtype, tuple(sorted(set(users))))
            for value, users in each.values()
        )
        for each in made
    ]


# ---- a layer -------------------------------------------------------------------------------------------


def _measured(call: _Call, module: nn.Module, sums: Mapping[str, list[int]]) -> Layer:
    """sums: "forward" and "backward", which the module fills as it runs."""
    module = deepcopy(module)
    device = next((each.device for each in (*module.parameters(), *call.inputs())), torch.device("cpu"))
    times: dict[str, list[float]] = {"forward": [], "backward": [], "inputs": []}
    held = 0
    with torch.random.fork_rng(enabled=True), torch.enable_grad():
        for count in range(1 + _ROUNDS):
            args, kwargs = tree_map_only(torch.Tensor, _fresh, (call.args, call.kwargs))
            with kept_bytes(module) as sizes:
                begin = _now(device)
                made = _tensors(module(*args, **kwargs))
                forward = _now(device) - begin
            held = sum(sizes.values())
            seeds = [torch.ones_like(each) for each in made if each.requires_grad]
            starts = [each for each in made if each.requires_grad]
            given = [each for each in _tensors((args, kwargs)) if each.requires_grad]
            trained = [each for each in module.parameters() if each.requires_grad]
            inputs = _backward(starts, given, seeds, device, keep=True)
            backward = _backward(starts, [*given, *trained], seeds, device, keep=False)
            if count:
                for name, seconds in (("forward", forward), ("backward", backward), ("inputs", inputs)):
                    times[name].append(seconds)
    middle = {name: median(each) for name, each in times.items()}
    return Layer(
        middle["forward"],
        middle["backward"],
        inputs=min(middle["inputs"], middle["backward"]),
        parameters=sum(each.nbytes for each in trained),
        held=held,
        sums_forward=tuple(sums.get("forward", ())),
        sums_backward=tuple(sums.get("backward", ())),
    )


def _backward(
    starts: list[torch.Tensor],
    ends: list[torch.Tensor],
    seeds: list[torch.Tensor],
    device: torch.device,
    *,
    keep: bool,
) -> float:
    """Seconds of the gradients of `ends`."""
    if not starts or not ends:
        return 0.0
    begin = _now(device)
    torch.autograd.grad(starts, ends, seeds, retain_graph=keep, allow_unused=True)
    return _now(device) - begin


def _fresh(value: torch.Tensor) -> torch.Tensor:
    return value.detach().clone().requires_grad_(value.requires_grad)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _tensors(values: Any) -> list[torch.Tensor]:
    return [each for each in tree_flatten(values)[0] if isinstance(each, torch.Tensor)]


# ---- tensor parallelism --------------------------------------------------------------------------------


def _shared(call: _Call, plan: Mapping[str, ParallelStyle], degree: int) -> Layer:
    """The layer as the first of `degree` ranks has it."""
    module = deepcopy(call.module)
    sums: dict[str, list[int]] = {"forward": [], "backward": []}
    cut = _planned(replace(call, module=module), plan)
    for name, (linear, style) in cut.items():
        _keep_first_part(linear, isinstance(style, ColwiseParallel), degree, name)
    try:
        _count_sums(call, module, cut, sums)
        return _measured(call, module, sums)
    except Exception as error:
        raise LayoutError(
            f"partition: layer {call.name} does not run as one of {degree} tensor-parallel ranks has it: "
            f"{error}; leave {degree} out of tensor=, or change tensor_plan="
        ) from error


def _planned(call: _Call, plan: Mapping[str, ParallelStyle]) -> dict[str, tuple[nn.Module, ParallelStyle]]:
    """{name in the model: (module, its style)} of what the plan names in a layer. "*" is a part of a name."""
    found = {}
    for own, module in call.module.named_modules():
        name = f"{call.name}.{own}" if own else call.name
        parts = name.split(".")
        for pattern, style in plan.items():
            wanted = pattern.split(".")
            if len(wanted) == len(parts) and all(map(fnmatch, parts, wanted)):
                found[name] = (module, style)
    return found


def _keep_first_part(module: nn.Module, by_outputs: bool, degree: int, name: str) -> None:
    if not isinstance(module, nn.Linear):
        raise LayoutError(
            f"partition: tensor_plan names {name}, a {type(module).__name__}; it can measure torch.nn.Linear"
        )
    dim = 0 if by_outputs else 1
    part = module.weight.shape[dim] // degree
    if part * degree != module.weight.shape[dim]:
        raise LayoutError(
            f"partition: {degree} tensor-parallel ranks do not divide the {module.weight.shape[dim]} "
            f"{('inputs', 'outputs')[by_outputs]} of {name}: leave {degree} out of tensor="
        )
    with torch.no_grad():
        trained = module.weight.requires_grad
        module.weight = nn.Parameter(module.weight.narrow(dim, 0, part).clone(), trained)
        if by_outputs and module.bias is not None:
            module.bias = nn.Parameter(module.bias[:part].clone(), module.bias.requires_grad)


def _count_sums(
    call: _Call,
    module: nn.Module,
    cut: Mapping[str, tuple[nn.Module, ParallelStyle]],
    sums: dict[str, list[int]],
) -> None:
    """One run of the layer: outputs of row-wise modules are summed in the forward, gradients of inputs of
    column-wise ones in the backward."""
    with ExitStack() as hooks:
        for linear, style in cut.values():
            by_outputs = isinstance(style, ColwiseParallel)

            def note(_module: Any, args: Any, output: torch.Tensor, by_outputs: bool = by_outputs) -> None:
                if by_outputs:
                    sums["backward"] += [args[0].nbytes] if args[0].requires_grad else []
                else:
                    sums["forward"].append(output.nbytes)

            hooks.callback(linear.register_forward_hook(note).remove)
        with torch.random.fork_rng(enabled=True):
            args, kwargs = tree_map_only(torch.Tensor, _fresh, (call.args, call.kwargs))
            module(*args, **kwargs)
