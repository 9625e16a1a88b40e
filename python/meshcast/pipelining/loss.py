"""The loss of a step: each rank's share of it, where its backward starts, and what all ranks learn of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement, Shard
from torch.utils._pytree import tree_flatten

from meshcast.errors import LayoutError
from meshcast.pipelining.pipeline_stage import PipelineStage

__all__ = ["Sharding", "StepLoss"]

# Of an input of the last stage: its placements, its global shape and this rank's.
Sharding = tuple[Sequence[Placement], Sequence[int], Sequence[int]]


class StepLoss:
    """Losses of one step on one rank of the last stage.

    A loss function returns one of two things:

    - the mean over its samples (or tokens). The step's loss is the mean over all: that of a rank counts by
      its part of the micro-batch, that of a micro-batch by its samples, or all alike (`learn_weights`).
    - ``(sum, weight)``. The step's loss is the sum of all sums over the sum of all weights, so that gradients
      are those of the sums, divided once when the step ends.

    Args:
        targets: of each micro-batch, this rank's; None without any.
        scale: gradients are those of the mean over micro-batches; else of the sum.
        as_torch: losses are returned as the function made them, and gradients scaled once, at the end.
    """

    def __init__(
        self,
        stage: PipelineStage,
        microbatches: int,
        loss_fn: Callable[..., Any] | None,
        targets: Sequence[Any] | None,
        loss_kwargs: Mapping[str, Any],
        scale: bool,
        as_torch: bool,
    ) -> None:
        self._stage = stage
        self._loss_fn = loss_fn
        self.targets = targets
        self._loss_kwargs = loss_kwargs
        self._scale = scale
        self._as_torch = as_torch
        self._parts = [1.0] * microbatches  # of a micro-batch's samples and tokens, this rank's
        self._weights = [1.0 / microbatches] * microbatches  # of the micro-batch in the step
        self._taken: list[tuple[int, torch.Tensor, Any]] = []  # micro-batch, mean or sum, weight of a sum
        self.losses: dict[int, torch.Tensor] = {}  # what backwards start from
        self._pairs = self._means = 0
        self._is_global = False  # DTensor arithmetic has gone over all ranks already

    @property
    def weighted(self) -> bool | None:
        """Whether the loss function returns pairs; None where this rank had no samples to tell from."""
        return self._pairs > 0 if self._pairs or self._means else None

    def learn_part(self, microbatch: int, inputs: Sequence[Sharding]) -> None:
        """This rank's part of a micro-batch, by how inputs are cut over the ranks with other losses."""
        stage = self._stage
        open_dims = {dim for dim in stage.loss_dims if stage.mesh.shape[dim] > 1}
        mine, all_ranks = 1, 1
        for placements, shape, local in inputs:
            found = {dim for dim in open_dims if isinstance(placements[dim], Shard)}
            for along in {placements[dim].dim % len(shape) for dim in found}:  # type: ignore[attr-defined]
                mine *= local[along]
                all_ranks *= shape[along]
            open_dims -= found
        for dim in open_dims:  # cut inside the module: in equal parts, as far as can be known
            all_ranks *= stage.mesh.shape[dim]
        self._parts[microbatch] = mine / max(1, all_ranks)

    def learn_part_as(self, microbatch: int, other: int) -> None:
        """That of another micro-batch of the same shapes."""
        self._parts[microbatch] = self._parts[other]

    def learn_weights(self, samples: Sequence[int], alike: bool) -> None:
        """Once all parts are known. samples: of each micro-batch, on all ranks. alike: every micro-batch that
        has samples counts the same, however many they are."""
        counts = [min(each, 1) for each in samples] if alike else samples
        self._weights = [each / max(1, sum(counts)) for each in counts]
        self._parts = [part if each else 0.0 for part, each in zip(self._parts, counts, strict=True)]

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
            loss, self._parts[microbatch], self._is_global = loss.full_tensor(), 1.0, True
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

    def seed(self, microbatch: int, loss: torch.Tensor) -> torch.Tensor:
        """d(step's loss) / d(this rank's loss); of sums it lacks the division by the weight of the step."""
        if self._pairs or self._as_torch:
            return torch.ones_like(loss)
        count = 1 if self._scale else sum(weight > 0 for weight in self._weights)
        return torch.full_like(loss, self._parts[microbatch] * (self._weights[microbatch] * count))

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
            losses *= losses.new_tensor([self._parts[microbatch] for microbatch, _, _ in self._taken])
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
