"""Inference of what a stage's module returns, before a step: on fake tensors, else on the values of a
micro-batch that are here, with zeros and ones for those that other stages send.

FSDP2 modules run on fake tensors without their hooks, which would gather fakes and break the module.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from ..base import forks
from ..base.observe import calls_begun
from ..errors import LayoutError
from .compat import mesh_layout
from .gradients import fsdp_groups, fsdp_parts
from .parallel import DataUse, Inferred, LocalValue, SentDTensor, Way, as_tuple

__all__ = [
    "Collectives",
    "can_be_faked",
    "describe_values",
    "fake_state",
    "infer_outputs",
    "is_empty",
    "needs_stand_in",
    "outputs_on_fakes",
    "stand_ins",
    "without_fsdp",
    "without_stand_in",
    "writes_on_input",
]


def describe_values(values: Sequence[torch.Tensor], with_grad: bool) -> list[LocalValue]:
    """Local shapes of tensors or DTensors."""
    described = []
    for value in values:
        placements = sent = None
        local = value
        if isinstance(value, DTensor):
            placements, local = tuple(value.placements), value.to_local()
            names = tuple(value.device_mesh.mesh_dim_names or ())
            sent = SentDTensor(placements, tuple(value.shape), names, mesh_layout(value.device_mesh))
        described.append(
            LocalValue(tuple(local.shape), value.dtype, with_grad and value.requires_grad, placements, sent)
        )
    return described


def can_be_faked(module: torch.nn.Module, *, exactly: bool = True) -> bool:
    """Returns whether the module runs on fake tensors as FSDP2 would run it: with one module for each group
    of parameters. exactly: with the types that FSDP2 computes in too, so without casts."""
    for part in fsdp_parts(module):
        state: Any = part._get_fsdp_state()
        if len(state._modules) > 1:
            return False
        parameters = [each for group in fsdp_groups(part) for each in group.fsdp_params]
        if exactly and any(each.mp_policy.param_dtype is not None for each in parameters):
            return False
    return True


def fake_state(
    module: torch.nn.Module, fake: Callable[[torch.Tensor], torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Parameters and buffers on fake tensors, under the mode that `fake` is of; those of FSDP2 gathered."""
    managed: dict[int, Any] = {
        id(each.sharded_param): each
        for part in fsdp_parts(module)
        for group in fsdp_groups(part)
        for each in group.fsdp_params
    }

    def gathered(value: torch.Tensor) -> torch.Tensor:
        found = managed[id(value)]
        whole = torch.empty(found._orig_size, dtype=value.dtype, device=value.device)
        # Tensor parallelism stays. Releases of torch differ in the name of its layout.
        spec: Any = getattr(found, "_unsharded_dtensor_spec", None) or getattr(found, "_tp_spec", None)
        if spec is not None:
            whole = DTensor.from_local(
                whole, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride
            )
        return whole.requires_grad_(value.requires_grad)

    return {
        name: gathered(value) if id(value) in managed else fake(value)
        for name, value in (*module.named_parameters(), *module.named_buffers())
    }


@contextmanager
def without_fsdp(module: torch.nn.Module) -> Iterator[None]:
    """Inside, the module runs without the hooks that fully_shard registered."""
    before = []
    for part in fsdp_parts(module):
        for hooks in (part._forward_pre_hooks, part._forward_hooks):  # type: ignore[attr-defined]
            before.append((hooks, list(hooks.items())))
            for key in _own_hooks(part, hooks):
                del hooks[key]
    try:
        yield
    finally:
        for hooks, items in before:
            hooks.clear()
            hooks.update(items)


def _own_hooks(part: FSDPModule, hooks: Any) -> list[int]:
    state = part._get_fsdp_state()
    return [key for key, hook in hooks.items() if getattr(hook, "__self__", None) is state]


def is_empty(values: Any) -> bool:
    """Returns whether a tensor among the values has no samples. DTensors have those of all ranks."""
    return any(map(_has_none, tree_flatten(values)[0]))


def stand_ins(values: Any, rows: int) -> Any:
    """The same values, but tensors without samples have `rows` of ones instead."""

    def fill(value: torch.Tensor) -> torch.Tensor:
        if not _has_none(value):
            return value
        return value.new_ones((rows, *value.shape[1:])).requires_grad_(value.requires_grad)

    return tree_map_only(torch.Tensor, fill, values)


def infer_outputs(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    with_grad: bool,
    what: str,
    everywhere_empty: bool = False,
    peers: Sequence[int] = (),
    data: DataUse = "if needed",
    real: bool = False,
    again: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
) -> Inferred:
    """Runs `module` on fake tensors of the shapes of `args`: no data, no arithmetic, no change of buffers or
    random state. Where that fails, and under FSDP2 with casts, it runs on values, as
    torch.distributed.pipelining does: on those of a micro-batch that this rank has, and on zeros and on ones
    in place of those that come from other stages; buffers and random state are put back.

    Args:
        everywhere_empty: no rank has samples of this micro-batch. Shapes then follow from those of one and of
            two samples.
        data: whether it may run on values. On these it communicates, so all ranks of a stage do so equally
            often or none: "alone", which ends where it begins to communicate, until all of them know that one
            has to, then "always".
        peers: see `needs_stand_in`.
        real: `args` have the values of a micro-batch, as `kwargs` always do; else only its shapes.
        again: arguments of another micro-batch of these shapes, which must give the same shapes.

    Raises:
        LayoutError: with the cause, for a module that runs on neither, or whose shapes depend on its data;
            also as `needs_stand_in`.
    """
    plain = getattr(module, "_orig_mod", module)  # below torch.compile
    faked = can_be_faked(plain)
    trained = with_grad and _trains(plain, args)

    def run(
        given: Sequence[Any], named: Mapping[str, Any], more: tuple[Sequence[Any], Mapping[str, Any]] | None
    ) -> Inferred:
        cause: Exception | None = None
        for copies in (False, True) if faked else ():
            try:
                found = _on_fakes(plain, given, named, with_grad, copies, what)
                if data != "always":
                    return found
                break
            except LayoutError:
                raise
            except Exception as error:
                cause = error
                if not writes_on_input(error):
                    break
        trials = _trials(given, named, real, more)
        seen = Collectives((), True)
        try:
            if data != "alone":
                outputs = _on_data(plain, trials, trained, what, real)
            elif any(True for _ in fsdp_parts(plain)):
                return Inferred(None, needs_data=True)
            else:
                with forks.no_calls() as refused, seen:
                    outputs = _on_data(plain, trials, trained, what, real)
        except Exception as error:
            if seen.found or (data == "alone" and refused):
                return Inferred(None, needs_data=True)
            if isinstance(error, LayoutError):
                raise
            raise _refusal(what, cause or error, error, real) from (cause or error)
        if seen.found:  # and the module took the error for another
            return Inferred(None, needs_data=True)
        # Copies: without gradients it does not show whether the module writes on its inputs.
        return Inferred(outputs, copies=True)

    if not is_empty((args, kwargs)):
        return run(args, kwargs, again)
    # Whether it cannot run without samples shows on fakes alone; else it is run without.
    stand_in = needs_stand_in(plain, args, kwargs, with_grad=with_grad, peers=peers, what=what, real=real)
    if faked and not stand_in and data != "always":
        try:
            return _on_fakes(plain, args, kwargs, with_grad, False, what)
        except Exception:  # it needs data
            pass
    found = []
    for rows in (1, 2) if everywhere_empty else (1,):
        (given, named), more = stand_ins(((args, dict(kwargs)), again), rows)
        found.append(run(given, named, more))
    copies = found[0].copies
    if any(each.needs_data for each in found):
        return Inferred(None, stand_in, needs_data=True)
    if not everywhere_empty:
        return Inferred(None, stand_in, copies)
    one, two = (each.outputs for each in found)
    assert one is not None and two is not None
    outputs = [
        replace(first, shape=tuple(2 * a - b for a, b in zip(first.shape, second.shape, strict=True)))
        for first, second in zip(one, two, strict=True)
    ]
    return Inferred(outputs, stand_in, copies)


def needs_stand_in(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    with_grad: bool,
    peers: Sequence[int],
    what: str,
    real: bool = False,
) -> bool:
    """Returns whether a module runs with a fake sample, but not without any: on fake tensors, or, where these
    do not show it (and without FSDP2, which communicates), on values, as `infer_outputs` does.

    peers: the ranks that have the same samples. Raises LayoutError if the module communicates with others:
    the fake sample would be taken for one of the batch.
    """
    plain = getattr(module, "_orig_mod", module)

    def on_fakes(given: Sequence[Any], named: Mapping[str, Any]) -> None:
        try:
            _fake_outputs(plain, given, named, with_grad, False)
        except Exception as error:
            if not writes_on_input(error):
                raise
            _fake_outputs(plain, given, named, with_grad, True)

    def on_data(given: Sequence[Any], named: Mapping[str, Any]) -> None:
        values, by_name = _trials(given, named, real, None)[-1]
        with _unchanged(plain):
            plain(*values, **by_name)

    # A collective on fakes reaches nobody; a real one would, and is stopped.
    attempts = [(on_fakes, False)] if can_be_faked(plain, exactly=False) else []
    if not any(True for _ in fsdp_parts(plain)):
        attempts.append((on_data, True))
    filled, named = stand_ins((tuple(args), dict(kwargs)), 1)
    for attempt, stops in attempts:
        if _outcome(attempt, args, kwargs, peers, stops=stops) != "fails":
            return False
        outcome = _outcome(attempt, filled, named, peers, stops=stops)
        if outcome == "communicates":
            raise LayoutError(
                f"{what}: this rank has no samples of a micro-batch, the module does not run without, and it "
                "communicates with ranks that have some, which would take a fake sample for one of the "
                "batch: let it run on an empty batch, or give more samples than there are ranks"
            )
        if outcome == "runs":
            return True
    return False


def _outcome(
    run: Callable[[Sequence[Any], Mapping[str, Any]], None],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    peers: Sequence[int],
    *,
    stops: bool,
) -> str:
    """ "runs", "fails", or "communicates": with others than the peers, stopped there if need be."""
    seen = Collectives(peers, stops)
    try:
        with seen:
            run(args, kwargs)
    except Exception:
        return "communicates" if stops and seen.found else "fails"
    return "communicates" if seen.found else "runs"


class Collectives(TorchDispatchMode):
    """Looks for collectives over other ranks than `peers`, but for those of FSDP2, which are of parameters.
    stops: raises where one begins. A call of meshcast counts as well, whatever its ranks."""

    supports_higher_order_operators = True

    def __init__(self, peers: Sequence[int], stops: bool) -> None:
        super().__init__()
        self._peers, self._stops = set(peers), stops
        self._collective, self._calls = False, calls_begun()

    @property
    def found(self) -> bool:
        return self._collective or calls_begun() != self._calls

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if getattr(func, "namespace", "") in ("_c10d_functional", "c10d"):
            for each in args:
                ranks: list[int] = []
                with suppress(Exception):  # neither a group nor the name of one
                    named: Any = each
                    boxed = isinstance(each, torch.ScriptObject)
                    group = dist.ProcessGroup.unbox(each) if boxed else c10d._resolve_process_group(named)
                    ranks = dist.get_process_group_ranks(group)
                if not self._peers.issuperset(ranks) and not _under_fsdp():
                    self._collective = True
                    if self._stops:
                        raise RuntimeError(f"a collective over ranks {ranks}")
        return func(*args, **(kwargs or {}))


def _under_fsdp() -> bool:
    """Returns whether FSDP2 is among the callers."""
    frame: Any = sys._getframe(2)
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed.fsdp._fully_shard._fsdp_coll"):
            return True
        frame = frame.f_back
    return False


def without_stand_in(output: Any, way: Way) -> Any:
    """The outputs of a module that ran on `stand_ins`, as of no samples, still joined to what made them."""
    if way.outputs is None:  # of the last stage nobody knows the shapes: the fake sample is the first row
        return tree_map_only(
            torch.Tensor, lambda value: value[:0] if value.dim() and value.shape[0] == 1 else value, output
        )
    values = []
    for index, (value, (shape, _)) in enumerate(zip(as_tuple(output, "outputs"), way.outputs, strict=False)):
        cut = value if tuple(value.shape) == shape else value[tuple(slice(size) for size in shape)]
        values.append(cut * 0 if index in way.sums else cut)  # no samples add nothing
    return values[0] if isinstance(output, torch.Tensor) else tuple(values)


def writes_on_input(error: Exception) -> bool:
    """Returns whether a module failed because it wrote on a leaf of autograd in place: it needs copies."""
    return isinstance(error, RuntimeError) and "leaf Variable that requires grad" in str(error)


def outputs_on_fakes(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], *, with_grad: bool
) -> Any:
    """The outputs of a module on fake tensors; None where it does not run on them."""
    plain = getattr(module, "_orig_mod", module)
    for copies in (False, True) if can_be_faked(plain) else ():
        try:
            return _fake_outputs(plain, args, kwargs, with_grad, copies)[0]
        except Exception as error:
            if not writes_on_input(error):
                break
    return None


def _has_none(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and not isinstance(value, DTensor)
        and value.dim() > 0
        and value.shape[0] == 0
    )


def _trains(module: torch.nn.Module, args: Sequence[Any]) -> bool:
    tensors = [*module.parameters(), *(each for each in args if isinstance(each, torch.Tensor))]
    return any(tensor.requires_grad for tensor in tensors)


def _on_fakes(
    module: torch.nn.Module,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    with_grad: bool,
    copies: bool,
    what: str,
) -> Inferred:
    outputs, written = _fake_outputs(module, args, kwargs, with_grad, copies)
    return Inferred(describe_values(as_tuple(outputs, what), with_grad), copies=copies or written)


def _fake_outputs(
    module: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], with_grad: bool, copies: bool
) -> tuple[Any, bool]:
    """The outputs of the module on fake tensors, and whether it wrote on its inputs."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.func import functional_call

    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.set_grad_enabled(with_grad):
        fake = mode.from_tensor
        state = fake_state(module, fake)
        fake_args, fake_kwargs = tree_map_only(torch.Tensor, fake, (tuple(args), dict(kwargs)))
        if copies:
            fake_args = tree_map_only(torch.Tensor, torch.clone, fake_args)
        given = [value for value in tree_flatten(fake_args)[0] if isinstance(value, torch.Tensor)]
        before = [value._version for value in given]
        with without_fsdp(module):
            outputs = functional_call(module, state, fake_args, fake_kwargs)
        return outputs, before != [value._version for value in given]


# Arguments that a module can be run with, positional and by name.
_Trial = tuple[tuple[Any, ...], dict[str, Any]]


def _trials(
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    real: bool,
    again: tuple[Sequence[Any], Mapping[str, Any]] | None,
) -> list[_Trial]:
    """Returns what to run a module on: see `infer_outputs`. All tensors are copies, on which it may write."""

    def copied(values: Any) -> Any:
        return tree_map_only(torch.Tensor, lambda value: value.detach().clone(), values)

    def filled(fill: Callable[..., torch.Tensor]) -> Any:
        def made(value: torch.Tensor) -> torch.Tensor:
            # A mask of zeros would hide everything.
            return torch.ones_like(value) if value.dtype == torch.bool else fill(value.detach())

        return tree_map_only(torch.Tensor, made, tuple(args))

    other_args, other_kwargs = (args, kwargs) if again is None else again
    if not real:
        return [
            (filled(torch.zeros_like), copied(dict(kwargs))),
            (filled(torch.ones_like), copied(dict(other_kwargs))),
        ]
    found = [(copied(tuple(args)), copied(dict(kwargs)))]
    return found if again is None else [*found, (copied(tuple(other_args)), copied(dict(other_kwargs)))]


def _on_data(
    module: torch.nn.Module, trials: Sequence[_Trial], trained: bool, what: str, real: bool
) -> list[LocalValue]:
    found = []
    for given, named in trials:
        with _unchanged(module):
            outputs = module(*given, **named)
        described = describe_values(as_tuple(outputs, what), False)
        found.append(
            [replace(each, requires_grad=trained and each.dtype.is_floating_point) for each in described]
        )
    first, last = found[0], found[-1]
    if first != last:
        kinds = ("of one micro-batch", "of another") if real else ("of zeros", "of ones")
        raise LayoutError(
            f"{what}: the shapes of its outputs depend on its data: {[each.shape for each in first]} "
            f"{kinds[0]}, {[each.shape for each in last]} {kinds[1]}. What leaves a stage has one shape for "
            "all micro-batches of a size: pad it; or give output_args= if real data always have one shape"
        )
    return first


@contextmanager
def _unchanged(module: torch.nn.Module) -> Iterator[None]:
    """Afterwards buffers, random state and FSDP2's sharding are as before."""
    buffers = [(buffer, buffer.clone()) for buffer in module.buffers()]
    devices = {tensor.device for tensor in (*module.parameters(), *module.buffers())}
    gpus = [device.index for device in devices if device.type == "cuda"]
    try:
        with torch.random.fork_rng(devices=gpus), torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for buffer, before in buffers:
                buffer.copy_(before)
        for part in module.modules():
            if isinstance(part, FSDPModule):
                part.reshard()


def _refusal(what: str, fake: Exception, real: Exception, on_batch: bool) -> LayoutError:
    values = "its micro-batch" if on_batch else "zeros"
    also = "" if fake is real else f"; on {values} {type(real).__name__}: {real}"
    return LayoutError(
        f"{what}: its output shapes could not be inferred ({type(fake).__name__}: {fake}{also}). Mend the "
        "module, or, if only fake values are at fault, give output_args= with tensors (meta device will "
        "do) of the local shapes of one micro-batch"
    )
