"""PipelineStage: a module, its place in the pipeline and the mesh it runs on, with the forward and the
backward of a micro-batch as methods of torch's stages. Stages that torch traces (its Pipe) run here over the
edges that the tracer found.

Other names of torch.distributed.pipelining.stage are found here, too.
"""

from __future__ import annotations

import warnings
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from fractions import Fraction
from functools import partial
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import pipelining as torch_pipelining
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import stage as torch_stage
from torch.distributed.pipelining._IR import _modify_graph_op_device
from torch.distributed.tensor import Replicate
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.hooks import RemovableHandle

from ..base import checks
from ..base.checks import shown
from ..errors import Caller, LayoutError, MeshcastError
from ..planning.plan import STRATEGIES
from ..topology import Topology
from ._backward import FixedScale, SplitBackward, hooks_made
from ._utils import names_of_torch
from .board import refusals_reported
from .compat import PipelineStageInfo, init_stage, mesh_of
from .data_parallel import (
    GradientScale,
    Wrappers,
    average_gradients,
    hooks_at_the_end,
    input_gradient,
    least_ratio,
    seeded,
    shared_parameters_of,
    sum_gradients,
)
from .edge import Edge, check_edges, traced_edges
from .inference import (
    Collectives,
    Examples,
    Probe,
    buffers_kept,
    check_call,
    stand_ins,
    without_stand_in,
    writes_on_input,
)
from .parallel import (
    DataUse,
    Inferred,
    LocalValue,
    Placements,
    SentDTensor,
    ValuePlacements,
    Way,
    as_dtensor,
    as_tuple,
    local_values,
    numbered_dims,
    rows_of,
    split_dims,
    stage_device,
    stage_mesh,
)

__all__ = [
    "Pipe",
    "PipelineStage",
    "PipelineStageInfo",
    "_PipelineStage",
    "build_stage",
    "pipeline",
]


Tensors = torch.Tensor | tuple[torch.Tensor, ...]
_T = TypeVar("_T")
_MakeContext = Callable[[PipelineStageInfo], AbstractContextManager[None]]


@dataclass(slots=True)
class _Forward:
    """The state that a forward leaves for the backward of its micro-batch, in addition to ``fwd_cache``.

    hooks: the number of hooks that there were before it. hooked: it made some. trained: the arguments of the
    step, which are no parameters of the module, that get gradients.
    """

    hooks: int = 0
    hooked: bool = False
    trained: list[torch.Tensor] = field(default_factory=list)


class PipelineStage(torch_stage.PipelineStage):
    """One stage of a pipeline, as this rank runs it.

    It is a stage of torch.distributed.pipelining, with its attributes and methods. It differs in where values
    come from: over edges that reshard them, to any later stage.

    Args:
        submodule: the stage's module, also inside DistributedDataParallel or FSDP2 over the ranks that its
            samples are split over: gradients are summed once per step. Its positional inputs are the values
            of the edges that lead here (stage 0: the arguments of ``step``), its outputs the values that
            leave: a tensor or a tuple of tensors; the last stage may return anything ``loss_fn`` takes. It
            sees this rank's local shards, whose batch dimension may be of size 0.
        stage_index, num_stages: its place.
        device: where it computes and receives: the CPU, or a GPU, where all stages must be on GPUs. Batches
            and targets are given there; ``mesh`` is on the same kind of device.
        input_args: examples of one micro-batch's local inputs; checked against what the producers send.
        output_args: examples (device "meta" will do) of one micro-batch's local outputs, for modules whose
            shapes cannot be inferred. For micro-batches with other numbers of samples dimension 0 follows.
        output_grads, input_grads: examples of gradients, as torch takes them; here layouts follow from the
            values. torch 2.11 has ``group`` and ``dw_builder`` in their places, which is understood.
        group: the ranks of the whole pipeline, all stages together; default: the default group.
        dw_builder: as in torch: called behind the backward of a micro-batch, it returns the function that
            computes the gradients of the weights. Without it a backward is split without help of the module.
        get_mesh: as in torch: the mesh, on ranks of this pipeline and of parallel ones, of DTensors that
            the stage before this one returns. Each rank gets the part of its own pipeline.
        mesh: the ranks of this stage, any shape. None: one rank, as in torch: number ``stage_index`` of
            ``group``, or the calling rank where the group has fewer ranks than there are stages. Stages that
            share a rank share all their ranks.
        input_placements, output_placements: one list of placements for all values, or one list for each.
            Default: Shard(0) over the first mesh dimension, Replicate() over the others.
        data_dims: numbers or names of the mesh dimensions over whose ranks samples or tokens are split, so
            that each computes a part of the loss. Gradients of parameters are summed over them, as are those
            of inputs that are whole there; those of outputs that are whole there are shared out. Default: the
            dimensions on which an input is Shard(0). Name them for context parallelism, and where samples are
            split inside the module.
        loss_dims: of the last stage, the mesh dimensions over which ranks have losses of different samples or
            tokens. Default: data_dims. Give more for tensor-parallel modules whose loss is that of a shard of
            the sequence.
        edges: all edges of the pipeline, the same on every rank. Default: output j of each stage is input j
            of the next.
        use_dtensor: the module gets DTensors on ``mesh`` instead of local shards. Outputs may be either in
            both cases.
        shared_parameters: {key: name of a parameter of the module}. Stages that name the same key share that
            parameter (tied embeddings): each has a copy, equal at the start, and after a step each copy gets
            the sum of the gradients of all.
        strategy, topology: of the transfers between stages, as `meshcast.plan` takes them; the same on every
            rank. Without a topology rates are assumed. The schedule's ``timeout`` limits each transfer.

    Raises:
        LayoutError: naming the argument that is wrong.

    Example, on the four ranks of ``torchrun --nproc-per-node 4``::

        from meshcast.pipelining import PipelineStage, ScheduleEager1F1B

        meshes = [DeviceMesh("cpu", [0, 1, 2]), DeviceMesh("cpu", [3])]  # of both stages, on every rank
        index = 0 if dist.get_rank() < 3 else 1
        torch.manual_seed(index)
        layer = torch.nn.Linear(8, 8)
        stage = PipelineStage(layer, index, 2, torch.device("cpu"), mesh=meshes[index])
        schedule = ScheduleEager1F1B(stage, 4, loss_fn=torch.nn.functional.mse_loss, timeout=60)
        losses = []
        schedule.step(torch.randn(24, 8), target=torch.randn(24, 8), losses=losses)
        assert layer.weight.grad is not None and len(losses) == (4 if stage.is_last else 0)
    """

    def __init__(
        self,
        submodule: torch.nn.Module,
        stage_index: int,
        num_stages: int,
        device: torch.device,
        input_args: Tensors | None = None,
        output_args: Tensors | None = None,
        output_grads: Any = None,
        input_grads: Any = None,
        group: dist.ProcessGroup | None = None,
        dw_builder: Callable[[], Callable[..., None]] | None = None,
        get_mesh: Any = None,
        *,
        mesh: DeviceMesh | None = None,
        input_placements: Sequence[Any] | None = None,
        output_placements: Sequence[Any] | None = None,
        data_dims: Sequence[int | str] | None = None,
        loss_dims: Sequence[int | str] | None = None,
        edges: Sequence[Edge] | None = None,
        use_dtensor: bool = False,
        shared_parameters: Mapping[str, str] | None = None,
        strategy: str = "auto",
        topology: Topology | None = None,
    ) -> None:
        if isinstance(output_grads, dist.ProcessGroup):
            # torch 2.11 has group and dw_builder in these places, and nothing of DTensors.
            group, dw_builder, output_grads, input_grads = output_grads, input_grads, None, None
        where = f"stage {stage_index}"
        with refusals_reported(group, stage_index):
            if not 0 <= stage_index < num_stages:
                raise LayoutError(f"stage_index must be in 0..{num_stages - 1}, found {stage_index}")
            if mesh is not None and get_mesh is not None:
                raise LayoutError(
                    f"{where}: get_mesh is not used here: with mesh= the placements say what arrives"
                )
            self.input_examples = None if input_args is None else as_tuple(input_args, f"{where}, input_args")
            outputs = None if output_args is None else as_tuple(output_args, f"{where}, output_args")
            self._examples = Examples(outputs, rows_of(self.input_examples or ())) if outputs else None
            device = stage_device(where, device, mesh)
            self.rank = dist.get_rank()
            self._where = f"rank {self.rank}, stage {stage_index}"
            self.mesh = stage_mesh(stage_index, num_stages, group, mesh, self.rank)
            init_stage(
                self,
                submodule,
                stage_index,
                num_stages=num_stages,
                mesh=mesh,
                device=device,
                input_args=self.input_examples,
                output_args=outputs,
                output_grads=output_grads,
                input_grads=input_grads,
                group=group,
                dw_builder=dw_builder,
                get_mesh=get_mesh,
            )
            self.input_placements = ValuePlacements(f"{where}, input_placements", input_placements, self.mesh)
            self.output_placements = ValuePlacements(
                f"{where}, output_placements", output_placements, self.mesh
            )
            self.edges = None if edges is None else check_edges(edges, num_stages)
            if use_dtensor and mesh is None:
                raise LayoutError(f"{where}: use_dtensor needs mesh=")
            self.use_dtensor = use_dtensor
            self.strategy = checks.choice(f"{where}: strategy", strategy, STRATEGIES)
            self.topology = topology
            self.data_dims_given, self.loss_dims_given = data_dims is not None, loss_dims is not None
            by_default = split_dims(self.input_placements)
            self.data_dims = numbered_dims(f"{where}, data_dims", data_dims, self.mesh, by_default)
            self.loss_dims = numbered_dims(f"{where}, loss_dims", loss_dims, self.mesh, self.data_dims)
            # The placements of a DTensor show what is still to be summed.
            self.summed_dims = [] if use_dtensor else self.data_dims
            self.learn_wrappers()
            self._shared_names = dict(shared_parameters or {})
            shared_parameters_of(stage_index, self._shared_names, self.submod)  # checks them
        # The stages of each shared parameter, ascending; the schedule sets it once the ranks agreed.
        self.sharing: Mapping[str, Sequence[int]] | None = None
        self.reduced_elsewhere: set[int] = set()  # ids of parameters that an earlier stage here has too
        self._forward_contexts: OrderedDict[int, _MakeContext] = OrderedDict()
        # Given before each step.
        self.ways: Sequence[Way] = ()  # of each micro-batch
        self.scale = GradientScale()
        self.seed_of: Callable[[int, Fraction], float] = lambda _number, _ratio: 1.0
        self.loss_parameters: Sequence[torch.nn.Parameter] = ()  # of the loss function, none of the module's
        # By micro-batch, from one action of a step to the next.
        self._arrived: dict[int, list[Any]] = {}  # inputs
        self._gradients: dict[int, Sequence[torch.Tensor | None]] = {}  # of the outputs
        self._forwards: dict[int, _Forward] = {}
        self._late: dict[int, SplitBackward] = {}  # those whose weight gradients are to come
        self._stood_in = False  # whether a micro-batch of this step ran on stand_ins
        self._watched: int | None = None  # the micro-batch of this step in which the module is looked at
        # Learnt while the module runs. Exchanges in compiled code cannot be seen.
        self._together = any(  # whether it exchanges values with ranks that have other samples
            hasattr(each, "_orig_mod") or each._compiled_call_impl is not None
            for each in self.submod.modules()
        )
        self._fixed = FixedScale()
        self.is_whole = False  # its backward cannot be split, of which the user was warned

    def learn_wrappers(self) -> None:
        """Looks for DDP and FSDP2, which may be put around the module, or into it, after the stage was made
        and before its schedule is."""
        where, before = f"stage {self.stage_index}", getattr(self, "_wrappers", None)
        self._wrappers = Wrappers(self.submod, self.mesh, self.data_dims, self.group, where, before)
        self.submod = self._wrappers.module
        # A module that writes on its inputs in place gets copies; FSDP2 could not try again.
        self._writes_on_inputs = self.accumulates
        self._calls_known: set[Any] = set()  # how the module may be called

    def learn_loss(self, loss_fn: Any) -> None:
        """A loss function may be a module with parameters, some of them those of the stage."""
        given = loss_fn.parameters() if isinstance(loss_fn, torch.nn.Module) else ()
        own = {id(each) for each in self.submod.parameters()} if given else ()
        self.loss_parameters = [each for each in given if id(each) not in own]

    def __repr__(self) -> str:
        return f"<PipelineStage {self.stage_index} of {self.num_stages}, a {type(self.submod).__name__}>"

    @property
    def alone(self) -> bool:
        """``True`` where the stage is one rank, as in torch: no mesh was given."""
        return self.mesh.device_mesh is None

    @property
    def batch_parts(self) -> int:
        """The number of parts into which the samples of a micro-batch are split: the data-parallel degree."""
        return self.mesh.parts(self.data_dims)

    @property
    def batch_part(self) -> int:
        """The number of the part that this rank has, from 0."""
        return self.mesh.part(self.data_dims)

    def output_layout(self, index: int, local: LocalValue) -> Placements:
        """Placements of output `index`: those given, else those of the DTensor, else the default."""
        if local.placements is None or self.output_placements.given or self.alone:
            return self.output_placements[index]
        return local.placements

    def wrap(self, local: torch.Tensor, placements: Placements, shape: Sequence[int]) -> torch.Tensor:
        """The DTensor on the stage's mesh that a local shard belongs to."""
        return as_dtensor(local, self.mesh.device_mesh, placements, shape)

    def as_before(self, local: torch.Tensor, sent: SentDTensor) -> torch.Tensor:
        """The DTensor that the previous stage returned, of its local part."""
        return as_dtensor(local, mesh_of(self, sent.names, sent.layout), sent.placements, sent.shape)

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
        with Caller("PipelineStage", self.rank):
            if not callable(context_factory):
                raise LayoutError(
                    f"stage {self.stage_index}: context_factory must be a function that makes a context "
                    f"manager, found {shown(context_factory)}"
                )
            if self._forward_contexts:
                raise MeshcastError(
                    f"stage {self.stage_index} has a forward context already: remove() its handle first"
                )
        handle = RemovableHandle(self._forward_contexts)
        self._forward_contexts[handle.id] = context_factory
        return handle

    def _in_context(self, microbatch: int, run: Callable[[], _T], *, inferring: bool = False) -> _T:
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
        raise Caller("pipeline", self.rank).error(
            MeshcastError,
            f"the forward context of stage {self.stage_index} swallowed an error of its module in "
            f"micro-batch {microbatch}, so there is no output: let it pass",
        )

    def infer(
        self,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        with_grad: bool,
        empty: bool,
        data: DataUse,
        again: tuple[Sequence[Any], Mapping[str, Any]] | None = None,
    ) -> Inferred:
        """Local shapes of the outputs of one micro-batch, and how to run the module for it. empty, data,
        again: everywhere_empty, data, again of `Probe.outputs`."""
        given = args, kwargs
        peers = self.mesh.along(self.mesh.dims_but(self.data_dims))
        probe = Probe(self.submod, self._where, with_grad, peers, real=self.is_first)

        def look() -> Inferred:
            if self.is_last:
                # Without loss_dims=, its outputs show which samples or tokens the loss is taken of.
                open_dims = [] if self.loss_dims_given else self.mesh.dims_but(self.loss_dims)
                return probe.last(given, outputs=any(self.mesh.shape[dim] > 1 for dim in open_dims))
            return probe.with_examples(given, self._examples, data, everywhere_empty=empty, again=again)

        found = self._in_context(0, look, inferring=True)
        self._writes_on_inputs = self._writes_on_inputs or found.copies
        return found

    @property
    def accumulates(self) -> bool:
        """``True`` where gradients can wait for a later step to be reduced: the module has parts under
        FSDP2."""
        return bool(self._wrappers.parts)

    def begin_step(self, microbatches: int, *, finalize: bool = True) -> None:
        """Before the first action of a step that trains. finalize: gradients are reduced in it."""
        self._watched = None
        self._wrappers.begin_step(microbatches, finalize=finalize)

    def free_parameters(self) -> None:
        """Makes FSDP2 hold the rank's own shards again, until the module runs next."""
        self._wrappers.reshard()

    def drop_stand_ins(self) -> None:
        """After the last action of a step that trains: what only a fake sample met has gradients
        of zeros, and an optimizer would take it for used."""
        if self._stood_in and not self.accumulates:
            for parameter in self.submod.parameters():
                if parameter.grad is not None and not local_values(parameter.grad).any():
                    parameter.grad = None
        self._stood_in = False

    def receive(self, microbatch: int, inputs: list[Any]) -> None:
        """The inputs that a forward will take."""
        self._arrived[microbatch] = inputs

    def has_inputs(self, microbatch: int) -> bool:
        return microbatch in self._arrived

    def receive_gradients(self, microbatch: int, gradients: Sequence[torch.Tensor | None]) -> None:
        """One for each output, which a backward will take: local shards laid out by
        `gradient_placements`; None where no gradient comes back."""
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
        given, named = inputs, kwargs or {}
        way = self.ways[fwd_chunk_id] if self.ways else Way()
        hooks_before = hooks_made()
        if way.stand_in:
            self._stood_in = self._stood_in or self.has_backward
            given, named = stand_ins((inputs, dict(named)), 1)

        def run() -> Any:
            copied = self._writes_on_inputs
            values = tree_map_only(torch.Tensor, torch.clone, list(given)) if copied else given
            return self.submod(*values, **named)

        seen = self._watch(fwd_chunk_id)
        with seen or nullcontext(), buffers_kept(self.submod) if way.stand_in else nullcontext():
            try:
                output = self._in_context(fwd_chunk_id, run)
            except RuntimeError as error:
                if self._writes_on_inputs or not writes_on_input(error):
                    raise
                self._writes_on_inputs = True  # now also on all ranks of the stage: they run the same module
                output = self._in_context(fwd_chunk_id, run)
        if seen is not None and seen.found:
            self._together = True
        if way.stand_in:
            output = without_stand_in(output, way)
        if self.is_last:
            roots: tuple[Any, ...] = (output,)
            if save_forward_output:
                # As in torch: without a backward here, the caller may run one from what `step` returns.
                self.output_chunks.append(
                    tree_map_only(torch.Tensor, torch.Tensor.detach, output) if self.has_backward else output
                )
        else:
            roots = as_tuple(output, self._where)
        self.fwd_cache[fwd_chunk_id] = roots, inputs
        if self.has_backward:
            arguments = tree_leaves((inputs if self.is_first else (), named))
            trained = [each for each in arguments if isinstance(each, torch.Tensor) and each.requires_grad]
            self._forwards[fwd_chunk_id] = _Forward(hooks_before, hooks_made() != hooks_before, trained)
        return output

    def check_arguments(self, count: int | None, names: Collection[str]) -> None:
        """`check_call` of the module, once for each kind of call."""
        call = count, tuple(sorted(names))
        if call not in self._calls_known:
            with Caller("pipeline", self.rank):
                check_call(self.submod, count, names, f"stage {self.stage_index}")
            self._calls_known.add(call)

    def loss_taken(self, microbatch: int) -> None:
        """The last stage goes backward from its loss, which is part of the forward."""
        forward = self._forwards[microbatch]
        forward.hooked = hooks_made() != forward.hooks

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
        forward = self._forwards.pop(bwd_chunk_id, None) or _Forward()
        inputs = [] if self.is_first else inputs
        ratio = self.scale.ratio(bwd_chunk_id, together=self._together)
        if self.is_last:
            goes = loss is not None and loss.requires_grad
            roots = [loss] if goes else []
            seeds = [torch.full_like(loss, self.seed_of(bwd_chunk_id, ratio))] if goes else []
        else:
            gradients = self._gradients.pop(bwd_chunk_id)
            ratio = ratio or least_ratio(gradients, any(self.scale.weights[bwd_chunk_id : bwd_chunk_id + 1]))
            roots, seeds = seeded(outputs, gradients, ratio, self._copies)
        others = [*forward.trained, *self.loss_parameters]
        if roots:
            self._fixed.learn(roots, others)
        scaled = partial(self.scale.applied, ratio, self.submod, others)
        splits = not full_backward and not self.accumulates
        if not full_backward:
            self.dw_runner[bwd_chunk_id] = lambda: None  # unless the code below leaves some gradients
            if self.accumulates:
                self._warn_whole("FSDP2 reduces gradients inside the backward")
        seen = self._watch(bwd_chunk_id)
        with seen or nullcontext():
            if splits and self.dw_builder is None and roots:
                needed = [each for each in inputs if isinstance(each, torch.Tensor) and each.requires_grad]
                split = self._late[bwd_chunk_id] = SplitBackward(roots, seeds, needed, forward.hooked)
                with scaled():
                    split.input_gradients()
                if split.whole:
                    self._warn_whole(split.whole)

                def late() -> None:
                    with scaled():
                        split.weight_gradients()

                self.dw_runner[bwd_chunk_id] = late
            else:
                self._wrappers.before_backward()
                if roots:
                    with scaled():
                        torch.autograd.backward(roots, seeds)
        if seen is not None and seen.found:
            raise LayoutError(
                "the module exchanges values in its backward, and not in its forward, with ranks that have "
                "more or fewer samples of the micro-batch: their gradients would not fit together. Give all "
                "ranks as many samples"
            )
        if self.dw_builder is not None:
            run = partial(self.scale.run_scaled, ratio, self.submod, self.dw_builder())
            if splits:
                self.dw_runner[bwd_chunk_id] = run
            else:
                run()
        self.bwd_cache[bwd_chunk_id] = tuple(
            input_gradient(value, ratio, self.input_placements[index] if self.use_dtensor else None)
            for index, value in enumerate(inputs)
        )

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:  # noqa: ARG002
        """Accumulates the gradients of the weights that `backward_one_chunk` left. Raises AssertionError, as
        torch does, where that has not run."""
        if bwd_chunk_id not in self.dw_runner:
            raise AssertionError(
                f"{self._where}: backward_weight_one_chunk of micro-batch {bwd_chunk_id} without "
                "`backward_one_chunk(full_backward=False)` before it"
            )
        self._late.pop(bwd_chunk_id, None)
        self.dw_runner.pop(bwd_chunk_id)()

    def _watch(self, microbatch: int) -> Collectives | None:
        """Looks, in the first micro-batch of a step whose shares differ from rank to rank, whether the module
        exchanges values with the ranks of other shares. None: it needs no look."""
        if self._together or not self.has_backward or not self.scale.is_uneven(microbatch):
            return None
        if self._watched not in (None, microbatch):
            return None
        self._watched = microbatch
        return Collectives(self.mesh.along(self.mesh.dims_but(self.data_dims)), stops=False)

    def tell_added(self, factor: float) -> None:
        """`FixedScale.warn`, at the end of a step."""
        self._fixed.warn(factor, f"rank {self.rank}: stage {self.stage_index}")

    def _warn_whole(self, reason: str) -> None:
        """Warns, once, that the backward is not split."""
        if not self.is_whole:
            self.is_whole = True
            warnings.warn(
                f"rank {self.rank}: the backward of stage {self.stage_index} is not split, so its weight "
                f"gradients are not delayed: {reason}",
                stacklevel=3,
            )

    def _copies(self, output: int) -> int:
        """The number of data-parallel ranks that each have all of this output."""
        placements = self.output_placements[output]
        return self.mesh.parts([dim for dim in self.data_dims if isinstance(placements[dim], Replicate)])

    def clear_runtime_states(self) -> None:
        """Drops what a step has kept."""
        super().clear_runtime_states()
        kept = (self.bwd_cache, self.dw_runner, self._arrived, self._gradients, self._forwards, self._late)
        for each in kept:
            each.clear()
        self._stood_in = False

    def scale_grads(self, grad_scale_factor: float | torch.Tensor) -> None:
        """Divides all that is in ``grad``, as torch does; what several stages of a rank hold, only once. A
        factor that is a tensor has no dimensions."""
        if isinstance(grad_scale_factor, torch.Tensor) or grad_scale_factor != 1:
            for each in self.own_parameters():
                if each.grad is not None:
                    local_values(each.grad).div_(grad_scale_factor)

    def over_columns(self, *values: float) -> torch.Tensor:
        """The means of the values over the pipelines that DDP or FSDP2 joins with this one, in float64, on
        the device of the stage; without such the values. Called by all ranks that are joined."""
        device = self.device if self.joins_pipelines else torch.device("cpu")
        means = torch.tensor(values, dtype=torch.float64, device=device)
        for group in self._wrappers.joined:
            dist.all_reduce(means, group=group)
            means /= group.size()
        return means

    @property
    def shared(self) -> dict[str, torch.nn.Parameter]:
        """The shared parameters by key, as the module has them now."""
        if not self._shared_names:
            return {}
        return shared_parameters_of(self.stage_index, self._shared_names, self.submod)

    def own_parameters(self) -> list[torch.nn.Parameter]:
        """The parameters that no earlier stage of this rank has too."""
        return [each for each in self.submod.parameters() if id(each) not in self.reduced_elsewhere]

    @property
    def reduces(self) -> bool:
        """``True`` where `sync_gradients` has something to do."""
        return self.batch_parts > 1 or self._wrappers.columns is not None

    @property
    def joins_pipelines(self) -> bool:
        """``True`` where DDP or FSDP2 joins the stage with ranks of other pipelines."""
        return bool(self._wrappers.joined)

    def sync_gradients(self) -> None:
        """Sums the gradients of the parameters over the data-parallel ranks of the stage; inside
        DistributedDataParallel over other pipelines (``group=``) it takes their mean over these. Called by
        all of these ranks, once per step. Parameters of several stages of a rank are left to the first of
        them.

        ``step`` does it unless the schedule was made with ``sync_gradients=False``. Hooks that
        ``register_post_accumulate_grad_hook`` has put on the parameters run behind it.
        """
        with hooks_at_the_end([self.submod]) as call_hooks:
            self.reduce_gradients()
            call_hooks(self.own_parameters())

    def reduce_gradients(self) -> None:
        """`sync_gradients` without hooks."""
        own = self.own_parameters()
        if self.batch_parts > 1:
            sum_gradients(own, self.mesh, self.data_dims)
        if self._wrappers.columns is not None:
            average_gradients(own, self._wrappers.columns)


class _PipelineStage(PipelineStage):
    """A stage of a `Pipe`. Values travel to any later stage that uses them, and their gradients back.

    pipe_info: of ``pipe.info()``. Other arguments as those of `PipelineStage`.
    """

    get_stage_index_of_submod = torch_stage._PipelineStage.get_stage_index_of_submod
    find_dst_rank = torch_stage._PipelineStage.find_dst_rank
    _get_output_node = torch_stage._PipelineStage._get_output_node
    _move_submod_to_device = torch_stage._PipelineStage._move_submod_to_device

    def __init__(
        self,
        stage_module: torch.nn.Module,
        stage_index: int,
        pipe_info: Any,
        device: torch.device,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        self.pipe_info = pipe_info
        nodes = [node for node in pipe_info.graph.nodes if node.op == "call_module"]
        if not any(each.is_meta for each in stage_module.parameters()):
            stage_module.to(device)
        super().__init__(
            stage_module, stage_index, pipe_info.num_stages, device, group=group, edges=traced_edges(nodes)
        )
        self.node = nodes[stage_index]
        self.name = self.node.name
        self.submod_to_stage_index = {node.name: index for index, node in enumerate(nodes)}


def build_stage(
    stage_module: torch.nn.Module,
    stage_index: int,
    pipe_info: Any,
    device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> _PipelineStage:
    """Makes the stage of a module of a `Pipe`, as torch's ``build_stage`` does. `pipeline` has an example.

    Args:
        stage_module: of ``pipe.get_stage_module(stage_index)``.
        stage_index: its place.
        pipe_info: of ``pipe.info()``.
        device: where it computes.
        group: the ranks of the whole pipeline; default: the default group.
    """
    return _PipelineStage(stage_module, stage_index, pipe_info, device, group)


class Pipe(torch_pipelining.Pipe):
    """torch's, whose stages run here. `pipeline` makes it, and ``build_stage`` is a stage of it."""

    def build_stage(  # type: ignore[override]
        self, stage_index: int, device: torch.device, group: dist.ProcessGroup | None = None
    ) -> _PipelineStage:
        module = self.get_stage_module(stage_index)
        if isinstance(module, torch.fx.GraphModule):
            _modify_graph_op_device(module, device)
        return _PipelineStage(module, stage_index, self.info(), device, group)


def pipeline(*args: Any, **kwargs: Any) -> Pipe:
    """torch.distributed.pipelining.pipeline, with its arguments: traces a module and cuts it.

    Example, on every rank::

        from meshcast.pipelining import ScheduleGPipe, SplitPoint, pipeline

        rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(0)
        model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(ranks)])
        cuts = {str(layer): SplitPoint.BEGINNING for layer in range(1, ranks)}
        pipe = pipeline(model, mb_args=(torch.randn(4, 8),), split_spec=cuts)
        stage = pipe.build_stage(rank, torch.device("cpu"))
        schedule = ScheduleGPipe(stage, 4, loss_fn=torch.nn.functional.mse_loss)
        schedule.step(torch.randn(16, 8), target=torch.randn(16, 8))
    """
    pipe: Any = torch_pipelining.pipeline(*args, **kwargs)
    pipe.__class__ = Pipe  # torch has no way to name the class that it makes
    return pipe


__getattr__, __dir__ = names_of_torch("stage", globals())
