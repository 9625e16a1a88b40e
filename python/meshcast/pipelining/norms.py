"""The norm of the gradients of all stages of a pipeline, and clipping by it.

Every rank measures the gradients that it counts (`counting`), so that each element is measured once; one
small all-reduce makes the norm of it, with the same bits on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from meshcast.base.checks import typed_arguments
from meshcast.errors import LayoutError
from meshcast.pipelining.counting import all_reduce_over, counted, own_stages, parameters
from meshcast.pipelining.pipeline_stage import PipelineStage
from meshcast.pipelining.shapes import local_values

__all__ = ["clip_grad_norm_", "grad_norm"]


@typed_arguments()
@torch.no_grad()
def grad_norm(stages: PipelineStage | Sequence[PipelineStage], norm_type: float = 2.0) -> torch.Tensor:
    """The norm of the gradients of all stages, as if they were one vector. Every rank of the pipeline calls
    it, after ``step``.

    Each parameter counts once: one that two stages have, or share by ``shared_parameters``, and one that
    several ranks hold. Parameters that are no DTensors are taken to be equal on all ranks of their stage: a
    module that cuts its parameters over tensor-parallel ranks must hold them as DTensors. FSDP2 parameters on
    a mesh that joins several pipelines (one for each data-parallel column) are added up over that mesh first.

    Args:
        stages: this rank's stage, or all stages of this rank.
        norm_type: p of the p-norm, above 0; ``inf``: the largest absolute value.

    Returns:
        A tensor without dimensions on the stage's device, equal to the last bit on all ranks: float64 on the
        CPU, float32 elsewhere. Gradients in bfloat16 and float16 are measured in that as well.

    Raises:
        LayoutError: no stages, stages of unlike groups, another ``norm_type``, or no step has run yet.
        MeshcastError: an all-reduce with the other ranks failed, as when one of them dies.

    Example::

        schedule.step(x, target=y)
        print(grad_norm(stage).item())

    As `torch.nn.utils.get_total_norm`, which sees the parameters of one stage.
    """
    return _norm(own_stages(stages, "grad_norm"), norm_type, "grad_norm")


@typed_arguments()
@torch.no_grad()
def clip_grad_norm_(
    stages: PipelineStage | Sequence[PipelineStage],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> torch.Tensor:
    """Scales the gradients of all stages in place so that their norm is at most ``max_norm``. Every rank of
    the pipeline calls it, between ``step`` and the optimizer's.

    Args:
        stages, norm_type: as `grad_norm` takes them.
        max_norm: largest norm; gradients of a smaller one stay as they are. The host does not wait for the
            device to compare them.
        error_if_nonfinite: raise where the norm is infinite or NaN; the host then waits for the device.
        foreach: as in torch: all gradients of a kind in one operation; None: where the device can.

    Returns:
        The norm before, as `grad_norm`.

    Raises:
        LayoutError, MeshcastError: as `grad_norm`.
        RuntimeError: the norm is infinite or NaN, under ``error_if_nonfinite``, on all ranks alike.

    Example::

        schedule.step(x, target=y)
        clip_grad_norm_(stage, 1.0)
        optimizer.step()

    As `torch.nn.utils.clip_grad_norm_`, whose factor min(1, max_norm / (norm + 1e-6)) is taken.
    """
    mine = own_stages(stages, "clip_grad_norm_")
    norm = _norm(mine, norm_type, "clip_grad_norm_")
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"rank {mine[0].rank}, clip_grad_norm_: expected a finite norm of order {norm_type} of the "
            f"gradients of all stages, found {norm.item()}: skip this step, or give error_if_nonfinite=False "
            "to scale by it anyway"
        )
    # Local tensors in place of DTensors: torch does not scale a list with both.
    local = [SimpleNamespace(grad=local_values(p.grad)) for p in parameters(mine) if p.grad is not None]
    scaled: Any = local
    torch.nn.utils.clip_grads_with_norm_(scaled, max_norm, norm, foreach)
    return norm


def _norm(stages: Sequence[PipelineStage], norm_type: float, op: str) -> torch.Tensor:
    order = _Order(norm_type, stages[0], op)
    mine = counted(stages, op)
    total = order.measure(mine.inside)
    for mesh, gradients in mine.outside.items():
        of_mesh = order.measure(gradients)
        all_reduce_over(mesh, of_mesh, order.reduction, stages[0], op)
        if mine.leads:
            total = order.join(total, of_mesh)
    all_reduce_over(None, total, order.reduction, stages[0], op)
    return order.norm(total)


class _Order:
    """A p-norm in parts: what a rank knows of it is a small tensor, which is reduced over ranks.

    p-th powers are added up. Of the largest value the parts are that value and whether there is a NaN, which
    a maximum over ranks may lose.
    """

    def __init__(self, norm_type: float, stage: PipelineStage, op: str) -> None:
        try:
            self._p = float(norm_type)
        except (TypeError, ValueError):
            self._p = math.nan
        if not self._p > 0:
            raise LayoutError(
                f"rank {stage.rank}, {op}: expected a norm_type above 0 or inf, found {norm_type!r}: "
                "give 2.0 for the Euclidean norm",
                rank=stage.rank,
                op=op,
            )
        self._largest = math.isinf(self._p)
        self._device = stage.device
        # Not every device has float64.
        self._dtype = torch.float64 if stage.device.type == "cpu" else torch.float32
        self.reduction = dist.ReduceOp.MAX if self._largest else dist.ReduceOp.SUM

    def measure(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor:
        """The part of these gradients; shape (1,), of the largest value (2,)."""
        norms = [self._of_one(gradient) for gradient in gradients if gradient.numel()]
        if not norms:
            return torch.zeros(2 if self._largest else 1, dtype=self._dtype, device=self._device)
        every = torch.stack(norms)
        if self._largest:
            return torch.stack([every.nan_to_num(nan=0.0, posinf=math.inf).max(), every.isnan().any()])
        return every.pow(self._p).sum(dim=0, keepdim=True)

    def _of_one(self, gradient: torch.Tensor) -> torch.Tensor:
        values = gradient.coalesce().values() if gradient.is_sparse else gradient
        wide = torch.promote_types(values.dtype, self._dtype)
        return torch.linalg.vector_norm(values, self._p, dtype=wide).to(self._device, self._dtype)

    def join(self, part: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.maximum(part, other) if self._largest else part + other

    def norm(self, total: torch.Tensor) -> torch.Tensor:
        """Computes the norm from the joined part of all gradients."""
        if self._largest:
            return torch.where(total[1] > 0, math.nan, total[0])
        return total[0].pow(1 / self._p)
