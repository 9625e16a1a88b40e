"""The norm of the gradients of all stages of a pipeline, clipping by it, and gradient scaling for float16:
all ranks skip a step together, and have one scale.

The ranks of the meshes decide which rank counts what, not by the names of their dimensions: a parameter may
lie on a part of the stage's mesh, or on a mesh that joins several pipelines.

Every rank measures the gradients that it counts, so that each element is measured once; one small all-reduce
makes the norm of it, with the same bits on all ranks.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from ..base.checks import typed_arguments
from ..errors import Caller, LayoutError, MeshcastError
from .data_parallel import placed_gradient
from .parallel import local_values
from .stage import PipelineStage

__all__ = ["GradScaler", "clip_grad_norm_", "grad_norm"]


def _caller(op: str) -> Caller:
    return Caller(op, dist.get_rank() if dist.is_initialized() else None)


def _own_stages(stages: Any) -> list[PipelineStage]:
    """This rank's stages, ascending. Raises LayoutError unless they can be one rank's."""
    # A module may be iterable, too; it is named as a whole.
    several = isinstance(stages, Iterable) and not isinstance(stages, torch.nn.Module)
    listed = [*stages] if several else [stages]
    for stage in listed:
        if not isinstance(stage, PipelineStage):
            raise LayoutError(
                "expected a meshcast.pipelining.PipelineStage or a list of this rank's stages, found "
                f"{type(stage).__name__}: give the stages that the schedule was made with"
            )
    if not listed:
        raise LayoutError("expected at least one stage, found none: give all stages of this rank")
    for stage in listed[1:]:
        if stage.group is not listed[0].group:
            raise LayoutError(
                f"expected stages of one pipeline, found different groups: stage {listed[0].stage_index} has "
                f"{listed[0].group}, stage {stage.stage_index} has {stage.group}: call it once for each "
                "pipeline"
            )
    return sorted(listed, key=lambda stage: stage.stage_index)


def _parameters(stages: Sequence[PipelineStage]) -> list[torch.nn.Parameter]:
    """The parameters that are trained, each once, also where two stages have the same one."""
    found = (p for stage in stages for p in stage.submod.parameters())
    return list({id(p): p for p in found if p.requires_grad or p.grad is not None}.values())


def _copies(stages: Sequence[PipelineStage]) -> set[int]:
    """Ids of the shared parameters that an earlier stage of the pipeline counts.

    Raises LayoutError before the first step, when the stages do not know yet who shares parameters.
    """
    shared, first = set(), set()
    for stage in stages:
        if stage.sharing is None:
            # On every rank, also where nothing is shared: the others would wait for those that raise.
            raise LayoutError(
                f"expected stages whose schedule has run, found stage {stage.stage_index} before its first "
                "step: call step, on every rank, before this"
            )
        for key, parameter in stage.shared.items():
            shared.add(id(parameter))
            if stage.stage_index == stage.sharing[key][0]:
                first.add(id(parameter))
    return shared - first


def _outside_mesh(parameter: torch.nn.Parameter, members: set[int]) -> DeviceMesh | None:
    """The parameter's mesh if it has other ranks than those of the stage: FSDP2 over the same stage of
    several pipelines."""
    if not isinstance(parameter.data, DTensor):
        return None
    mesh = parameter.data.device_mesh
    return None if members.issuperset(mesh.mesh.flatten().tolist()) else mesh


def _all_reduce_over(
    mesh: DeviceMesh | None, values: torch.Tensor, reduction: Any, stage: PipelineStage
) -> None:
    """All-reduces over all dimensions of a mesh, one after the other; None: over the pipeline's group.

    Raises MeshcastError where that fails, as when another rank dies.
    """
    groups = [stage.group]
    if mesh is not None:
        groups = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
    try:
        for group in groups:
            dist.all_reduce(values, op=reduction, group=group)
    except RuntimeError as error:
        raise MeshcastError(
            "an all-reduce with the other ranks of the pipeline failed: "
            f"{(str(error).splitlines() or [''])[0]}. One of them may have ended: look at its own output",
            phase="transfer",
        ) from error


def _counts(parameter: torch.nn.Parameter, rank: int, leader: int, *, outside: bool) -> bool:
    """Returns whether this rank is the first that has its part of the parameter."""
    if not isinstance(parameter.data, DTensor):
        return rank == leader  # all ranks of the stage have it
    ranks = parameter.data.device_mesh.mesh
    # A mesh that is a part of the stage's is one of several, each with the whole parameter: the leader's one
    # counts. A larger one is added up as a whole.
    if not outside and leader not in ranks.flatten().tolist():
        return False
    place = (ranks == rank).nonzero().tolist()
    if not place:
        return False
    placements = parameter.data.placements
    return all(at == 0 or not isinstance(p, Replicate) for at, p in zip(place[0], placements, strict=True))


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
        LayoutError: no stages, stages of different groups, another ``norm_type``, or no step has run yet.
        MeshcastError: an all-reduce with the other ranks failed, as when one of them dies.

    Example::

        schedule.step(x, target=y)
        print(grad_norm(stage).item())

    As `torch.nn.utils.get_total_norm`, which sees the parameters of one stage.
    """
    with _caller("grad_norm"):
        return _norm(_own_stages(stages), norm_type)


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
        RuntimeError: the norm is infinite or NaN, under ``error_if_nonfinite``, on all ranks.

    Example::

        schedule.step(x, target=y)
        clip_grad_norm_(stage, 1.0)
        optimizer.step()

    As `torch.nn.utils.clip_grad_norm_`, whose factor min(1, max_norm / (norm + 1e-6)) is taken.
    """
    with _caller("clip_grad_norm_") as caller:
        mine = _own_stages(stages)
        norm = _norm(mine, norm_type)
    if error_if_nonfinite and not torch.isfinite(norm):
        raise RuntimeError(
            f"{caller}: expected a finite norm of order {norm_type} of the gradients of all stages, found "
            f"{norm.item()}: skip this step, or give error_if_nonfinite=False to scale by it anyway"
        )
    # Local tensors instead of DTensors: torch does not scale a list with both.
    local = [SimpleNamespace(grad=local_values(p.grad)) for p in _parameters(mine) if p.grad is not None]
    scaled: Any = local
    torch.nn.utils.clip_grads_with_norm_(scaled, max_norm, norm, foreach)
    return norm


def _norm(stages: Sequence[PipelineStage], norm_type: float) -> torch.Tensor:
    order = _Order(norm_type, stages[0].device)
    copies, rank = _copies(stages), stages[0].rank
    # Stages of a rank have the same ranks, if in different shapes: one of them leads in all.
    members = set(stages[0].mesh.ranks)
    leader = min(members)
    inside: list[torch.Tensor] = []  # to be added up in the pipeline's group
    # To be added up over a mesh that is larger than the stage's first: the same meshes, in the same order, on
    # all their ranks.
    outside: dict[DeviceMesh, list[torch.Tensor]] = {}
    for parameter in _parameters(stages):
        if id(parameter) in copies:
            continue
        mesh = _outside_mesh(parameter, members)
        # Also without a gradient here: other ranks of that mesh may have one.
        into = inside if mesh is None else outside.setdefault(mesh, [])
        if parameter.grad is not None:
            gradient = placed_gradient(parameter)  # by all ranks of its mesh, whichever counts the result
            if _counts(parameter, rank, leader, outside=mesh is not None):
                into.append(local_values(gradient))
    total = order.measure(inside)
    for mesh, gradients in outside.items():
        of_mesh = order.measure(gradients)
        _all_reduce_over(mesh, of_mesh, order.reduction, stages[0])
        if rank == leader:
            total = order.join(total, of_mesh)
    _all_reduce_over(None, total, order.reduction, stages[0])
    return order.norm(total)


class _Order:
    """A p-norm in parts: what a rank knows of it is a small tensor, which is reduced over ranks.

    p-th powers are added up. Of the largest value the parts are that value and whether there is a NaN, which
    a maximum over ranks may lose.
    """

    def __init__(self, norm_type: float, device: torch.device) -> None:
        try:
            self._p = float(norm_type)
        except (TypeError, ValueError):
            self._p = math.nan
        if not self._p > 0:
            raise LayoutError(
                f"expected a norm_type above 0 or inf, found {norm_type!r}: give 2.0 for the Euclidean norm"
            )
        self._largest = math.isinf(self._p)
        self._device = device
        # Not every device has float64.
        self._dtype = torch.float64 if device.type == "cpu" else torch.float32
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


class GradScaler(torch.amp.GradScaler):
    """`torch.amp.GradScaler` for the stages of a pipeline: an infinite or NaN gradient in any stage makes
    every rank skip its step and lower its scale.

    Every rank of the pipeline makes one. The loss is scaled in ``loss_fn``; ranks without a loss begin with
    ``init_scale`` as well. The first ``unscale_``, ``step`` or ``update`` of an iteration looks at the
    gradients of all parameters of this rank's stages and agrees with the other ranks, in one all-reduce of
    one element. The result holds for every optimizer until ``update``. Every rank calls ``update`` in
    every iteration, also one without an optimizer.

    Args:
        stages: this rank's stage, or all stages of this rank.
        device: device type of the scale; default: that of the stages.
        init_scale, growth_factor, backoff_factor, growth_interval, enabled: as in torch, the same on all
            ranks.

    Raises:
        LayoutError: no stages, or stages of different groups.

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
        self._caller = _caller("GradScaler")
        with self._caller:
            self._stages = _own_stages(stages)
        super().__init__(
            device or self._stages[0].device.type,
            init_scale=init_scale,
            growth_factor=growth_factor,
            backoff_factor=backoff_factor,
            growth_interval=growth_interval,
            enabled=enabled,
        )
        self._found: torch.Tensor | None = None  # 1 if a gradient is not finite anywhere; until `update`

    def __repr__(self) -> str:
        return f"<GradScaler of stages {[stage.stage_index for stage in self._stages]}>"

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Updates the scale, as in torch. Every rank of the pipeline calls it, with or without optimizers."""
        if not self._enabled:
            return
        found = self._found_anywhere()
        # It includes the results of single optimizers.
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
            mine = _parameters(self._stages)
            gradients = [parameter.grad for parameter in mine if parameter.grad is not None]
            found = _scale_and_check(gradients, torch.ones_like(scale), torch.zeros_like(scale))
            members = set(self._stages[0].mesh.ranks)
            meshes = (_outside_mesh(parameter, members) for parameter in mine)
            with self._caller:
                # In order, each once; then over the pipeline's group.
                for mesh in [*dict.fromkeys(mesh for mesh in meshes if mesh is not None), None]:
                    _all_reduce_over(mesh, found, dist.ReduceOp.MAX, self._stages[0])
            self._found = found
        return self._found


def _scale_and_check(
    gradients: Iterable[torch.Tensor], factor: torch.Tensor, found: torch.Tensor
) -> torch.Tensor:
    """Multiplies the gradients by `factor`, in place. Returns `found`, 1 if one of them is not finite.

    On local tensors: for DTensors torch would all-reduce what it finds over their mesh, each time.
    """
    by_kind: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for gradient in gradients:
        local = local_values(gradient)
        values = local._values() if local.is_sparse else local
        by_kind.setdefault((values.device, values.dtype), []).append(values)
    for (device, _), group in by_kind.items():
        here = torch.zeros_like(found, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(group, here, factor.to(device))
        found = torch.maximum(found, here.to(found.device))
    return found
