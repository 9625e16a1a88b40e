"""The loss of a step: each rank's share of it, where its backward starts, and what all ranks learn of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard
from torch.utils._pytree import tree_flatten

from meshcast.errors import LayoutError
from meshcast.pipelining.data_parallel import GradientScale
from meshcast.pipelining.edge import RankStage
from meshcast.pipelining.parallel import local_values

__all__ = ["Sharding", "StepLoss", "microbatch_weights", "part_of"]

# An input of the last stage: its placements, its global shape and this rank's.
Sharding = tuple[Sequence[Placement], Sequence[int], Sequence[int]]


def microbatch_weights(samples: Sequence[int], alike: bool, scale: bool) -> list[Fraction]:
    """The weight of each micro-batch in the step: its part of the samples; alike: the same for all that have
    some; without scale: 1, for gradients of the sum over micro-batches. Without samples it is 0."""
    counts = [min(each, 1) for each in samples] if alike or not scale else samples
    return [Fraction(each, max(1, sum(counts)) if scale else 1) for each in counts]


def part_of(stage: RankStage, dims: Sequence[int], inputs: Sequence[Sharding]) -> Fraction:
    """This rank's part of a micro-batch's samples and tokens, by how inputs are cut over these dimensions of
    the stage's mesh."""
    open_dims = {dim for dim in dims if stage.mesh.shape[dim] > 1}
    mine, all_ranks = 1, 1
    for placements, shape, local in inputs:
        found = {dim for dim in open_dims if isinstance(placements[dim], Shard)}
        for along in {placements[dim].dim % len(shape) for dim in found}:  # type: ignore[attr-defined]
            mine *= local[along]
            all_ranks *= shape[along]
        open_dims -= found
    for dim in open_dims:  # cut inside the module: in equal parts, as far as can be known
        all_ranks *= stage.mesh.shape[dim]
    return Fraction(mine, max(1, all_ranks))


class StepLoss:
    """Losses of one step on one rank of the last stage.

    A loss function returns one of two things:

    - the mean over its samples (or tokens). The step's loss is the mean over all: that of a rank counts by
      its part of the micro-batch, that of a micro-batch by its weight (`microbatch_weights`).
    - ``(sum, weight)``. The step's loss is the sum of all sums over the sum of all weights, so that gradients
      are those of the sums, divided once when the step ends.

    Args:
        targets: of each micro-batch, this rank's; None without any.
        weight_fn: see `PipelineSchedule`.

    Attributes:
        typical: what sums are divided by before they go backward, the same on all ranks of the stage: the
            mean weight of a micro-batch, as far as it is known. An error in it is corrected when the step
            ends.
    """

    def __init__(
        self,
        stage: RankStage,
        microbatches: int,
        loss_fn: Callable[..., Any] | None,
        targets: Sequence[Any] | None,
        loss_kwargs: Mapping[str, Any],
        weight_fn: Callable[..., Any] | None,
    ) -> None:
        self._stage = stage
        self._loss_fn = loss_fn
        self.targets = targets
        self._loss_kwargs = loss_kwargs
        self._as_torch = False
        self._weight_fn = weight_fn
        self.typical = 1.0
        self._parts = [Fraction(1)] * microbatches  # of a micro-batch's samples and tokens, this rank's
        self._gradients = GradientScale()
        self._taken: list[tuple[int, torch.Tensor, Any]] = []  # micro-batch, mean or sum, weight of a sum
        self.losses: dict[int, torch.Tensor] = {}  # the values that backwards start from
        self._pairs = self._means = 0
        self._is_global = False  # DTensor arithmetic has covered all ranks already

    @property
    def weighted(self) -> bool | None:
        """True if the loss function returns pairs; None if this rank had no samples."""
        return self._pairs > 0 if self._pairs or self._means else None

    @property
    def knows_weight(self) -> bool:
        """Returns whether ``weight_fn`` says the weights of targets before the step."""
        return self._weight_fn is not None

    def weight_of(self, target: Any) -> float:
        """The weight of a micro-batch's target on this rank, by ``weight_fn``."""
        assert self._weight_fn is not None
        weight = self._weight_fn(target, **self._loss_kwargs)
        if isinstance(weight, torch.Tensor) and weight.numel() != 1:
            raise LayoutError(
                "weight_fn must return a number or a tensor with one element, found one of shape "
                f"{tuple(weight.shape)}"
            )
        return float(local_values(weight) if isinstance(weight, torch.Tensor) else weight)

    def learn_parts(self, parts: Sequence[Fraction], scale: GradientScale, as_torch: bool) -> None:
        """For each micro-batch, this rank's part of its samples and tokens; and the scale of the stage.
        as_torch: losses are returned as the function made them, and gradients scaled once, at the end."""
        weighed = zip(parts, scale.weights, strict=True)
        self._parts = [part if weight else Fraction(0) for part, weight in weighed]
        self._gradients, self._as_torch = scale, as_torch

    def take(self, microbatch: int, output: Any) -> torch.Tensor | None:
        """Computes the loss of the last stage's output, where there is a loss function and a target. Returns
        what its backward starts from."""
        if self._loss_fn is None or self.targets is None:
            return None
        if self._parts[microbatch] == 0:
            loss = self.losses[microbatch] = _of_no_samples(output)
            self._taken.append((microbatch, loss.detach(), 0.0))
            return loss
        found = self._loss_fn(output, self.targets[microbatch], **self._loss_kwargs)
        loss, weight = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
        self._pairs += weight is not None
        self._means += weight is None
        if self._pairs and self._means:
            raise LayoutError(
                "loss_fn returned a pair (sum, weight) for some micro-batches and not for others"
            )
        if isinstance(loss, DTensor) and not self._as_torch:
            loss, self._parts[microbatch], self._is_global = loss.full_tensor(), Fraction(1), True
        if isinstance(weight, DTensor):
            weight = weight.full_tensor()
        for value in [loss, weight] if isinstance(weight, torch.Tensor) else [loss]:
            if not isinstance(value, torch.Tensor) or value.numel() != 1:
                raise LayoutError(
                    "loss_fn must return a tensor with one element, or a pair (sum, weight) of them, found "
                    f"{getattr(value, 'shape', type(value).__name__)}"
                )
        # As torch's, a loss that is returned needs a gradient; but it does not keep the graph alive.
        kept = loss.detach().requires_grad_(self._as_torch and loss.requires_grad)
        self._taken.append((microbatch, kept, weight))
        self.losses[microbatch] = loss
        return loss

    def seed(self, microbatch: int, ratio: Fraction) -> float:
        """The value that a rank's backward starts from. ratio: `GradientScale.ratio`, by which its gradients
        are multiplied afterwards. A sum is divided by the weight that micro-batches have on average, as far
        as that is known."""
        scale = self._gradients
        if not scale.parts or not ratio:
            return 1.0
        if self._pairs:
            return 1 / (self.typical * float(ratio * scale.sums))
        return float(self._parts[microbatch] * scale.weights[microbatch] * scale.unit / ratio)

    def finish(self) -> tuple[list[torch.Tensor], float | None]:
        """The mean loss of each micro-batch over all its samples, and the weight of the step, None for means.
        Called by all ranks of the last stage, once all losses are there."""
        if not self._taken:
            return [], None
        if self._as_torch and not self._pairs:
            return [loss for _, loss, _ in self._taken], None
        kind = self._taken[0][1]
        losses = torch.stack([loss.detach().reshape(()) for _, loss, _ in self._taken]).double()
        weights = torch.zeros_like(losses)
        if self._pairs:
            each = [torch.as_tensor(weight, device=kind.device).reshape(()) for _, _, weight in self._taken]
            weights = torch.stack([weight.double() for weight in each])
        else:
            losses *= losses.new_tensor([float(self._parts[microbatch]) for microbatch, _, _ in self._taken])
        over = [
            dim for dim in self._stage.loss_dims if self._stage.mesh.shape[dim] > 1 and not self._is_global
        ]
        if over:
            known = torch.cat([losses.new_tensor([self._pairs, self._means]), losses, weights])
            for dim in over:
                dist.all_reduce(known, group=self._stage.mesh.device_mesh.get_group(dim))
            losses, weights = known[2:].chunk(2)
            if self.weighted is not False:
                self._pairs = self._pairs or int(known[0])
                if self._pairs and known[1] > 0:
                    raise LayoutError("loss_fn returned a pair (sum, weight) on some ranks and not on others")
        if self._pairs:
            losses = torch.where(weights == 0, losses, losses / weights)
        return list(losses.to(kind.dtype).unbind()), float(weights.sum()) if self._pairs else None


def _of_no_samples(output: Any) -> torch.Tensor:
    """Zero, but connected to the output, so that this rank's backward runs as on the others."""
    parts = [
        value.sum() * 0
        for value in tree_flatten(output)[0]
        if isinstance(value, torch.Tensor) and value.is_floating_point()
    ]
    if not parts:
        raise LayoutError("the last stage returned no floating-point tensor to take a loss of")
    return torch.stack(parts).sum()
