"""Data-parallel wrappers around a stage's module: DistributedDataParallel and FSDP2.

The pipeline scales each rank's loss by its share of the samples and *sums* gradients over the data-parallel
ranks of a stage, once per step. Both wrappers would average, and after every backward: DDP is looked through
(the pipeline does its work), FSDP2 is told to sum and to reduce in the last backward of a step only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel

from meshcast.errors import LayoutError
from meshcast.pipelining.layouts import StageMesh

__all__ = ["LastBackward", "look_through"]


def look_through(module: torch.nn.Module, mesh: StageMesh, batch_dims: Sequence[int], what: str) -> Any:
    """The module that computes. Raises LayoutError if a DDP or FSDP2 module reduces over other ranks than
    those that the stage splits its samples over."""
    if isinstance(module, DistributedDataParallel):
        ranks = dist.get_process_group_ranks(module.process_group)
        _check_ranks(ranks, mesh, batch_dims, f"{what}: DistributedDataParallel")
        return module.module
    if isinstance(module, FSDPModule):
        for part in module.modules():
            if not isinstance(part, FSDPModule):
                continue
            for parameter in part.parameters(recurse=False):
                placed = getattr(parameter, "device_mesh", None)
                if placed is not None and placed.ndim == 1:
                    _check_ranks(placed.mesh.tolist(), mesh, batch_dims, f"{what}: FSDP2")
    return module


def _check_ranks(ranks: Sequence[int], mesh: StageMesh, batch_dims: Sequence[int], what: str) -> None:
    expected = mesh.along(batch_dims)
    if sorted(ranks) != sorted(expected):
        raise LayoutError(
            f"{what} reduces gradients over ranks {sorted(ranks)}, but the stage splits its samples over "
            f"ranks {sorted(expected)}: give the stage the same mesh= and input_placements="
        )


class LastBackward:
    """Tells FSDP2 which backward of a step is the last. Does nothing for other modules."""

    def __init__(self, module: Any) -> None:
        self._module: FSDPModule | None = module if isinstance(module, FSDPModule) else None
        self._left = 0
        if self._module is not None:
            for part in module.modules():
                if isinstance(part, FSDPModule):
                    part.set_gradient_divide_factor(1.0)

    @property
    def active(self) -> bool:
        return self._module is not None

    def begin_step(self, microbatches: int) -> None:
        self._left = microbatches

    def before_backward(self) -> None:
        """Once per micro-batch."""
        if self._module is None:
            return
        self._left -= 1
        last = self._left == 0
        self._module.set_is_last_backward(last)
        self._module.set_requires_gradient_sync(last)
        # Gathered parameters stay between the micro-batches of a step.
        self._module.set_reshard_after_backward(last)
