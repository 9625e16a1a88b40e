"""Inference of what a stage's module returns, before a step: on fake tensors, else on the values of a
micro-batch that are here, with zeros and ones for those that other stages send.

FSDP2 modules run on fake tensors without their hooks, which would gather fakes and break the module.
"""

from __future__ import annotations

import inspect
import logging
import sys
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map_only

from ..base import forks
from ..base.observe import calls_begun
from ..errors import LayoutError
from .compat import mesh_layout
from .data_parallel import fsdp_groups, fsdp_parts
from .parallel import DataUse, Inferred, LocalValue, SentDTensor, Way, as_tuple, rows_of

__all__ = [
    "Collectives",
    "Examples",
    "Probe",
    "buffers_kept",
    "check_call",
    "is_empty",
    "stand_ins",
    "without_stand_in",
    "writes_on_input",
]

Given = tuple[Sequence[Any], Mapping[str, Any]]  # positional and keyword arguments of a module


@dataclass(slots=True)
class Examples:
    """The examples of a stage's local outputs that its user gave, of so many samples: those of the example of
    its inputs, or without such those of its first micro-batch."""

    values: Sequence[torch.Tensor]
    rows: int | None

    def of(self, rows: int | None, what: str) -> list[torch.Tensor]:
        """Returns the examples for a micro-batch with so many samples on this rank. Raises LayoutError where
        these do not determine them."""
        if rows == self.rows:
            return list(self.values)
        found = []
        for value in self.values:
            if not self.rows or rows is None or value.dim() == 0 or value.shape[0] % self.rows:
                raise LayoutError(
                    f"{what}: output_args is of {self.rows} samples, which does not determine the shapes of "
                    f"{rows}: dimension 0 of {tuple(value.shape)} is no multiple"
                )
            size = value.shape[0] // self.rows * rows
            found.append(torch.empty((size, *value.shape[1:]), dtype=value.dtype, device="meta"))
        return found


@dataclass(slots=True)
class Probe:
    """Finds what a module returns for micro-batches of some shape, and how it has to be run for them.

    It runs on fake tensors: no data, no arithmetic, no change of buffers or random state. Where that fails,
    and under FSDP2 with casts, it runs on values, as torch.distributed.pipelining does: on those of a
    micro-batch that this rank has, and on zeros and on ones instead of those that come from other stages;
    buffers and random state are put back.

    Attributes:
        what: names the stage in errors.
        with_grad: the step trains.
        peers: the ranks that have the same samples.
        real: positional arguments have the values of a micro-batch, as the others always do; else only its
            shapes.
    """

    module: Any
    what: str
    with_grad: bool
    peers: Sequence[int] = ()
    real: bool = False

    def __post_init__(self) -> None:
        self.module = getattr(self.module, "_orig_mod", self.module)  # below torch.compile

    def last(self, given: Given, *, outputs: bool) -> Inferred:
        """Returns the way the last stage runs, whose outputs matter to the loss function alone. outputs: they
        are looked at, where the module runs on fake tensors."""
        stand_in = is_empty(given) and self.needs_stand_in(given)
        found = None
        if outputs and self._can_be_faked():
            with suppress(Exception):
                found, _ = self._on_fakes(given)
        tensors = [each for each in tree_flatten(found)[0] if isinstance(each, torch.Tensor)]
        return Inferred(_described(tensors, self.with_grad), stand_in)

    def with_examples(
        self, given: Given, examples: Examples | None, data: DataUse, **options: Any
    ) -> Inferred:
        """Returns `outputs`, or, where the module does not determine them, those of the examples, if any."""
        if examples is None:
            return self.outputs(given, data=data, **options)
        found, rows = None, rows_of(given[0])
        if examples.rows is None:
            examples.rows = rows
        if rows != examples.rows or data == "always":
            with suppress(LayoutError):
                found = self.outputs(given, data=data, **options)
            if found is not None and not found.needs_data:
                return found
        stand_in = is_empty(given) and self.needs_stand_in(given)
        try:
            values = examples.of(rows, self.what)
        except LayoutError:
            if found is None:
                raise
            return found  # which needs data
        trained = [
            value.detach().requires_grad_(self.with_grad and value.is_floating_point()) for value in values
        ]
        return Inferred(_described(trained, self.with_grad), stand_in)

    def outputs(
        self,
        given: Given,
        *,
        everywhere_empty: bool = False,
        data: DataUse = "if needed",
        again: Given | None = None,
    ) -> Inferred:
        """Returns the local shapes of the outputs.

        Args:
            everywhere_empty: no rank has samples of this micro-batch. Shapes then follow from those of one
                and of two samples.
            data: whether it may run on values. On these it communicates, so all ranks of a stage do so
                equally often or none: "alone", which ends where it begins to communicate, until all of them
                know that one has to, then "always".
            again: arguments of another micro-batch of these shapes, which must give the same shapes.

        Raises:
            LayoutError: with the cause, for a module that runs on neither, or whose shapes depend on its
                data; also as `needs_stand_in`.
        """
        trained = self.with_grad and _trains(self.module, given[0])
        if not is_empty(given):
            return self._outputs(given, again, data, trained)
        # Only fakes show that it cannot run without samples; else it is run without.
        stand_in = self.needs_stand_in(given)
        if self._can_be_faked() and not stand_in and data != "always":
            with suppress(Exception):  # it needs data
                outputs, written = self._on_fakes(given, retry=False)
                return Inferred(_described(as_tuple(outputs, self.what), self.with_grad), copies=written)
        found = []
        for rows in (1, 2) if everywhere_empty else (1,):
            filled, more = stand_ins((given, again), rows)
            found.append(self._outputs(filled, more, data, trained))
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

    def needs_stand_in(self, given: Given) -> bool:
        """Returns whether the module runs with a fake sample, but not without any: on fake tensors, or, where
        these do not show it (and without FSDP2, which communicates), on values.

        Raises LayoutError if it communicates with others than the peers: the fake sample would count as one
        of the batch.
        """
        # A collective on fakes reaches no other rank; a real one would, and is stopped.
        attempts: list[tuple[Callable[[Given], Any], bool]] = []
        if self._can_be_faked(exactly=False):
            attempts.append((self._on_fakes, False))
        if not any(True for _ in fsdp_parts(self.module)):
            attempts.append((lambda given: self._run_on(self._trials(given, None)[-1]), True))
        filled = stand_ins(given, 1)
        for attempt, stops in attempts:
            if self._outcome(attempt, given, stops) != "fails":
                return False
            outcome = self._outcome(attempt, filled, stops)
            if outcome == "communicates":
                raise LayoutError(
                    f"{self.what}: this rank has no samples of a micro-batch, the module does not run "
                    "without, and it communicates with ranks that have some, which would take a fake sample "
                    "for one of the batch: let it run on an empty batch, or give more samples than there are "
                    "ranks"
                )
            if outcome == "runs":
                return True
        return False

    def _outcome(self, run: Callable[[Given], Any], given: Given, stops: bool) -> str:
        """ "runs", "fails", or "communicates": with others than the peers, stopped there if need be."""
        seen = Collectives(self.peers, stops)
        try:
            with seen:
                run(given)
        except Exception:
            return "communicates" if stops and seen.found else "fails"
        return "communicates" if seen.found else "runs"

    def _outputs(self, given: Given, again: Given | None, data: DataUse, trained: bool) -> Inferred:
        """`outputs` for arguments with samples."""
        cause: Exception | None = None
        if self._can_be_faked():
            try:
                outputs, written = self._on_fakes(given)
                described = _described(as_tuple(outputs, self.what), self.with_grad)
                if data != "always":
                    return Inferred(described, copies=written)
            except LayoutError:
                raise
            except Exception as error:
                cause = error
        alone = data == "alone"
        if alone and any(True for _ in fsdp_parts(self.module)):
            return Inferred(None, needs_data=True)
        seen, refused = Collectives((), stops=True), list[bool]()
        try:
            with ExitStack() as stack:
                if alone:
                    refused = stack.enter_context(forks.no_calls())
                    stack.enter_context(seen)
                found = self._on_data(self._trials(given, again), trained)
        except Exception as error:
            if alone and (seen.found or refused):
                return Inferred(None, needs_data=True)
            if isinstance(error, LayoutError):
                raise
            # Without tracebacks: those of fake tensors are long, and show little of the module.
            raise self._refusal(cause or error, error) from None
        if alone and seen.found:  # and the module took the error for another
            return Inferred(None, needs_data=True)
        # Copies: without gradients it does not show whether the module writes on its inputs.
        return Inferred(found, copies=True)

    # ---- on fake tensors ---------------------------------------------------------------------------------

    def _can_be_faked(self, *, exactly: bool = True) -> bool:
        """Returns whether the module runs on fake tensors as FSDP2 would run it: with one module for each
        group of parameters. exactly: with the types that FSDP2 computes in too, so without casts."""
        for part in fsdp_parts(self.module):
            state: Any = part._get_fsdp_state()
            if len(state._modules) > 1:
                return False
            parameters = [each for group in fsdp_groups(part) for each in group.fsdp_params]
            if exactly and any(each.mp_policy.param_dtype is not None for each in parameters):
                return False
        return True

    def _on_fakes(self, given: Given, *, retry: bool = True) -> tuple[Any, bool]:
        """Returns the outputs on fake tensors, and whether the module writes on its inputs. retry: on copies
        of them, where it may not."""
        try:
            return self._run_fake(given, copies=False)
        except Exception as error:
            if not (retry and writes_on_input(error)):
                raise
        return self._run_fake(given, copies=True)[0], True

    def _run_fake(self, given: Given, *, copies: bool) -> tuple[Any, bool]:
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.func import functional_call

        fakes = FakeTensorMode(allow_non_fake_inputs=True)
        with _without_log(), fakes as mode, torch.set_grad_enabled(self.with_grad):
            state = _fake_state(self.module, mode.from_tensor)
            args, kwargs = tree_map_only(torch.Tensor, mode.from_tensor, (tuple(given[0]), dict(given[1])))
            if copies:
                args = tree_map_only(torch.Tensor, torch.clone, args)
            tensors = [value for value in tree_flatten(args)[0] if isinstance(value, torch.Tensor)]
            before = [value._version for value in tensors]
            with _without_fsdp(self.module):
                outputs = functional_call(self.module, state, args, kwargs)
            return outputs, before != [value._version for value in tensors]

    # ---- on values ---------------------------------------------------------------------------------------

    def _trials(self, given: Given, again: Given | None) -> list[Given]:
        """Returns the arguments to run the module on. All tensors are copies, on which it may write."""

        def copied(values: Any) -> Any:
            return tree_map_only(torch.Tensor, lambda value: value.detach().clone(), values)

        def filled(fill: Callable[..., torch.Tensor]) -> Any:
            def made(value: torch.Tensor) -> torch.Tensor:
                # A mask of zeros would hide everything.
                return torch.ones_like(value) if value.dtype == torch.bool else fill(value.detach())

            return tree_map_only(torch.Tensor, made, tuple(given[0]))

        if self.real:
            both = [given] if again is None else [given, again]
            return [(copied(tuple(args)), copied(dict(kwargs))) for args, kwargs in both]
        first, second = given[1], (given if again is None else again)[1]
        return [
            (filled(torch.zeros_like), copied(dict(first))),
            (filled(torch.ones_like), copied(dict(second))),
        ]

    def _run_on(self, trial: Given) -> Any:
        with _unchanged(self.module):
            return self.module(*trial[0], **trial[1])

    def _on_data(self, trials: Sequence[Given], trained: bool) -> list[LocalValue]:
        found = []
        for trial in trials:
            described = _described(as_tuple(self._run_on(trial), self.what), False)
            found.append(
                [replace(each, requires_grad=trained and each.dtype.is_floating_point) for each in described]
            )
        first, last = found[0], found[-1]
        if first != last:
            kinds = ("of one micro-batch", "of another") if self.real else ("of zeros", "of ones")
            raise LayoutError(
                f"{self.what}: the shapes of its outputs depend on its data: "
                f"{[each.shape for each in first]} {kinds[0]}, {[each.shape for each in last]} {kinds[1]}. "
                "The outputs of a stage have one shape for all micro-batches of a size: pad them; or give "
                "output_args= if real data always have one shape"
            )
        return first

    def _refusal(self, fake: Exception, real: Exception) -> LayoutError:
        values = "its micro-batch" if self.real else "zeros"
        shown, real_shown = (str(error).rstrip(".") for error in (fake, real))
        also = "" if fake is real else f"; on {values} {type(real).__name__}: {real_shown}"
        place = _place_of(fake)
        return LayoutError(
            f"{self.what}: its output shapes could not be inferred ({type(fake).__name__}: "
            f"{shown}{place}{also}). "
            "Correct the module, or, if only fake values are at fault, give output_args= with tensors (meta "
            "device will do) of the local shapes of one micro-batch"
        )


_TORCH = str(Path(torch.__file__).parent)


def _place_of(error: Exception) -> str:
    """Returns where the module was, in words; "" where nothing but torch and this package is known."""
    frames = traceback.extract_tb(error.__traceback__)
    own = (_TORCH, str(Path(__file__).parents[1]))
    place = next((each for each in reversed(frames) if not each.filename.startswith(own)), None)
    return "" if place is None else f", at {place.filename}:{place.lineno}"


@contextmanager
def _without_log() -> Iterator[None]:
    """Leaves out the tracebacks that torch logs on this thread of operations that fail on fake tensors."""
    thread = threading.get_ident()

    def is_kept(record: logging.LogRecord) -> bool:
        return record.thread != thread or record.levelno < logging.ERROR

    log = logging.getLogger("torch._subclasses.fake_tensor")
    log.addFilter(is_kept)
    try:
        yield
    finally:
        log.removeFilter(is_kept)


def check_call(module: torch.nn.Module, count: int | None, names: Collection[str], what: str) -> None:
    """Raises LayoutError where the module cannot be called so, as Python would once it runs.

    count: how many positional arguments it gets; None where that is not known yet. what: names the stage.
    """
    signature = _signature_of(module)
    if signature is None:
        return
    given = dict.fromkeys(names)
    try:
        if count is None:
            signature.bind_partial(**given)
        else:
            signature.bind(*[None] * count, **given)
    except TypeError as error:
        raise LayoutError(
            f"{what}: {type(module).__name__}.forward{signature} does not take the arguments of this call: "
            f"{error}"
        ) from error


def _signature_of(module: torch.nn.Module) -> inspect.Signature | None:
    """The signature by which `module` may be called; None where it is not known: hooks of the user may change
    arguments."""
    plain = getattr(module, "_orig_mod", module)  # below torch.compile
    hooks = [*plain._forward_pre_hooks.values(), *torch.nn.modules.module._global_forward_pre_hooks.values()]
    if any(not str(getattr(hook, "__module__", "")).startswith("torch.distributed.") for hook in hooks):
        return None
    try:
        return inspect.signature(plain.forward)
    except (TypeError, ValueError):
        return None


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


class Collectives(TorchDispatchMode):
    """Looks for collectives over other ranks than `peers`, except those of FSDP2, which are of
    parameters. stops: raises where one begins. A call of meshcast counts too, whatever its ranks."""

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


@contextmanager
def buffers_kept(module: torch.nn.Module) -> Iterator[None]:
    """Afterwards the module's buffers are as before: a running mean, say, has seen nothing."""
    buffers = [(each, each.clone(), each._version) for each in module.buffers()]
    yield
    for buffer, before, version in buffers:
        if buffer._version != version:
            buffer.data.copy_(before)


def without_stand_in(output: Any, way: Way) -> Any:
    """The outputs of a module that ran on `stand_ins`, as of no samples, still joined to what made them."""
    if way.outputs is None:  # the shapes of the last stage are unknown: the fake sample is the first row
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


def _described(values: Sequence[torch.Tensor], with_grad: bool) -> list[LocalValue]:
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


def _fake_state(
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
def _without_fsdp(module: torch.nn.Module) -> Iterator[None]:
    """Inside, the module runs without the hooks that fully_shard registered."""
    before = []
    for part in fsdp_parts(module):
        for hooks in (part._forward_pre_hooks, part._forward_hooks):  # type: ignore[attr-defined]
            before.append((hooks, list(hooks.items())))
            for key, hook in list(hooks.items()):
                if getattr(hook, "__self__", None) is part._get_fsdp_state():
                    del hooks[key]
    try:
        yield
    finally:
        for hooks, items in before:
            hooks.clear()
            hooks.update(items)


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
        for part in fsdp_parts(module):
            part.reshard()
