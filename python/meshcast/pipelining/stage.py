"""PipelineStage: a module, its place in the pipeline and the mesh it runs on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_flatten

from meshcast.base import checks
from meshcast.errors import LayoutError
from meshcast.pipelining.board import refusals_told
from meshcast.pipelining.devices import stage_device
from meshcast.pipelining.edge import Edge, check_edges
from meshcast.pipelining.gradients import average_gradients, sum_gradients
from meshcast.pipelining.inference import (
    DataUse,
    Inferred,
    Way,
    infer_outputs,
    is_empty,
    needs_stand_in,
    outputs_on_fakes,
    stand_ins,
    without_stand_in,
    writes_on_input,
)
from meshcast.pipelining.layouts import (
    Placements,
    ValuePlacements,
    gradient_placements,
    numbered_dims,
    stage_mesh,
)
from meshcast.pipelining.layouts import data_dims as split_dims
from meshcast.pipelining.shapes import LocalValue, as_tuple, describe_values, local_values, rows_of
from meshcast.pipelining.split_backward import SplitBackward, hooks_made
from meshcast.pipelining.wrappers import LastBackward, fsdp_parts, look_through, shared_parameters_of
from meshcast.planning.plan import STRATEGIES
from meshcast.topology import Topology

__all__ = ["PipelineStage"]

Tensors = torch.Tensor | tuple[torch.Tensor, ...]


@dataclass(slots=True)
class _Kept:
    """What the backward of a micro-batch needs from its forward."""

    inputs: list[Any]
    roots: list[torch.Tensor]
    hooks_before: int  # hooks there were when the forward began
    hooked: bool  # it made some


class PipelineStage:
    """One stage of a pipeline, as this rank runs it.

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
            shapes cannot be inferred. Of micro-batches with other numbers of samples dimension 0 follows.
        output_grads, input_grads, get_mesh: torch passes the metadata of DTensor gradients through these;
            here layouts follow from ``mesh`` and the placements, so they must be None. torch 2.11 has none
            of them: there ``group`` and ``dw_builder`` come in their places, which is understood.
        group: the ranks of the whole pipeline, all stages together; default: the default group.
        dw_builder: must be None; a backward is split here without help of the module.
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
            rank. Without a topology rates are assumed.

    Raises:
        LayoutError: naming the argument that is wrong.
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
        with refusals_told(group):
            for name, value in (("stage_index", stage_index), ("num_stages", num_stages)):
                checks.integer(name, value, -(1 << 31), (1 << 31) - 1)
            if not isinstance(submodule, torch.nn.Module):
                raise LayoutError(f"submodule must be a torch.nn.Module, found {checks.shown(submodule)}")
            if topology is not None and not isinstance(topology, Topology):
                raise LayoutError(f"topology must be a meshcast.Topology, found {checks.shown(topology)}")
            if not 0 <= stage_index < num_stages:
                raise LayoutError(f"stage_index must be in 0..{num_stages - 1}, found {stage_index}")
            for name, value in (
                ("output_grads", output_grads),
                ("input_grads", input_grads),
                ("get_mesh", get_mesh),
            ):
                if value is not None:
                    raise LayoutError(
                        f"stage {stage_index}: {name} is not used here: give mesh=, input_placements= "
                        "and output_placements="
                    )
            if dw_builder is not None:
                raise LayoutError(
                    f"stage {stage_index}: dw_builder is not used here: delay_weight_grad=True of the "
                    "schedule splits the backward of any module"
                )
            self.stage_index = stage_index
            self.num_stages = num_stages
            self.device = stage_device(f"stage {stage_index}", device, mesh)
            self.group = group
            self.rank = dist.get_rank()
            self.mesh = stage_mesh(stage_index, num_stages, group, mesh, self.rank)
            self.input_placements = ValuePlacements(
                f"stage {stage_index}, input_placements", input_placements, self.mesh
            )
            self.output_placements = ValuePlacements(
                f"stage {stage_index}, output_placements", output_placements, self.mesh
            )
            self.edges = None if edges is None else check_edges(edges, num_stages)
            self.input_examples = (
                None if input_args is None else as_tuple(input_args, f"stage {stage_index}, input_args")
            )
            self.output_examples = (
                None if output_args is None else as_tuple(output_args, f"stage {stage_index}, output_args")
            )
            if use_dtensor and mesh is None:
                raise LayoutError(f"stage {stage_index}: use_dtensor needs mesh=")
            self.use_dtensor = use_dtensor
            self.strategy = checks.choice(f"stage {stage_index}: strategy", strategy, STRATEGIES)
            self.topology = topology
            self.data_dims_given, self.loss_dims_given = data_dims is not None, loss_dims is not None
            self.data_dims = (
                split_dims(self.input_placements)
                if data_dims is None
                else numbered_dims(f"stage {stage_index}, data_dims", data_dims, self.mesh)
            )
            self.loss_dims = (
                self.data_dims
                if loss_dims is None
                else numbered_dims(f"stage {stage_index}, loss_dims", loss_dims, self.mesh)
            )
            # A DTensor says by its own placements what is still to be summed.
            self.summed_dims = [] if use_dtensor else self.data_dims
            pipeline = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
            wrapped = look_through(submodule, self.mesh, self.data_dims, pipeline, f"stage {stage_index}")
            self.submod, self._columns = wrapped.module, wrapped.columns
            self.reduced_elsewhere: set[int] = set()  # ids of parameters that an earlier stage here has too
            self._example_rows: int | None = None
            # A module that writes on its inputs in place gets copies; FSDP2 could not try again.
            self._writes_on_inputs = any(True for _ in fsdp_parts(self.submod))
            self._last_backward = LastBackward(self.submod)
            self.shared = shared_parameters_of(stage_index, shared_parameters or {}, self.submod)
            # The stages of each shared parameter, ascending; the schedule tells once the ranks agreed.
            self.sharing: Mapping[str, Sequence[int]] | None = None
            self._stood_in = False  # whether a micro-batch of this step ran on stand_ins
            self._kept: dict[int, _Kept] = {}
            self._late: dict[int, SplitBackward] = {}  # micro-batches whose weight gradients are to come
            self._told = False  # that this module's backward cannot be split

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    @property
    def batch_parts(self) -> int:
        """How many ways the samples of a micro-batch are split: the data-parallel degree."""
        parts = 1
        for dim in self.data_dims:
            parts *= self.mesh.shape[dim]
        return parts

    @property
    def batch_part(self) -> int:
        """Which of these parts this rank has."""
        part = 0
        for dim in self.data_dims:
            part = part * self.mesh.shape[dim] + self.mesh.coordinate[dim]
        return part

    @property
    def reduces(self) -> bool:
        """Whether `sync_gradients` has something to do."""
        return self.batch_parts > 1 or self._columns is not None

    def sync_gradients(self) -> None:
        """Sums the gradients of the parameters over the data-parallel ranks of the stage; inside
        DistributedDataParallel over other pipelines (``group=``) it takes their mean over these. Called by
        all of these ranks, once per step. What several stages of a rank hold is left to the first of them.

        ``step`` does it unless the schedule was made with ``sync_gradients=False``.
        """
        own = [each for each in self.submod.parameters() if id(each) not in self.reduced_elsewhere]
        if self.batch_parts > 1:
            sum_gradients(own, self.mesh, self.data_dims)
        if self._columns is not None:
            average_gradients(own, self._columns)

    def output_layout(self, index: int, local: LocalValue) -> Placements:
        """Placements of output `index`: those given, else those of the DTensor, else the default."""
        if local.placements is None or self.output_placements.given:
            return self.output_placements[index]
        return local.placements

    def infer(
        self, args: Sequence[Any], kwargs: Mapping[str, Any], with_grad: bool, empty: bool, data: DataUse
    ) -> Inferred:
        """Local shapes of the outputs of one micro-batch, and how to run the module for it. empty, data:
        everywhere_empty, data of `infer_outputs`."""
        rows, what = rows_of(args), f"rank {self.rank}, stage {self.stage_index}"
        peers = self.mesh.along([dim for dim in range(len(self.mesh.shape)) if dim not in self.data_dims])
        if self._example_rows is None:
            self._example_rows = rows_of(self.input_examples) if self.input_examples else rows
        known = self.output_examples is not None and rows == self._example_rows
        found = None
        if not self.is_last and not (known and data != "always"):
            try:
                found = infer_outputs(
                    self.submod,
                    args,
                    kwargs,
                    with_grad=with_grad,
                    what=what,
                    everywhere_empty=empty,
                    peers=peers,
                    data=data,
                )
            except LayoutError:
                if self.output_examples is None:
                    raise
            if found is not None and (self.output_examples is None or not found.needs_data):
                self._writes_on_inputs = self._writes_on_inputs or found.copies
                return found
        stand_in = is_empty((args, kwargs)) and needs_stand_in(
            self.submod, args, kwargs, with_grad=with_grad, peers=peers, what=what
        )
        if self.is_last:  # its outputs matter to the loss function alone
            outputs = None
            if self._may_split_loss():
                outputs = outputs_on_fakes(self.submod, args, kwargs, with_grad=with_grad)
            tensors = [each for each in tree_flatten(outputs)[0] if isinstance(each, torch.Tensor)]
            return Inferred(describe_values(tensors, with_grad), stand_in)
        try:
            examples = self._examples(rows)
        except LayoutError:
            if found is None:
                raise
            return found  # which needs data
        for index, value in enumerate(examples):
            examples[index] = value.detach().requires_grad_(with_grad and value.is_floating_point())
        return Inferred(describe_values(examples, with_grad), stand_in)

    def _may_split_loss(self) -> bool:
        """Whether the last stage must look at its outputs to know what its loss is of (sample_split.py)."""
        return not self.loss_dims_given and any(
            size > 1 and dim not in self.loss_dims for dim, size in enumerate(self.mesh.shape)
        )

    def _examples(self, rows: int | None) -> list[torch.Tensor]:
        """output_args as of a micro-batch with so many samples on this rank. Raises LayoutError where they do
        not tell."""
        examples, known = self.output_examples or (), self._example_rows
        if rows == known:
            return list(examples)
        found = []
        for value in examples:
            if not known or rows is None or value.dim() == 0 or value.shape[0] % known:
                raise LayoutError(
                    f"rank {self.rank}, stage {self.stage_index}: output_args is of {known} samples, which "
                    f"does not tell the shapes of {rows}: dimension 0 of {tuple(value.shape)} is no multiple"
                )
            size = value.shape[0] // known * rows
            found.append(torch.empty((size, *value.shape[1:]), dtype=value.dtype, device="meta"))
        return found

    def wrap(self, local: torch.Tensor, placements: Placements, shape: Sequence[int]) -> torch.Tensor:
        """The DTensor on the stage's mesh that a local shard belongs to."""
        stride = torch.empty(tuple(shape), device="meta").stride()
        return DTensor.from_local(
            local, self.mesh.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    def begin_step(self, microbatches: int) -> None:
        """Before the first action of a step that trains."""
        self._last_backward.begin_step(microbatches)

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
        self._last_backward.reshard()

    def forward(
        self,
        microbatch: int,
        inputs: list[Any],
        kwargs: Mapping[str, Any],
        keep: bool,
        way: Way,
    ) -> Any:
        """Runs the module. keep: its backward will follow. way: of the wiring for such micro-batches."""
        hooks_before = hooks_made()
        given = inputs
        buffers: list[tuple[torch.Tensor, torch.Tensor, int]] = []
        if way.stand_in:
            self._stood_in = self._stood_in or keep
            given, kwargs = stand_ins((inputs, dict(kwargs)), 1)
            buffers = [(each, each.clone(), each._version) for each in self.submod.buffers()]
        try:
            output = self.submod(*(_copied(given) if self._writes_on_inputs else given), **kwargs)
        except RuntimeError as error:
            if self._writes_on_inputs or not writes_on_input(error):
                raise
            self._writes_on_inputs = True  # from now on, on all ranks of the stage: they run the same module
            output = self.submod(*_copied(given), **kwargs)
        if way.stand_in:
            output = without_stand_in(output, way)
        for buffer, before, version in buffers:
            if buffer._version != version:
                buffer.data.copy_(before)  # a running mean, say, has seen nothing
        if keep:
            roots = (
                [] if self.is_last else list(as_tuple(output, f"rank {self.rank}, stage {self.stage_index}"))
            )
            self._kept[microbatch] = _Kept(inputs, roots, hooks_before, hooks_made() != hooks_before)
        return output

    def keep_loss(self, microbatch: int, loss: torch.Tensor) -> None:
        """The last stage goes backward from its loss."""
        kept = self._kept[microbatch]
        kept.roots = [loss]
        kept.hooked = hooks_made() != kept.hooks_before

    def backward(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """Accumulates into the parameters' gradients.

        Args:
            gradients: one per output, local shards laid out as `gradient_placements` says; None where no
                gradient comes back.

        Returns:
            One per input: its local gradient in the layout of `gradient_placements`; None for an input that
                takes none.
        """
        kept = self._kept.pop(microbatch)
        roots, seeds = self._roots(kept, gradients)
        self._last_backward.before_backward()
        if roots:
            torch.autograd.backward(roots, seeds)
        return self._input_gradients(kept)

    def backward_inputs(
        self, microbatch: int, gradients: Sequence[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        """`backward` as far as the inputs need it; `backward_weights` does the rest."""
        if self._last_backward.active:
            self._tell_whole("FSDP2 reduces gradients inside the backward")
            return self.backward(microbatch, gradients)
        kept = self._kept.pop(microbatch)
        roots, seeds = self._roots(kept, gradients)
        inputs = [value for value in self._trained(kept) if value.requires_grad]
        if roots:
            split = self._late[microbatch] = SplitBackward(roots, seeds, inputs, kept.hooked)
            split.input_gradients()
            if split.whole:
                self._tell_whole(split.whole)
        return self._input_gradients(kept)

    def _tell_whole(self, reason: str) -> None:
        """Once, that the backward is not split."""
        if not self._told:
            self._told = True
            warnings.warn(
                f"rank {self.rank}: the backward of stage {self.stage_index} is not split, so its weight "
                f"gradients are not delayed: {reason}",
                stacklevel=3,
            )

    def backward_weights(self, microbatch: int) -> None:
        """Accumulates the gradients of the weights that `backward_inputs` left."""
        split = self._late.pop(microbatch, None)
        if split is not None:
            split.weight_gradients()

    def _roots(
        self, kept: _Kept, gradients: Sequence[torch.Tensor | None]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Where the backward starts, and the gradients there."""
        roots, seeds = [], []
        for index, (root, gradient) in enumerate(zip(kept.roots, gradients, strict=True)):
            if gradient is not None and root.requires_grad:
                if isinstance(root, DTensor):
                    gradient = self.wrap(gradient, gradient_placements(tuple(root.placements)), root.shape)
                elif not self.is_last and (copies := self._copies(index)) > 1:
                    # All data-parallel ranks made this value, and what is behind it is summed over them.
                    gradient = gradient / copies
                roots.append(root)
                seeds.append(gradient)
        return roots, seeds

    def _copies(self, output: int) -> int:
        """How many data-parallel ranks have all of this output."""
        count = 1
        placements = self.output_placements[output]
        for dim in self.data_dims:
            if isinstance(placements[dim], Replicate):
                count *= self.mesh.shape[dim]
        return count

    def _trained(self, kept: _Kept) -> list[Any]:
        """The inputs that other stages made."""
        return [] if self.is_first else kept.inputs

    def _input_gradients(self, kept: _Kept) -> list[torch.Tensor | None]:
        return [self._input_gradient(index, value) for index, value in enumerate(self._trained(kept))]

    def _input_gradient(self, index: int, value: Any) -> torch.Tensor | None:
        if not value.requires_grad:
            return None
        gradient = value.grad
        value.grad = None
        if gradient is None:  # the module did not use it
            return torch.zeros_like(local_values(value))
        if isinstance(gradient, DTensor):
            gradient = gradient.redistribute(placements=gradient_placements(self.input_placements[index]))
        return local_values(gradient)

    def clear(self) -> None:
        """Drops what a step that failed had kept."""
        self._kept.clear()
        self._late.clear()
        self._stood_in = False


def _copied(values: Sequence[Any]) -> list[Any]:
    """For a module that writes on its inputs in place."""
    return [value.clone() if isinstance(value, torch.Tensor) else value for value in values]
