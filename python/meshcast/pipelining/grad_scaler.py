"""Gradient scaling for float16: all ranks of a pipeline skip a step together, and have one scale."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from meshcast.base.checks import typed_arguments
from meshcast.pipelining.counting import all_reduce_over, outside_mesh, own_stages, parameters
from meshcast.pipelining.pipeline_stage import PipelineStage
from meshcast.pipelining.shapes import local_values

__all__ = ["GradScaler"]


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for the stages of a pipeline: an infinite or NaN gradient in any stage makes
    every rank skip its step and lower its scale.

    Every rank of the pipeline makes one. The loss is scaled in ``loss_fn``; ranks without a loss begin with
    ``init_scale`` as well. The first ``unscale_``, ``step`` or ``update`` of an iteration looks at the
    gradients of all parameters of this rank's stages and agrees with the other ranks, in one all-reduce of
    one element. What it found holds for every optimizer until ``update``. Every rank calls ``update`` in
    every iteration, also one without an optimizer.

    Args:
        stages: this rank's stage, or all stages of this rank.
        device: device type of the scale; default: that of the stages.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch, the same on all
            ranks.

    Raises:
        LayoutError: no stages, or stages of unlike groups.

    Example::

        scaler = GradScaler(stage)
        loss_fn = lambda output, target: scaler.scale(cross_entropy(output, target))
        schedule = Schedule1F1B(stage, 4, loss_fn=loss_fn)
        schedule.step(x, target=y)
        scaler.unscale_(optimizer)  # only to clip
        clip_grad_norm_(stage, 1.0)
        scaler.step(optimizer)
        scaler.update()

    As `torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler`, which agrees once per optimizer.
    """

    @typed_arguments()
    def __init__(
        self,
        stages: PipelineStage | Sequence[PipelineStage],
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
    ) -> None:
        self._stages = own_stages(stages, "GradScaler")
        super().__init__(
            device or self._stages[0].device.type,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._found: torch.Tensor | None = None  # 1 if a gradient is not finite anywhere; until `update`

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Updates the scale, as in torch. Every rank of the pipeline calls it, with or without optimizers."""
        if not self._enabled:
            return
        found = self._found_anywhere()
        # What single optimizers found is part of it.
        self._per_optimizer_states.clear()
        self._per_optimizer_states[0]["found_inf_per_device"] = {found.device: found}
        self._found = None
        super().update(new_scale)

    def _check_scale_growth_tracker(self, funcname: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._scale is None:  # no loss on this rank, so `scale` did not make it
            self._lazy_init_scale_growth_tracker(self._stages[0].device)
        return super()._check_scale_growth_tracker(funcname)

    @torch.no_grad()
    def _unscale_grads_(
        self,
        optimizer: torch.optim.Optimizer,
        inv_scale: torch.Tensor,
        found_inf: torch.Tensor,
        allow_fp16: bool,
    ) -> dict[torch.device, torch.Tensor]:
        """Unscales the gradients of an optimizer: `unscale_` calls it, and `step` without `unscale_`."""
        found = self._found_anywhere()  # first: the other ranks wait for it, whatever follows
        owned = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        gradients = [parameter.grad for parameter in owned if parameter.grad is not None]
        if not allow_fp16 and any(gradient.dtype == torch.float16 for gradient in gradients):
            raise ValueError("Attempting to unscale FP16 gradients.")
        # An optimizer may have parameters of no stage: they hold back itself only.
        return {found.device: torch.maximum(found, _scale_and_check(gradients, inv_scale, found_inf))}

    @torch.no_grad()
    def _found_anywhere(self) -> torch.Tensor:
        """Returns whether any gradient of the pipeline is not finite, agreed on once per iteration: 0 or 1,
        float32, without dimensions, on the device of the stages."""
        if self._found is None:
            scale, _ = self._check_scale_growth_tracker("agreeing on infinities")
            mine = parameters(self._stages)
            gradients = [parameter.grad for parameter in mine if parameter.grad is not None]
            found = _scale_and_check(gradients, torch.ones_like(scale), torch.zeros_like(scale))
            members = set(self._stages[0].mesh.ranks)
            meshes = (outside_mesh(parameter, members) for parameter in mine)
            for mesh in {mesh: None for mesh in meshes if mesh is not None}:  # in order, each once
                all_reduce_over(mesh, found, dist.ReduceOp.MAX, self._stages[0], "GradScaler")
            all_reduce_over(None, found, dist.ReduceOp.MAX, self._stages[0], "GradScaler")
            self._found = found
        return self._found


def _scale_and_check(
    gradients: Iterable[torch.Tensor], factor: torch.Tensor, found: torch.Tensor
) -> torch.Tensor:
    """Multiplies the gradients by `factor`, in place. Returns `found`, 1 if one of them is not finite.

    On local tensors: for DTensors torch would all-reduce what it finds over their mesh, each time.
    """
    alike: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        local = local_values(gradient)
        values = local._values() if local.is_sparse else local
        alike.setdefault((values.device, values.dtype), []).append(values)
    for (device, _), group in alike.items():
        here = torch.zeros_like(found, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, here, factor.to(device))
        found = torch.maximum(found, here.to(found.device))
    return found
