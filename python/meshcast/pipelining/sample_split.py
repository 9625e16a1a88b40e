"""Checks that a stage can know which of its mesh dimensions split samples or tokens, before anything moves.

Over such a dimension every rank computes a part of the loss, so gradients are sums over its ranks. Over the
others (tensor parallelism) all ranks compute the same loss, and modules see to it that gradients are whole. A
wrong guess would be a wrong gradient, silently.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Replicate, Shard

from meshcast.errors import LayoutError
from meshcast.layout import Layout
from meshcast.pipelining.shapes import LocalValue

if TYPE_CHECKING:
    from meshcast.pipelining.pipeline_stage import PipelineStage

__all__ = ["check_split"]


class _Value(Protocol):
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def layout(self) -> Layout: ...
    @property
    def requires_grad(self) -> bool: ...


def check_split(
    stage: PipelineStage,
    inputs: Mapping[int, _Value],
    outputs: Sequence[_Value],
    last_outputs: Sequence[LocalValue] | None,
) -> None:
    """Raises LayoutError naming ``data_dims`` or ``loss_dims`` where the stage cannot know.

    Args:
        inputs: those that other stages send.
        outputs: what leaves the stage; empty for the last.
        last_outputs: of the last stage, where they could be inferred.
    """
    for dim, size in enumerate(stage.mesh.shape):
        if size == 1:
            continue
        cut = [index for index, value in inputs.items() if _is_cut(value.layout.placements[dim])]
        if not stage.data_dims_given and dim not in stage.data_dims:
            _check_data_dim(stage, dim, cut, inputs, outputs)
        if not stage.loss_dims_given and dim not in stage.loss_dims:
            for index in cut or inputs:
                _check_loss_dim(stage, dim, inputs[index], index, last_outputs or ())


def _check_data_dim(
    stage: PipelineStage,
    dim: int,
    cut: Sequence[int],
    inputs: Mapping[int, _Value],
    outputs: Sequence[_Value],
) -> None:
    where = f"rank {stage.rank}, stage {stage.stage_index}"
    whole = [
        index
        for index, value in inputs.items()
        if value.requires_grad and isinstance(value.layout.placements[dim], Replicate)
    ]
    if cut and whole and not _has_tensor_parallel_parameters_only(stage, dim):
        raise LayoutError(
            f"{where}: over dimension {dim} of its mesh input {cut[0]} is cut, input {whole[0]} whole. The "
            f"gradient of input {whole[0]} is a sum over these ranks if they compute different parts of the "
            "loss, and whole on each if they are tensor parallel: name the dimensions over which samples or "
            f"tokens are split, data_dims={[*stage.data_dims, dim]}, or data_dims={stage.data_dims}"
        )
    split = [index for index, value in enumerate(outputs) if value.layout.placements[dim] == Shard(0)]
    if (
        split
        and all(isinstance(each[dim], Replicate) for each in stage.input_placements.listed())
        and not stage.use_dtensor
        and not _has_tensor_parallel_parameters_only(stage, dim)
    ):
        raise LayoutError(
            f"{where}: over dimension {dim} of its mesh all inputs are whole, output {split[0]} is split by "
            "samples: name the dimensions over which samples are split, "
            f"data_dims={[*stage.data_dims, dim]}, or data_dims={stage.data_dims} if every rank "
            "computes the gradients of all samples"
        )


def _check_loss_dim(
    stage: PipelineStage, dim: int, value: _Value, index: int, outputs: Sequence[LocalValue]
) -> None:
    """Raises LayoutError where, by their sizes, the outputs that the loss is taken of are this rank's part
    of the input."""
    placement = value.layout.placements[dim]
    tokens = 1 if len(value.shape) > 2 else 0  # else dimension 1 is of features
    dims = [placement.dim % len(value.shape)] if isinstance(placement, Shard) else range(tokens + 1)
    # Other dimensions of the mesh may cut the value as well: a data-parallel rank has its samples anyhow.
    whole = _local_shape(stage, value, dim, Replicate())
    for along in dims if value.shape else ():
        part = _local_shape(stage, value, dim, Shard(along))
        for output in outputs:
            if (
                output.placements is None
                and len(output.shape) > along
                and output.shape[along] == part[along] != whole[along]
            ):
                both = [*stage.loss_dims, dim]
                raise LayoutError(
                    f"rank {stage.rank}, stage {stage.stage_index}: over dimension {dim} of the mesh input "
                    f"{index} is {placement}, and the loss is taken of outputs that are this rank's part. "
                    f"If every rank's loss is that of its own part, give loss_dims={both}, and the same "
                    "data_dims= where parameters are whole on these ranks (context parallelism, modules that "
                    f"take their part by themselves); if all have the same loss, loss_dims={stage.loss_dims}"
                )


def _local_shape(stage: PipelineStage, value: _Value, dim: int, placement: Placement) -> tuple[int, ...]:
    """The shape of the value on this rank, if `placement` were its placement over dimension `dim`."""
    others = value.layout.placements
    placements = (*others[:dim], placement, *others[dim + 1 :])
    return stage.mesh.layout(placements).local_shapes(value.shape)[stage.rank]


def _is_cut(placement: object) -> bool:
    return isinstance(placement, Shard) and placement.dim != 0


def _has_tensor_parallel_parameters_only(stage: PipelineStage, dim: int) -> bool:
    """Returns whether every trained parameter is a DTensor over the ranks along the dimension."""
    along = stage.mesh.along([dim])
    return all(
        isinstance(parameter.data, DTensor)
        and set(parameter.data.device_mesh.mesh.flatten().tolist()).issuperset(along)
        for parameter in stage.submod.parameters()
        if parameter.requires_grad
    )
