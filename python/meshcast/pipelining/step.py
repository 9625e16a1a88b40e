"""One step's data: micro-batches and shards of the batch, losses and outputs collected."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
from torch.distributed.pipelining.microbatch import merge_chunks
from torch.distributed.tensor.placement_types import Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_map

from meshcast.base.checks import dtype_name
from meshcast.errors import LayoutError
from meshcast.pipelining.gradients import GradientScale
from meshcast.pipelining.layouts import Placements, local_shard
from meshcast.pipelining.loss import Sharding, StepLoss, microbatch_weights, part_of
from meshcast.pipelining.microbatches import Pieces, as_it_is, cut, gathered
from meshcast.pipelining.pipeline_stage import PipelineStage
from meshcast.pipelining.shapes import local_values
from meshcast.pipelining.wiring import StageValue

__all__ = ["StepFeed"]


class StepFeed:
    """What `Runtime` asks for during one step. All arguments as in ``PipelineSchedule.step``.

    Raises LayoutError if a tensor cannot be cut into the micro-batches, or targets are missing.
    """

    def __init__(
        self,
        stage: PipelineStage,
        microbatches: int,
        args: tuple[Any, ...],
        kwargs: Mapping[str, Any],
        target: Any,
        chunk_specs: tuple[Any, Any],
        loss_fn: Callable[..., Any] | None,
        loss_kwargs: Mapping[str, Any],
        scale_grads: bool,
        keep_outputs: bool,
        pieces: Pieces,
        train: bool,
        as_torch: bool,
        typical: float,
    ) -> None:
        pieces.check(microbatches)
        self._stage = stage
        self._microbatches = microbatches
        self.keep_outputs = keep_outputs
        for name, given, cut_already in (("args", args, pieces.args), ("kwargs", kwargs, pieces.kwargs)):
            if given and cut_already is not None:
                raise LayoutError(f"step got both {name} and {name[:-1]}_mbs: give one")
        if target is not None and pieces.targets is not None:
            raise LayoutError("step got both target and target_mbs: give one")
        where = f"rank {stage.rank}, stage {stage.stage_index}"
        if stage.is_first and not (args or kwargs or pieces.args or pieces.kwargs):
            raise LayoutError(f"rank {stage.rank}: the first stage needs the batch: step(x, ...)")
        if stage.is_last and train and loss_fn is not None and target is None and pieces.targets is None:
            raise LayoutError(f"{where}: the last stage has a loss_fn and needs targets: step(..., target=y)")
        self._batch, self._target_placements = _split_by_samples(stage)
        # A stage of one rank takes DTensors as they are: their mesh joins pipelines.
        whole = as_it_is if stage.alone else gathered
        args, named, target = whole((args, dict(kwargs), target))
        arguments, keywords, self._samples = cut(args, named, microbatches, *chunk_specs, where)
        if pieces.args is not None:
            mine = pieces.args if stage.is_first else ()
            arguments = [each if isinstance(each, tuple) else (each,) for each in map(whole, mine)]
        if pieces.kwargs is not None:
            keywords = [dict(whole(each)) for each in pieces.kwargs]
        self._whole_arguments, self._whole_keywords = arguments, keywords
        self._shapes = self._all_shapes(cut_here=pieces.args is None and pieces.kwargs is None)
        self._arguments = [
            [self._argument(index, value) for index, value in enumerate(each)] for each in arguments
        ]
        self._keywords = [
            {name: self._shard(value, self._batch) for name, value in each.items()} for each in keywords
        ]
        targets: list[Any] | None = None
        if stage.is_last and pieces.targets is not None:
            targets = [whole(each) for each in pieces.targets]
        elif stage.is_last and target is not None:
            targets = [
                each[0] for each in cut((target,), {}, microbatches, None, None, f"{where}, target")[0]
            ]
        self.loss = StepLoss(
            stage,
            microbatches,
            loss_fn,
            targets and [tree_map(self._target, each) for each in targets],
            loss_kwargs,
            as_torch,
            typical,
        )
        self._scale_grads, self._as_torch = scale_grads, as_torch
        self.scale = GradientScale()

    @property
    def count(self) -> int:
        """How many micro-batches."""
        return self._microbatches

    def shapes(self, microbatch: int) -> list[Any]:
        """Of a micro-batch's arguments before they are sharded: of each tensor its size in all dimensions
        and its dtype."""
        return self._shapes[microbatch][0]

    def digests(self) -> list[str]:
        """A name for the shapes of each micro-batch, keyword arguments included."""
        names: list[str] = []
        before: Any = None
        for shapes in self._shapes:
            if shapes is not before:
                name = hashlib.blake2b(json.dumps(shapes).encode(), digest_size=8).hexdigest()
            names.append(name)
            before = shapes
        return names

    def _all_shapes(self, *, cut_here: bool) -> list[tuple[list[Any], list[Any]]]:
        """Of the arguments and of the keyword arguments. The same object for micro-batches next to each other
        that were cut alike."""
        found: list[tuple[list[Any], list[Any]]] = []
        for number in range(self._microbatches):
            if number and cut_here and self._samples[number] == self._samples[number - 1]:
                found.append(found[-1])
                continue
            given = self._whole_arguments[number] if self._whole_arguments else ()
            named = dict(sorted(self._whole_keywords[number].items())) if self._whole_keywords else {}
            found.append((_shapes_of(given), _shapes_of(named)))
        return found

    def samples(self) -> list[int]:
        """Of each micro-batch, as the first stage knows: the size of the first tensor that was cut."""
        return self._samples

    def learn_shares(
        self, inputs: Sequence[Mapping[int, StageValue]], samples: Sequence[int], alike: bool
    ) -> None:
        """What this rank counts in the step.

        Args:
            inputs: of each micro-batch, what other stages send for it; the same object for the same shapes.
            samples: of each micro-batch, on all ranks.
            alike: every micro-batch that has samples counts the same, however many they are.
        """
        stage, known = self._stage, dict[int, tuple[Fraction, Fraction]]()
        of_loss, of_stage = [], []
        for number, values in enumerate(inputs):
            key = id(values) if values else -number - 1
            if key not in known:  # worth it: this runs for every micro-batch
                shardings = self._shardings(number, values)
                # DTensors compute what all ranks of the mesh do together.
                parts = Fraction(1) if stage.use_dtensor else part_of(stage, stage.data_dims, shardings)
                known[key] = part_of(stage, stage.loss_dims, shardings), parts
            of_loss.append(known[key][0])
            of_stage.append(known[key][1])
        degree = 1 if stage.use_dtensor else stage.batch_parts
        scaled, as_torch = self._scale_grads, self._as_torch
        self.scale = GradientScale(
            of_stage,
            microbatch_weights(samples, alike or as_torch, scaled),
            degree,
            max(1, sum(each > 0 for each in samples)) if scaled else 1,
            None if as_torch else Fraction(1, degree * (self._microbatches if scaled else 1)),
        )
        self.loss.learn_parts(of_loss, self.scale)

    def _shardings(self, microbatch: int, values: Mapping[int, StageValue]) -> list[Sharding]:
        stage = self._stage
        if values:
            return [
                (each.layout.placements, each.shape, each.layout.local_shapes(each.shape)[stage.rank])
                for each in values.values()
            ]
        given = self._whole_arguments[microbatch] if self._whole_arguments else ()
        mine = self.arguments(microbatch)
        return [
            (
                stage.input_placements[index],
                value.shape,
                local_values(mine[index]).shape,
            )
            for index, value in enumerate(given)
            if isinstance(value, torch.Tensor) and value.dim()
        ]

    def arguments(self, microbatch: int) -> list[Any]:
        return self._arguments[microbatch] if self._arguments else []

    def keywords(self, microbatch: int) -> Mapping[str, Any]:
        return self._keywords[microbatch] if self._keywords else {}

    def merged(self, spec: Any) -> Any:
        """The outputs, micro-batches joined as torch.distributed.pipelining does; a list of them where they
        differ in more than their number of samples, or have none."""
        outputs = self._stage.output_chunks
        kinds = {str(tree_map(_kind, output)) for output in outputs}
        joined = len(kinds) == 1 and "('tensor',)" not in next(iter(kinds))
        return merge_chunks(outputs, spec) if joined or spec is not None else list(outputs)

    def _argument(self, index: int, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        placements = self._stage.input_placements[index]
        local = self._shard(value, placements)
        return self._stage.wrap(local, placements, value.shape) if self._stage.use_dtensor else local

    def _target(self, value: Any) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or self._stage.alone:
            return value
        placements = tuple(
            each if not isinstance(each, Shard) or each.dim < value.dim() else Replicate()
            for each in self._target_placements
        )
        local = local_shard(value, self._stage.mesh, placements)
        return self._stage.wrap(local, placements, value.shape) if self._stage.use_dtensor else local

    def _shard(self, value: Any, placements: Placements) -> Any:
        if not isinstance(value, torch.Tensor) or value.dim() == 0 or self._stage.alone:
            return value
        return local_shard(value, self._stage.mesh, placements)


def _split_by_samples(stage: PipelineStage) -> tuple[Placements, Placements]:
    """Placements of keyword arguments and of targets, where they have the dimension: as the inputs over the
    ranks that have other samples, targets also over those whose loss is that of other tokens."""
    keywords: list[Any] = []
    targets: list[Any] = []
    for dim in range(len(stage.mesh.shape)):
        cuts = [each[dim] for each in stage.input_placements.listed() if type(each[dim]) is Shard]
        by_samples = Shard(0) in cuts and dim in (*stage.data_dims, *stage.loss_dims)
        keywords.append(Shard(0) if by_samples else Replicate())
        by_tokens = cuts and not by_samples and dim in stage.loss_dims
        targets.append(cuts[0] if by_tokens else keywords[-1])
    return tuple(keywords), tuple(targets)


def _shapes_of(values: Any) -> list[Any]:
    return [
        [*value.shape, dtype_name(value.dtype)]
        for value in tree_flatten(values)[0]
        if isinstance(value, torch.Tensor)
    ]


def _kind(value: Any) -> Any:
    """What outputs of micro-batches that can be joined have in common."""
    if not isinstance(value, torch.Tensor):
        return type(value).__name__
    return ("tensor", "rows", *value.shape[1:]) if value.dim() else ("tensor",)
