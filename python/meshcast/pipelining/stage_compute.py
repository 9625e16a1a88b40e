"""The compute of a stage: the forward and the backward of a micro-batch, as the methods of torch's stages."""

from __future__ import annotations

import inspect
import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from fractions import Fraction
from typing import Any, TypeVar

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import stage as torch_stage
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from ..base.checks import shown
from ..errors import LayoutError, MeshcastError
from ._backward import SplitBackward, hooks_made, own_functions
from .compat import PipelineStageInfo, mesh_of
from .gradients import GradientScale, LastBackward, fsdp_parts, kept_apart, multiplied, trained_leaves
from .inference import Collectives, stand_ins, without_stand_in, writes_on_input
from .parallel import (
    Placements,
    SentDTensor,
    StageMesh,
    ValuePlacements,
    Way,
    as_tuple,
    gradient_placements,
    local_values,
)

__all__ = ["ForwardContext", "StageCompute"]


_T = TypeVar("_T")


class ForwardContext(torch_stage.PipelineStage):
    """The part of `PipelineStage` that enters a context of the user's around every run of its module."""

    _forward_contexts: OrderedDict[int, Callable[[PipelineStageInfo], AbstractContextManager[None]]]

    def _begin_contexts(self) -> None:
        self._forward_contexts = OrderedDict()

    def register_forward_context(
        self, context_factory: Callable[[PipelineStageInfo], AbstractContextManager[None]]
    ) -> RemovableHandle:
        """Registers a context for forwards, as in torch 2.15, under every release: ``context_factory(info)``
        makes the context in which the module runs for a micro-batch. It is not entered for functions that
        `register_custom_function` took, unless these call ``forward_one_chunk``.

        Before the first step, where shapes are found, the module runs on fake tensors or zeros: `info` then
        says ``is_metadata_inference`` and names micro-batch 0.

        Returns:
            A handle: ``handle.remove()`` ends it. One context at a time.

        Raises:
            LayoutError: it is no function.
            MeshcastError: there is one already.

        Example, on every rank::

            from contextlib import contextmanager
            from meshcast.pipelining import PipelineStage, ScheduleGPipe

            rank, ranks = dist.get_rank(), dist.get_world_size()
            stage = PipelineStage(torch.nn.Linear(8, 8), rank, ranks, torch.device("cpu"))
            ran = []

            @contextmanager
            def noted(info):
                yield
                if not info.is_metadata_inference:
                    ran.append(info.microbatch_index)

            handle = stage.register_forward_context(noted)
            schedule = ScheduleGPipe(stage, 4)
            schedule.step(*([torch.randn(8, 8)] if stage.is_first else []))
            assert ran == [0, 1, 2, 3]
            handle.remove()
        """
        if not callable(context_factory):
            raise LayoutError(
                f"stage {self.stage_index}: context_factory must be a function that makes a context manager, "
                f"found {shown(context_factory)}"
            )
        if self._forward_contexts:
            raise MeshcastError(
                f"stage {self.stage_index} has a forward context already: remove() its handle first",
                op="pipeline",
            )
        handle = RemovableHandle(self._forward_contexts)
        self._forward_contexts[handle.id] = context_factory
        return handle

    def in_context(self, microbatch: int, run: Callable[[], _T], *, inferring: bool = False) -> _T:
        """Returns what run() returns, inside the context, where there is one. Raises MeshcastError for a
        context that swallows an error: there is no result then."""
        if not self._forward_contexts:
            return run()
        (make,) = self._forward_contexts.values()
        info = PipelineStageInfo(
            stage_index=self.stage_index, microbatch_index=microbatch, is_metadata_inference=inferring
        )
        with make(info):
            return run()
        raise MeshcastError(
            f"the forward context of stage {self.stage_index} swallowed an error of its module in "
            f"micro-batch {microbatch}, so there is no output: let it pass",
            op="pipeline",
        )


class StageCompute(ForwardContext):
    """The part of `PipelineStage` that runs the module. Values come in by `receive` and `receive_gradients`,
    and are left in ``fwd_cache`` and ``bwd_cache``, where torch's stages leave them."""

    rank: int
    mesh: StageMesh
    data_dims: list[int]
    input_placements: ValuePlacements
    output_placements: ValuePlacements
    use_dtensor: bool

    def _learn_module(self) -> None:
        # A module that writes on its inputs in place gets copies; FSDP2 could not try again.
        self._writes_on_inputs = any(True for _ in fsdp_parts(self.submod))
        self._last_backward = LastBackward(self.submod)
        self._calls_known: set[Any] = set()  # how the module may be called

    def _begin_compute(self) -> None:
        self._begin_contexts()
        self._stood_in = False  # whether a micro-batch of this step ran on stand_ins
        self.ways: Sequence[Way] = ()  # of each micro-batch of the step
        self.scale = GradientScale()  # of the gradients of the step
        self.seed_of: Callable[[int, Fraction], float] = lambda _number, _ratio: 1.0
        # What gets gradients and is no parameter of the module: arguments of the step, by micro-batch, and
        # parameters of the loss function.
        self._arguments: dict[int, list[torch.Tensor]] = {}
        self.loss_parameters: Sequence[torch.nn.Parameter] = ()
        self._functions: tuple[str, ...] | None = None  # of autograd, that users wrote; None until one ran
        self._others = self._told = False  # whether there were such gradients; whether of pairs was told
        self._late_scales: dict[int, Fraction] = {}  # of the weight gradients that are to come
        self._watched: int | None = None  # the micro-batch of this step in which the module is looked at
        # Whether it exchanges values with ranks that have other samples. Inside what is compiled nobody sees.
        self._together = any(
            hasattr(each, "_orig_mod") or each._compiled_call_impl is not None
            for each in self.submod.modules()
        )
        self._arrived: dict[int, list[Any]] = {}  # inputs by micro-batch
        self._gradients: dict[int, Sequence[torch.Tensor | None]] = {}  # of its outputs
        self._hooks: dict[int, tuple[int, bool]] = {}  # that there were before a forward; it made some
        self._late: dict[int, SplitBackward] = {}  # micro-batches whose weight gradients are to come
        self._due: set[int] = set()  # micro-batches whose weights are still to be asked for
        self.is_whole = False  # its backward cannot be split, which has been told

    @property
    def alone(self) -> bool:
        """``True`` where the stage is one rank, as in torch: no mesh was given."""
        return self.mesh.device_mesh is None

    def wrap(
        self,
        local: torch.Tensor,
        placements: Placements,
        shape: Sequence[int],
        mesh: DeviceMesh | None = None,
    ) -> torch.Tensor:
        """The DTensor on the stage's mesh, or another, that a local shard belongs to."""
        stride = torch.empty(tuple(shape), device="meta").stride()
        return DTensor.from_local(
            local,
            self.mesh.device_mesh if mesh is None else mesh,
            placements,
            run_check=False,
            shape=torch.Size(shape),
            stride=stride,
        )

    def as_before(self, local: torch.Tensor, sent: SentDTensor) -> torch.Tensor:
        """The DTensor that the stage before returned, of its local part."""
        return self.wrap(local, sent.placements, sent.shape, mesh_of(self, sent.names, sent.layout))

    @property
    def accumulates(self) -> bool:
        """``True`` where gradients can wait for a later step to be reduced: the module has parts under
        FSDP2."""
        return self._last_backward.active

    def begin_step(self, microbatches: int, *, finalize: bool = True) -> None:
        """Before the first action of a step that trains. finalize: gradients are reduced in it."""
        self._watched = None
        self._last_backward.begin_step(microbatches, finalize=finalize)

    def free_parameters(self) -> None:
        """Makes FSDP2 hold the rank's own shards again, until the module runs next."""
        self._last_backward.reshard()

    def drop_stand_ins(self) -> None:
        """After the last action of a step that trains: what only a fake sample met has gradients
        of zeros, and an optimizer would take it for used."""
        if self._stood_in and not self._last_backward.active:
            for parameter in self.submod.parameters():
                if parameter.grad is not None and not local_values(parameter.grad).any():
                    parameter.grad = None
        self._stood_in = False

    def end_evaluation(self) -> None:
        """After the last action of a step without backward."""
        self.free_parameters()

    def receive(self, microbatch: int, inputs: list[Any]) -> None:
        """The inputs that a forward will take."""
        self._arrived[microbatch] = inputs

    def has_inputs(self, microbatch: int) -> bool:
        return microbatch in self._arrived

    def receive_gradients(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """One for each output, which a backward will take: local shards laid out as `gradient_placements`
        says; None where no gradient comes back."""
        self._gradients[microbatch] = gradients

    def has_gradients(self, microbatch: int) -> bool:
        return microbatch in self._gradients

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        """Takes the outputs of the previous stage, which is on the same rank, as torch does."""
        values = as_tuple(prev_stage_outputs, f"rank {self.rank}, stage {self.stage_index - 1}")
        train = self.has_backward
        self.receive(
            mb_index, [each.detach().requires_grad_(train and each.requires_grad) for each in values]
        )

    def set_local_bwd_input(
        self, next_stage_bwd_outputs: tuple[torch.Tensor | None, ...], mb_index: int
    ) -> None:
        """Takes the gradients that the next stage, which is on the same rank, has computed, as torch does."""
        self.receive_gradients(mb_index, next_stage_bwd_outputs)

    def get_local_bwd_output(self, mb_index: int) -> tuple[torch.Tensor | None, ...]:
        return self.bwd_cache.pop(mb_index)

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: Sequence[Any],
        kwargs: Mapping[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Runs the module for a micro-batch. args: of the first stage; others take what has arrived."""
        inputs = list(args) if self.is_first else self._arrived.pop(fwd_chunk_id)
        kwargs = kwargs or {}
        way = self.ways[fwd_chunk_id] if self.ways else Way()
        hooks_before = hooks_made()
        given = inputs
        buffers: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        if way.stand_in:
            self._stood_in = self._stood_in or self.has_backward
            given, kwargs = stand_ins((inputs, dict(kwargs)), 1)
            buffers = [(each, each.clone(), each._version) for each in self.submod.buffers()]
        with self._watching(fwd_chunk_id) as seen:
            try:
                output = self.in_context(fwd_chunk_id, lambda: self._run_module(given, kwargs))
            except RuntimeError as error:
                if self._writes_on_inputs or not writes_on_input(error):
                    raise
                self._writes_on_inputs = True  # now also on all ranks of the stage: they run the same module
                output = self.in_context(fwd_chunk_id, lambda: self._run_module(given, kwargs))
        self._together = self._together or seen.found
        if way.stand_in:
            output = without_stand_in(output, way)
        for buffer, before, version in buffers:
            if buffer._version != version:
                buffer.data.copy_(before)  # a running mean, say, has seen nothing
        if self.is_last:
            roots: tuple[Any, ...] = (output,)
            if save_forward_output:
                # As in torch: without a backward here, the caller may run one from what `step` returns.
                self.output_chunks.append(_detached(output) if self.has_backward else output)
        else:
            roots = as_tuple(output, f"rank {self.rank}, stage {self.stage_index}")
        self.fwd_cache[fwd_chunk_id] = roots, inputs
        if self.has_backward:
            self._hooks[fwd_chunk_id] = hooks_before, hooks_made() != hooks_before
            given = tree_leaves((inputs if self.is_first else (), kwargs))
            self._arguments[fwd_chunk_id] = [
                each for each in given if isinstance(each, torch.Tensor) and each.requires_grad
            ]
        return output

    def check_arguments(self, count: int | None, names: Collection[str]) -> None:
        """Raises LayoutError where the module cannot be called so, as Python would once it runs.

        count: how many positional arguments it gets; None where that is not known yet.
        """
        call = count, tuple(sorted(names))
        if call in self._calls_known:
            return
        signature = _signature_of(self.submod)
        if signature is not None:
            given = dict.fromkeys(names)
            try:
                if count is None:
                    signature.bind_partial(**given)
                else:
                    signature.bind(*[None] * count, **given)
            except TypeError as error:
                raise LayoutError(
                    f"rank {self.rank}, stage {self.stage_index}: {type(self.submod).__name__}.forward"
                    f"{signature} does not take the arguments of this call: {error}",
                    rank=self.rank,
                    op="pipeline",
                ) from error
        self._calls_known.add(call)

    def _run_module(self, given: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        return self.submod(*(_copied(given) if self._writes_on_inputs else given), **kwargs)

    def loss_taken(self, microbatch: int) -> None:
        """The last stage goes backward from its loss, which is part of the forward."""
        before, _ = self._hooks[microbatch]
        self._hooks[microbatch] = before, hooks_made() != before

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Any = None,
        full_backward: bool = True,
        last_backward: bool = False,  # noqa: ARG002  torch has it
    ) -> None:
        """Accumulates into the parameters' gradients. Those of the inputs are then in ``bwd_cache``, one for
        each, local and in the layout of `gradient_placements`; None for an input that takes none.

        full_backward: else only as far as the inputs need it; `backward_weight_one_chunk` does the rest.
        """
        outputs, inputs = self.fwd_cache.pop(bwd_chunk_id)
        _, hooked = self._hooks.pop(bwd_chunk_id, (0, False))
        trained = [] if self.is_first else inputs
        if not full_backward:
            self._due.add(bwd_chunk_id)
        ratio = self.scale.ratio(bwd_chunk_id, together=self._together)
        if self.is_last:
            goes = loss is not None and loss.requires_grad
            roots, seeds = ([loss], [_filled(loss, self.seed_of(bwd_chunk_id, ratio))]) if goes else ([], [])
        else:
            gradients = self._gradients.pop(bwd_chunk_id)
            ratio = ratio or _least_ratio(gradients, any(self.scale.weights[bwd_chunk_id : bwd_chunk_id + 1]))
            roots, seeds = self._roots(outputs, gradients, ratio)
        if self._functions is None and roots:
            self._functions = own_functions(roots)
        if not full_backward and self._last_backward.active:
            self._tell_whole("FSDP2 reduces gradients inside the backward")
            full_backward = True
        with self._watching(bwd_chunk_id) as seen:
            if not full_backward and self.dw_builder is None and roots:
                needed = [
                    value for value in trained if isinstance(value, torch.Tensor) and value.requires_grad
                ]
                split = self._late[bwd_chunk_id] = SplitBackward(roots, seeds, needed, hooked)
                self._late_scales[bwd_chunk_id] = ratio
                with self._scaled(bwd_chunk_id, ratio):
                    split.input_gradients()
                if split.whole:
                    self._tell_whole(split.whole)
            else:
                self._last_backward.before_backward()
                if roots:
                    with self._scaled(bwd_chunk_id, ratio):
                        torch.autograd.backward(roots, seeds)
        if seen.found:
            raise LayoutError(
                "the module exchanges values in its backward, and not in its forward, with ranks that have "
                "more or fewer samples of the micro-batch: their gradients would not fit together. Give all "
                "ranks as many samples"
            )
        if self.dw_builder is not None:
            run, late = self.dw_builder(), self.scale.late(ratio)
            if full_backward:
                self._weights_times(late, run)
            else:
                self.dw_runner[bwd_chunk_id] = lambda: self._weights_times(late, run)
        if bwd_chunk_id not in self._due:
            self._arguments.pop(bwd_chunk_id, None)
        self.bwd_cache[bwd_chunk_id] = tuple(
            self._input_gradient(index, value, ratio) for index, value in enumerate(trained)
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:  # noqa: ARG002
        """Accumulates the gradients of the weights that `backward_one_chunk` left. Raises AssertionError, as
        torch does, where that has not run."""
        if bwd_chunk_id not in self._due:
            raise AssertionError(
                f"rank {self.rank}, stage {self.stage_index}: backward_weight_one_chunk of micro-batch "
                f"{bwd_chunk_id} without `backward_one_chunk(full_backward=False)` before it"
            )
        self._due.remove(bwd_chunk_id)
        if bwd_chunk_id in self.dw_runner:
            self.dw_runner.pop(bwd_chunk_id)()
        split = self._late.pop(bwd_chunk_id, None)
        if split is not None:
            with self._scaled(bwd_chunk_id, self._late_scales.pop(bwd_chunk_id)):
                split.weight_gradients()
        self._arguments.pop(bwd_chunk_id, None)

    def _watching(self, microbatch: int) -> AbstractContextManager[Any]:
        """Looks, in the first micro-batch of a step whose shares differ from rank to rank, whether the module
        exchanges values with the ranks of other shares."""
        if self._together or not self.has_backward or not self.scale.is_uneven(microbatch):
            return nullcontext(_NOTHING_SEEN)
        if self._watched not in (None, microbatch):
            return nullcontext(_NOTHING_SEEN)
        self._watched = microbatch
        dims = [dim for dim in range(len(self.mesh.shape)) if dim not in self.data_dims]
        return Collectives(self.mesh.along(dims), stops=False)

    @contextmanager
    def _scaled(self, microbatch: int, ratio: Fraction) -> Iterator[None]:
        """Inside, what autograd adds to gradients has the scale of the step, that of parameters but for what
        is multiplied at its end."""
        late, whole = self.scale.late(ratio), self.scale.whole(ratio)
        others = [*self._arguments.get(microbatch, ()), *self.loss_parameters]
        with ExitStack() as stack:
            if late != 1:
                stack.enter_context(multiplied(trained_leaves(self.submod), float(late)))
            self._others = self._others or bool(others)
            if whole != 1 and others:
                stack.enter_context(multiplied(others, float(whole)))
            yield

    def _weights_times(self, factor: Fraction, run: Callable[[], Any]) -> None:
        """run(), which adds gradients of parameters by itself."""
        if factor == 1:
            run()
            return
        with kept_apart([self.submod]):
            run()
            for parameter in self.submod.parameters():
                if parameter.grad is not None:
                    parameter.grad.mul_(float(factor))

    def tell_added(self, factor: float) -> None:
        """Once, that the weight of a loss's pairs was taken to be `factor` times what it is, where gradients
        depend on it that are not put right afterwards."""
        what = [f"autograd functions of its own ({', '.join(self._functions)})"] if self._functions else []
        if self._others:
            what.append("gradients of arguments, or of parameters of the loss function")
        if what and not self._told and abs(factor - 1) > 1e-6:
            self._told = True
            warnings.warn(
                f"rank {self.rank}: stage {self.stage_index} has {' and '.join(what)}. Such gradients, "
                "and auxiliary losses, were scaled as if the weight of the loss's pairs "
                f"were {factor:.3g} times what it turned out to be in this step. Make the schedule with "
                "weight_fn=, so that it is known before the step",
                stacklevel=3,
            )

    def _tell_whole(self, reason: str) -> None:
        """Once, that the backward is not split."""
        if not self.is_whole:
            self.is_whole = True
            warnings.warn(
                f"rank {self.rank}: the backward of stage {self.stage_index} is not split, so its weight "
                f"gradients are not delayed: {reason}",
                stacklevel=3,
            )

    def _roots(
        self, outputs: Sequence[Any], gradients: Sequence[torch.Tensor | None], ratio: Fraction
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The values from which the backward starts, and their gradients, in units of what the rank itself
        computes."""
        roots, seeds = [], []
        for index, (root, gradient) in enumerate(zip(outputs, gradients, strict=True)):
            if gradient is not None and root.requires_grad:
                divisor = ratio or Fraction(1)
                if not isinstance(root, DTensor):
                    # All data-parallel ranks made this value, and what is behind it is summed over them.
                    divisor *= self._copies(index)
                if divisor != 1:
                    gradient = gradient * float(1 / divisor)
                if isinstance(root, DTensor) and not isinstance(gradient, DTensor):
                    placements = gradient_placements(tuple(root.placements))
                    gradient = self.wrap(gradient, placements, root.shape, root.device_mesh)
                roots.append(root)
                seeds.append(gradient)
        return roots, seeds

    def _copies(self, output: int) -> int:
        """The number of data-parallel ranks that each have all of this output."""
        count = 1
        placements = self.output_placements[output]
        for dim in self.data_dims:
            if isinstance(placements[dim], Replicate):
                count *= self.mesh.shape[dim]
        return count

    def _input_gradient(self, index: int, value: Any, ratio: Fraction) -> torch.Tensor | None:
        if not isinstance(value, torch.Tensor) or not value.requires_grad:
            return None
        gradient = value.grad
        value.grad = None
        if gradient is None:  # the module did not use it
            return torch.zeros_like(local_values(value))
        if isinstance(gradient, DTensor):
            given: Any = value
            own = self.input_placements[index] if self.use_dtensor else tuple(given.placements)
            gradient = gradient.redistribute(placements=gradient_placements(own))
        # Not in place: it may be that of an output too, or of another input.
        found = local_values(gradient)
        if ratio == 1:
            return found
        return found * float(ratio) if ratio else torch.zeros_like(found)

    def clear_runtime_states(self) -> None:
        """Drops what a step has kept."""
        super().clear_runtime_states()
        late = (self._hooks, self._late, self._late_scales, self._due, self._arguments)
        for kept in (self.bwd_cache, self.dw_runner, self._arrived, self._gradients, *late):
            kept.clear()
        self._stood_in = False


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


def _detached(output: Any) -> Any:
    if type(output) is torch.Tensor:  # most are: no walk through a tree
        return output.detach()
    return tree_map_only(torch.Tensor, torch.Tensor.detach, output)


class _NothingSeen:
    found = False


_NOTHING_SEEN = _NothingSeen()


def _filled(loss: torch.Tensor, value: float) -> torch.Tensor:
    return torch.ones_like(loss) if value == 1 else torch.full_like(loss, value)


def _least_ratio(gradients: Sequence[torch.Tensor | None], counts: bool) -> Fraction:
    """The ratio of a rank without samples: 0. Where it nevertheless has outputs, such as those that are made
    of parameters alone, their gradients count, and what its module adds is made too small to be seen.
    counts: the micro-batch has samples on other ranks."""
    present = [each for each in gradients if each is not None and each.numel()] if counts else []
    if not present:
        return Fraction(0)
    # float16 has no room for such factors.
    return Fraction(1, 1 << (24 if all(each.dtype != torch.float16 for each in present) else 4))


def _copied(values: Sequence[Any]) -> list[Any]:
    """For a module that writes on its inputs in place."""
    return [*tree_map_only(torch.Tensor, torch.clone, list(values))]
