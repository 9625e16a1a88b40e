"""One step's data: a batch cut into micro-batches and shards, losses and outputs collected."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.pipelining.microbatch import (
    TensorChunkSpec,
    merge_chunks,
    split_args_kwargs_into_chunks,
)
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_map

from meshcast.errors import LayoutError
from meshcast.pipelining.layouts import Placements, local_shard
from meshcast.pipelining.stage import PipelineStage
from meshcast.pipelining.wiring import Value

__all__ = ["Pieces", "StepFeed"]


@dataclass(frozen=True, slots=True)
class Pieces:
    """Arguments, keyword arguments and targets that come as micro-batches already; None where they come
    whole."""

    args: Sequence[Any] | None = None
    kwargs: Sequence[Mapping[str, Any]] | None = None
    targets: Sequence[Any] | None = None

    def check(self, microbatches: int) -> None:
        """Raises LayoutError naming the one that does not have a piece for each micro-batch."""
        for name, given in (
            ("arg_mbs", self.args),
            ("kwarg_mbs", self.kwargs),
            ("target_mbs", self.targets),
        ):
            if given is not None and len(given) != microbatches:
                raise LayoutError(
                    f"{name} must have one entry for each of the {microbatches} micro-batches, "
                    f"found {len(given)}"
                )


class StepFeed:
    """What `Runtime` asks for during one step. All arguments as in ``PipelineSchedule.step``.

    Raises LayoutError if a tensor cannot be cut into the micro-batches.
    """

    def __init__(
        self,
        stage: PipelineStage,
        microbatches: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        chunk_specs: tuple[Any, Any],
        loss_fn: Callable[..., torch.Tensor] | None,
        loss_kwargs: Mapping[str, Any],
        scale_grads: bool,
        keep_outputs: bool,
        pieces: Pieces,
    ) -> None:
        pieces.check(microbatches)
        self._stage = stage
        self._microbatches = microbatches
        self._loss_fn = loss_fn
        self._loss_kwargs = loss_kwargs
        self._scale = 1.0 / microbatches if scale_grads else 1.0
        self._keep_outputs = keep_outputs
        self._outputs: list[Any] = []
        self._losses: list[tuple[int, torch.Tensor]] = []  # micro-batch, loss
        self._shares = [1.0] * microbatches
        self._shared_inputs: Mapping[int, Value] | None = None  # those whose share was learnt last
        self._mean_is_global = False
        for name, whole, cut in (("args", args, pieces.args), ("kwargs", kwargs, pieces.kwargs)):
            if whole and cut is not None:
                raise LayoutError(f"step got both {name} and {name[:-1]}_mbs: give one")
        if target is not None and pieces.targets is not None:
            raise LayoutError("step got both target and target_mbs: give one")
        if stage.is_first and not (args or kwargs or pieces.args or pieces.kwargs):
            raise LayoutError(f"rank {stage.rank}: the first stage needs the batch: step(x, ...)")
        args_spec, kwargs_spec = chunk_specs
        batch = tuple(dim in stage.batch_dims for dim in range(len(stage.mesh.shape)))
        self._batch: Placements = tuple(Shard(0) if split else Replicate() for split in batch)
        arguments, keywords = self._cut(args, dict(kwargs), args_spec, kwargs_spec)
        if pieces.args is not None:
            given = pieces.args if stage.is_first else ()
            arguments = [each if isinstance(each, tuple) else (each,) for each in map(_whole, given)]
        if pieces.kwargs is not None:
            keywords = [dict(_whole(each)) for each in pieces.kwargs]
        self._whole_arguments, self._whole_keywords = arguments, keywords
        self._arguments = [
            [self._argument(index, value) for index, value in enumerate(each)] for each in arguments
        ]
        self._keywords = [
            {name: self._shard(value, self._batch, name) for name, value in each.items()} for each in keywords
        ]
        self._targets: list[Any] | None = None
        targets = None if pieces.targets is None else [(_whole(each),) for each in pieces.targets]
        if target is not None:
            targets = list(self._cut((target,), {}, None, None)[0])
        if targets is not None and stage.is_last:
            self._targets = [
                tree_map(lambda value: self._shard(value, self._batch, "target"), each[0]) for each in targets
            ]

    def shapes(self, microbatch: int, *, keywords: bool = False) -> list[Any]:
        """Of the arguments of a micro-batch before they are sharded, also of the keyword arguments: of each
        tensor its size in every dimension and its dtype."""
        given: list[Any] = [self._whole_arguments[microbatch] if self._whole_arguments else ()]
        if keywords and self._whole_keywords:
            given.append(dict(sorted(self._whole_keywords[microbatch].items())))
        return [
            [*value.shape, str(value.dtype).removeprefix("torch.")]
            for value in tree_flatten(given)[0]
            if isinstance(value, torch.Tensor)
        ]

    def learn_share(self, microbatch: int, inputs: Mapping[int, Value]) -> None:
        """Which part of a micro-batch's samples this rank has: the weight of its loss in the global mean.

        inputs: what other stages send for it; the same object for micro-batches of the same shapes.
        """
        stage = self._stage
        if inputs and inputs is self._shared_inputs:  # worth it: this runs for every micro-batch
            self._shares[microbatch] = self._shares[microbatch - 1]
            return
        self._shared_inputs = inputs
        for index, value in inputs.items():
            if Shard(0) in stage.input_placements[index]:
                rows = value.layout.local_shapes(value.shape)[stage.rank][0]
                self._shares[microbatch] = rows / max(1, value.shape[0])
                return
        for index, value in enumerate(self._whole_arguments[microbatch] if self._whole_arguments else ()):
            if isinstance(value, torch.Tensor) and Shard(0) in stage.input_placements[index]:
                local = self._arguments[microbatch][index]
                rows = local.to_local().shape[0] if isinstance(local, DTensor) else local.shape[0]
                self._shares[microbatch] = rows / max(1, value.shape[0])
                return

    def arguments(self, microbatch: int) -> list[Any]:
        return self._arguments[microbatch] if self._arguments else []

    def keywords(self, microbatch: int) -> Mapping[str, Any]:
        return self._keywords[microbatch] if self._keywords else {}

    def output(self, microbatch: int, output: Any) -> torch.Tensor | None:
        """Computes the loss of the last stage's output, where there is a loss function and a target."""
        if self._keep_outputs:
            self._outputs.append(
                tree_map(lambda value: value.detach() if isinstance(value, torch.Tensor) else value, output)
            )
        if self._loss_fn is None:
            return None
        if self._targets is None:
            if torch.is_grad_enabled():
                raise LayoutError("the last stage has a loss_fn and needs targets: step(..., target=y)")
            return None
        loss = (
            self._empty_loss(output)
            if self._shares[microbatch] == 0
            else self._loss_fn(output, self._targets[microbatch], **self._loss_kwargs)
        )
        if isinstance(loss, DTensor):  # DTensor arithmetic has taken the mean over all ranks already
            loss, self._shares[microbatch] = loss.full_tensor(), 1.0
            self._mean_is_global = True
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            raise LayoutError(
                "loss_fn must return a tensor with one element, found "
                f"{getattr(loss, 'shape', type(loss).__name__)}"
            )
        self._losses.append((microbatch, loss.detach()))
        return loss

    def seed(self, microbatch: int, loss: torch.Tensor) -> torch.Tensor:
        """d(step's loss) / d(this rank's loss): its share of the samples, over the micro-batches."""
        return torch.full_like(loss, self._shares[microbatch] * self._scale)

    def mean_losses(self) -> list[torch.Tensor]:
        """Loss of each micro-batch over all its samples. Called by all ranks of the last stage."""
        if not self._losses:
            return []
        losses = torch.stack([loss.reshape(()) for _, loss in self._losses])
        if not self._mean_is_global:
            losses *= losses.new_tensor([self._shares[microbatch] for microbatch, _ in self._losses])
            for dim in self._stage.batch_dims:
                if self._stage.mesh.shape[dim] > 1:
                    dist.all_reduce(losses, group=self._stage.mesh.device_mesh.get_group(dim))
        return list(losses.unbind())

    def merged(self, spec: Any) -> Any:
        """The outputs, micro-batches joined as torch.distributed.pipelining does; a list of them where they
        differ in more than their number of samples."""
        kinds = {str(tree_map(_kind, output)) for output in self._outputs}
        return merge_chunks(self._outputs, spec) if len(kinds) == 1 else list(self._outputs)

    @property
    def count(self) -> int:
        """How many micro-batches."""
        return self._microbatches

    @staticmethod
    def _empty_loss(output: Any) -> torch.Tensor:
        """The loss of no samples: zero, but connected to the output, so that this rank's backward runs as on
        the others."""
        parts = [
            value.sum() * 0
            for value in tree_flatten(output)[0]
            if isinstance(value, torch.Tensor) and value.is_floating_point()
        ]
        if not parts:
            raise LayoutError("the last stage returned no floating-point tensor to take a loss of")
        return torch.stack(parts).sum()

    def _cut(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], args_spec: Any, kwargs_spec: Any
    ) -> tuple[Sequence[tuple[Any, ...]], Sequence[dict[str, Any]]]:
        """Micro-batches of whole values. DTensors are gathered: a micro-batch is the same rows whatever the
        mesh."""
        if not args and not kwargs:
            return [], []
        args, kwargs = _whole((args, kwargs))
        self._check_divides(args, args_spec)
        self._check_divides(
            tuple(kwargs.values()),
            None if kwargs_spec is None else tuple(kwargs_spec[name] for name in kwargs),
        )
        pieces, named = split_args_kwargs_into_chunks(
            args, kwargs, self._microbatches, args_spec, kwargs_spec
        )
        if len(pieces) != self._microbatches:  # values without tensors are not cut: they are the same for all
            pieces, named = [args] * self._microbatches, [kwargs] * self._microbatches
        return pieces, named

    def _check_divides(self, values: tuple[Any, ...], specs: Any) -> None:
        for index, value in enumerate(values):
            spec = TensorChunkSpec(0) if specs is None else specs[index]
            for tensor in tree_flatten(value)[0]:
                if not isinstance(tensor, torch.Tensor) or not isinstance(spec, TensorChunkSpec):
                    continue
                size = tensor.shape[spec.split_dim] if tensor.dim() > spec.split_dim else 0
                if size == 0 or size % self._microbatches:
                    raise LayoutError(
                        f"rank {self._stage.rank}, stage {self._stage.stage_index}: "
                        f"{self._microbatches} micro-batches do not divide "
                        f"dimension {spec.split_dim} of a tensor of shape {tuple(tensor.shape)}; "
                        "every micro-batch must have the same size",
                        rank=self._stage.rank,
                        op="pipeline",
                    )

    def _argument(self, index: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        placements = self._stage.input_placements[index]
        local = self._shard(value, placements, f"argument {index}")
        return self._stage.wrap(local, placements, value.shape) if self._stage.use_dtensor else local

    def _shard(self, value: Any, placements: Placements, what: str) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if value.dim() == 0:
            return value
        local = local_shard(value, self._stage.mesh, placements)
        if self._stage.use_dtensor and what == "target":
            return self._stage.wrap(local, placements, value.shape)
        return local


def _whole(values: Any) -> Any:
    """The same with DTensors gathered."""
    return tree_map(lambda value: value.full_tensor() if isinstance(value, DTensor) else value, values)


def _kind(value: Any) -> Any:
    """What outputs of micro-batches that can be joined have in common."""
    return ("tensor", *value.shape[1:]) if isinstance(value, torch.Tensor) else type(value).__name__
