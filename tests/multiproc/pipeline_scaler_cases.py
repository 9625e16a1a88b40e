"""meshcast.pipelining.GradScaler: one decision for all ranks. Four ranks; run by pipeline_norm_cases.py."""

from __future__ import annotations

import math
import pickle
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from meshcast.errors import LayoutError
from meshcast.pipelining import GradScaler, PipelineStage, Schedule1F1B, ScheduleZBV, clip_grad_norm_
from multiproc.pipeline_fault_cases import raises
from multiproc.pipeline_models import (
    CPU,
    TIMEOUT,
    batch,
    columns,
    in_a_row,
    largest_difference,
    mlp,
    place,
    train_alone,
)
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.debug import CommDebugMode

mse = nn.functional.mse_loss
SCALE = 1024.0


def values(modules: Sequence[nn.Module]) -> list[torch.Tensor]:
    every = [parameter.detach() for module in modules for parameter in module.parameters()]
    return [(each.to_local() if isinstance(each, DTensor) else each).clone() for each in every]


def spoil(module: nn.Module) -> None:
    """One gradient becomes infinite, where this rank has some."""
    for parameter in module.parameters():
        gradient = parameter.grad.to_local() if isinstance(parameter.grad, DTensor) else parameter.grad
        if gradient is not None and gradient.numel():
            gradient.view(-1)[0] = math.inf
            return


def train(
    make: Callable[[Any], Any],
    stages: Sequence[PipelineStage],
    scaler: torch.amp.GradScaler,
    optimizers: Sequence[torch.optim.Optimizer],
    samples: tuple[torch.Tensor, torch.Tensor],
    bad: Sequence[int | None],
    rank: int,
    *,
    collectives: int = 1,
) -> None:
    """Iterations of which some have an infinite gradient on one rank (`bad`; None: nowhere): then nobody
    steps and all scales halve; else all step. Scales grow at every second clean iteration in a row."""
    schedule = make(lambda output, target: scaler.scale(mse(output, target)))
    modules = [stage.submod for stage in stages]
    expected, clean = SCALE, 0
    for number, holder in enumerate(bad):
        for module in modules:
            module.zero_grad()
        schedule.step(samples[0], target=samples[1])
        if rank == holder:
            spoil(modules[-1])  # of two stages the one that may have no optimizer
        before = values(modules)
        with CommDebugMode() as made:
            for optimizer in optimizers:
                scaler.step(optimizer)
            scaler.update()
        found = made.get_total_counts()
        assert found == collectives, f"iteration {number}: {found} collectives, not {collectives}"
        same = [torch.equal(a, b) or not a.numel() for a, b in zip(before, values(modules), strict=True)]
        if holder is None and optimizers:
            assert not all(same), f"iteration {number}: no step"
        else:
            assert all(same), f"iteration {number}: a step"
        clean = 0 if holder is not None else clean + 1
        if holder is not None:
            expected /= 2
        elif clean == 2:
            expected, clean = expected * 2, 0
        assert scaler.get_scale() == expected, f"iteration {number}: {scaler.get_scale()}, not {expected}"


PATTERN = (0, None, None, 3, None, 1, None, None, None)


def chain_case(name: str, optimizer: Callable[..., torch.optim.Optimizer]):
    """Four stages; the infinite gradient is on one of them."""

    def case(context) -> None:
        stage = PipelineStage(mlp(4)[context.rank], context.rank, 4, CPU, group=dist.new_group())
        scaler = GradScaler(stage, init_scale=SCALE, growth_interval=2)
        train(
            lambda loss_fn: Schedule1F1B(stage, 2, loss_fn=loss_fn, timeout=TIMEOUT),
            [stage],
            scaler,
            [optimizer(stage.submod.parameters())],
            batch(8),
            PATTERN,
            context.rank,
        )

    case.__name__ = f"scaler_{name}"
    return case


def scaler_and_several_optimizers(context) -> None:
    """ZBV: two optimizers on a rank, one on rank 1, none on rank 2: one all-reduce on each."""
    group = dist.new_group()
    modules = mlp(8)
    stages = [PipelineStage(modules[i], i, 8, CPU, group=group) for i in (context.rank, 7 - context.rank)]
    optimizers = [torch.optim.SGD(stage.submod.parameters(), lr=0.1) for stage in stages]
    train(
        lambda loss_fn: ScheduleZBV(stages, 8, loss_fn=loss_fn, timeout=TIMEOUT),
        stages,
        GradScaler(stages, "cpu", SCALE, growth_interval=2),
        optimizers[: {1: 1, 2: 0}.get(context.rank, 2)],
        batch(8),
        PATTERN,
        context.rank,
    )


def scaler_and_fsdp(context) -> None:
    """Infinite in a shard of one rank; the all-reduces of DTensors are left out."""
    here = place(in_a_row([1, 3]))
    module, more = mlp(2)[here.stage], {}
    if here.stage == 1:
        fully_shard(module, mesh=here.mesh)
        more = {"output_args": torch.empty(2, 6, dtype=torch.float64, device="meta")}
    stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh, **more)
    train(
        lambda loss_fn: Schedule1F1B(
            stage, 2, loss_fn=loss_fn, timeout=TIMEOUT, sync_gradients=here.stage == 1
        ),
        [stage],
        GradScaler(stage, init_scale=SCALE, growth_interval=2),
        [torch.optim.SGD(stage.submod.parameters(), lr=0.1)],
        batch(12),
        (1, None, 0, None, 3, 2, None, None),
        context.rank,
    )


def scaler_over_columns(context) -> None:
    """Infinite in one of two pipelines: the other one, which has the other shards, skips as well."""
    _, stage, x, y = columns(context.rank)
    train(
        lambda loss_fn: Schedule1F1B(stage, 2, loss_fn=loss_fn, timeout=TIMEOUT),
        [stage],
        GradScaler(stage, init_scale=SCALE, growth_interval=2),
        [torch.optim.SGD(stage.submod.parameters(), lr=0.1)],
        (x.chunk(2)[context.rank % 2], y.chunk(2)[context.rank % 2]),
        (0, None, 1, 2, 3, None, None),
        context.rank,
        collectives=2,  # over the ranks that have the other shards, and over the pipeline
    )


def scaler_unscale_and_clip(context) -> None:
    """Unscaled, clipped, stepped: parameters are those of one process that never scaled."""
    reference, module = mlp(4), mlp(4)[context.rank]
    x, y = batch(8)
    stage = PipelineStage(module, context.rank, 4, CPU, group=dist.new_group())
    scaler = GradScaler(stage, init_scale=SCALE)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda a, b: scaler.scale(mse(a, b)), timeout=TIMEOUT)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    single = torch.optim.SGD([p for each in reference for p in each.parameters()], lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        single.zero_grad()
        train_alone(nn.Sequential(*reference), x, y, 4)
        expected = torch.nn.utils.clip_grad_norm_(nn.ModuleList(reference).parameters(), 0.1)
        single.step()
        schedule.step(x, target=y)
        scaler.unscale_(optimizer)
        norm = clip_grad_norm_(stage, 0.1)
        assert abs(norm.item() - expected.item()) <= 1e-12, (norm, expected)
        scaler.step(optimizer)
        scaler.update()
        assert largest_difference(module, reference[context.rank]) <= 1e-14
        pairs = zip(module.parameters(), reference[context.rank].parameters(), strict=True)
        assert all((a - b).abs().max() <= 1e-14 for a, b in pairs)
    schedule.step(x, target=y)
    scaler.unscale_(optimizer)
    raises(RuntimeError, "unscale_() has already been called", call=lambda: scaler.unscale_(optimizer))


def scaler_state(context) -> None:
    """What one has learnt another continues, before and after its first use; a new scale is taken."""
    stage = PipelineStage(mlp(4)[context.rank], context.rank, 4, CPU, group=dist.new_group())
    scaler = GradScaler(stage, init_scale=SCALE, growth_interval=3)
    if context.rank == 3:
        spoil_next = nn.Parameter(torch.zeros(()))
        spoil_next.grad = torch.tensor(math.inf)
        stage.submod.register_parameter("bad", spoil_next)
    scaler.update()
    if context.rank == 3:
        stage.submod.bad.grad = None
    scaler.update()
    state = scaler.state_dict()
    assert (state["scale"], state["_growth_tracker"]) == (SCALE / 2, 1)
    for used in (False, True):
        other = GradScaler(stage, init_scale=2.0)
        if used:
            other.update()
        other.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert other.state_dict() == state
        other.update()
        other.update()
        assert other.get_scale() == SCALE, "the third clean iteration in a row"
    with CommDebugMode() as made:
        scaler.update(8.0)
    assert (scaler.get_scale(), made.get_total_counts()) == (8.0, 1)
    off = GradScaler(stage, enabled=False)
    with CommDebugMode() as made:
        off.step(torch.optim.SGD(stage.submod.parameters(), lr=0.1))
        off.update()
    assert (off.get_scale(), off.state_dict(), made.get_total_counts()) == (1.0, {}, 0)
    raises(
        LayoutError, f"GradScaler on rank {context.rank}: expected", "found none", call=lambda: GradScaler([])
    )


def scaler_and_parameters_of_no_stage(context) -> None:
    """They hold back their own optimizer; the scale follows the stages alone."""
    stage = PipelineStage(mlp(4)[context.rank], context.rank, 4, CPU, group=dist.new_group())
    scaler = GradScaler(stage, init_scale=SCALE)
    other = nn.Parameter(torch.zeros(2))
    other.grad = torch.tensor([1.0, math.inf if context.rank == 1 else 1.0])
    scaler.step(torch.optim.SGD([other], lr=1.0))
    scaler.update()
    assert bool(other.count_nonzero()) == (context.rank != 1)
    assert scaler.get_scale() == SCALE


def scaler_and_float16_parameters(context) -> None:
    """Refused as torch refuses them; the other ranks have been told by then, and go on."""
    dtype = torch.float16 if context.rank == 1 else torch.float32
    module = mlp(4, dtype=dtype)[context.rank]
    for parameter in module.parameters():
        parameter.grad = torch.ones_like(parameter)
    stage = PipelineStage(module, context.rank, 4, CPU, group=dist.new_group())
    scaler, optimizer = GradScaler(stage), torch.optim.SGD(module.parameters(), lr=0.1)
    if context.rank == 1:
        raises(ValueError, "Attempting to unscale FP16 gradients", call=lambda: scaler.step(optimizer))
    else:
        scaler.step(optimizer)
    scaler.update()


CASES = [
    chain_case("sgd", lambda parameters: torch.optim.SGD(parameters, lr=0.1)),
    chain_case("fused", lambda parameters: torch.optim.Adam(parameters, lr=0.1, fused=True)),
    scaler_and_several_optimizers,
    scaler_and_fsdp,
    scaler_over_columns,
    scaler_unscale_and_clip,
    scaler_state,
    scaler_and_parameters_of_no_stage,
    scaler_and_float16_parameters,
]
