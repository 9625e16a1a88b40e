"""PipelineStage: a module, its place in the pipeline and the mesh it runs on."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from meshcast import _checks
from meshcast.errors import LayoutError
from meshcast.pipelining.devices import stage_device
from meshcast.pipelining.edge import Edge, check_edges
from meshcast.pipelining.gradients import sum_gradients
from meshcast.pipelining.layouts import (
    Placements,
    StageMesh,
    ValuePlacements,
    batch_dims,
    gradient_placements,
)
from meshcast.pipelining.shapes import LocalValue, as_tuple, describe_values, infer_outputs
from meshcast.pipelining.split_backward import SplitBackward, hooks_made
from meshcast.pipelining.wrappers import LastBackward, look_through
from meshcast.plan import STRATEGIES
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
            shapes cannot be inferred.
        output_grads, input_grads, get_mesh: torch passes the metadata of DTensor gradients through these;
            here layouts follow from ``mesh`` and the placements, so they must be None. torch 2.11 has none
            of them: there ``group`` and ``dw_builder`` come in their places, which is understood.
        group: the ranks of the whole pipeline, all stages together; default: the default group.
        dw_builder: must be None; a backward is split here without help of the module.
        mesh: the ranks of this stage, any shape. None: one rank, as in torch: number ``stage_index`` of
            ``group``, or the calling rank where the group has fewer ranks than there are stages. Stages that
            share a rank share all their ranks.
        input_placements, output_placements: one list of placements for all values, or one list for each.
            Default: Shard(0) over the first mesh dimension, Replicate() over the others. The mesh dimensions
            on which an input is Shard(0) are the data-parallel ones: samples are split over them, gradients
            of parameters are summed over them.
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
        edges: Sequence[Edge] | None = None,
        use_dtensor: bool = False,
        shared_parameters: Mapping[str, str] | None = None,
        strategy: str = "auto",
        topology: Topology | None = None,
    ) -> None:
        if isinstance(output_grads, dist.ProcessGroup):
            # torch 2.11 has group and dw_builder in these places, and nothing of DTensors.
            group, dw_builder, output_grads, input_grads = output_grads, input_grads, None, None
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
                f"stage {stage_index}: dw_builder is not used here: delay_weight_grad=True of the schedule "
                "splits the backward of any module"
            )
        self.stage_index = stage_index
        self.num_stages = num_stages
        self.device = stage_device(f"stage {stage_index}", device, mesh)
        self.group = group
        self.rank = dist.get_rank()
        self.mesh = _stage_mesh(stage_index, num_stages, group, mesh, self.rank)
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
        self.strategy = _checks.choice(f"stage {stage_index}: strategy", strategy, STRATEGIES)
        self.topology = topology
        self.batch_dims = batch_dims(self.input_placements)
        self.submod = look_through(submodule, self.mesh, self.batch_dims, f"stage {stage_index}")
        self._last_backward = LastBackward(self.submod)
        self.shared = _shared_parameters(stage_index, shared_parameters or {}, self.submod)
        # The stages of each shared parameter, ascending; the schedule tells once the ranks agreed.
        self.sharing: Mapping[str, Sequence[int]] | None = None
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
        for dim in self.batch_dims:
            parts *= self.mesh.shape[dim]
        return parts

    @property
    def batch_part(self) -> int:
        """Which of these parts this rank has."""
        part = 0
        for dim in self.batch_dims:
            part = part * self.mesh.shape[dim] + self.mesh.coordinate[dim]
        return part

    def sync_gradients(self) -> None:
        """Sums the gradients of the parameters over the data-parallel ranks of the stage. Called by all of
        them, once per step.

        ``step`` does it unless the schedule was made with ``sync_gradients=False``.
        """
        if self.batch_parts > 1:
            sum_gradients(list(self.submod.parameters()), self.mesh.device_mesh, self.batch_dims)

    def output_layout(self, index: int, local: LocalValue) -> Placements:
        """Placements of output `index`: those given, else those of the DTensor, else the default."""
        if local.placements is None or self.output_placements.given:
            return self.output_placements[index]
        return local.placements

    def infer(self, args: Sequence[Any], kwargs: Mapping[str, Any], with_grad: bool) -> list[LocalValue]:
        """Local shapes of the outputs of one micro-batch."""
        what = f"rank {self.rank}, stage {self.stage_index}"
        if self.output_examples is not None:
            examples = [
                value.detach().requires_grad_(with_grad and value.is_floating_point())
                for value in self.output_examples
            ]
            return describe_values(examples, with_grad)
        return infer_outputs(self.submod, args, kwargs, with_grad=with_grad, what=what)

    def wrap(self, local: torch.Tensor, placements: Placements, shape: Sequence[int]) -> torch.Tensor:
        """The DTensor on the stage's mesh that a local shard belongs to."""
        stride = torch.empty(tuple(shape), device="meta").stride()
        return DTensor.from_local(
            local, self.mesh.device_mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride
        )

    def begin_step(self, microbatches: int) -> None:
        """Before the first action of a step that trains."""
        self._last_backward.begin_step(microbatches)

    def forward(self, microbatch: int, inputs: list[Any], kwargs: Mapping[str, Any], keep: bool) -> Any:
        """Runs the module. keep: its backward will follow."""
        hooks_before = hooks_made()
        output = self.submod(*inputs, **kwargs)
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
        for root, gradient in zip(kept.roots, gradients, strict=True):
            if gradient is not None and root.requires_grad:
                if isinstance(root, DTensor):
                    gradient = self.wrap(gradient, gradient_placements(tuple(root.placements)), root.shape)
                roots.append(root)
                seeds.append(gradient)
        return roots, seeds

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


def local_values(value: torch.Tensor) -> torch.Tensor:
    """The local tensor of a DTensor or plain tensor, its values in memory: a functional collective (there are
    some inside tensor-parallel modules) returns a stand-in that has none until it is waited for."""
    local = value.to_local() if isinstance(value, DTensor) else value
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local


def _stage_mesh(
    stage_index: int, num_stages: int, group: dist.ProcessGroup | None, mesh: DeviceMesh | None, rank: int
) -> StageMesh:
    if mesh is not None:
        return StageMesh(mesh.mesh, rank, mesh)
    ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
    if len(ranks) > num_stages:
        raise LayoutError(
            f"stage {stage_index}: without mesh= the group has at most one rank per stage: expected up to "
            f"{num_stages} ranks, found {len(ranks)}"
        )
    return StageMesh(torch.tensor([ranks[stage_index] if len(ranks) == num_stages else rank]), rank)


def _shared_parameters(
    stage: int, named: Mapping[str, str], module: torch.nn.Module
) -> dict[str, torch.nn.Parameter]:
    """The parameters by key. Raises LayoutError naming the one that is missing or laid out over ranks."""
    parameters = dict(module.named_parameters(remove_duplicate=False))
    for key, name in named.items():
        if name not in parameters:
            raise LayoutError(
                f"stage {stage}, shared parameter {key!r}: the module has no parameter {name!r}"
            )
        if isinstance(parameters[name].data, DTensor):
            raise LayoutError(
                f"stage {stage}, shared parameter {key!r}: {name!r} is a DTensor; a shared parameter must be "
                "whole on every rank of its stages"
            )
    return {key: parameters[name] for key, name in named.items()}
