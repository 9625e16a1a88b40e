"""Programs that train and evaluate by turns; None among values, uneven batches, wrappers in loops."""

from __future__ import annotations

from typing import Any

import torch
from multiproc.torch_programs import (
    CPU,
    Layer,
    batch,
    folded,
    forwards,
    gradients,
    layers,
    looped,
    program,
    stages_of,
    step,
)
from multiproc.torch_schedule_cases import LOOPED, SINGLE, built, mse, placed
from multiproc.torch_stage_cases import column, in_columns
from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def turns(name: str) -> None:
    """Training, evaluations with and without outputs, in inference mode, with another loss, and again."""

    @program(2, name=f"turns_{name}")
    def run(lib: Any, world: Any) -> Any:
        def loss_fn(output: torch.Tensor, target: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
            return mse(output, target) * factor

        schedule, stages, modules = built(lib, world, name, 2, 4, loss_fn)
        found: list[Any] = []
        for turn in range(2):
            for module in modules:
                module.zero_grad()
            more = {"loss_kwargs": {"factor": 2.0 + turn}}
            found.append((step(schedule, stages, *batch(8, seed=turn), **more), gradients(modules)))
            for module in modules:
                module.zero_grad()
            with torch.no_grad():
                found.append(step(schedule, stages, *batch(8, seed=turn + 5), call="eval", **more))
                found.append(
                    step(schedule, stages, *batch(8, seed=turn + 6), call="eval", return_outputs=False)
                )
            with torch.inference_mode():
                output, losses = step(schedule, stages, *batch(8, seed=turn + 7), call="eval")
            found.append((None if output is None else output.clone(), losses))
        return found


for each in (*SINGLE, *LOOPED):
    turns(each)


@program(2)
def forward_only_with_more_arguments(lib: Any, world: Any) -> Any:
    class Two(Layer):
        def forward(self, x: torch.Tensor, mask: Any = None, *, scale: Any = None) -> Any:
            y = super().forward(x if mask is None else x * mask)
            return y if scale is None else y * scale

    modules = layers([world.rank], Two)
    stages = stages_of(lib, modules, [world.rank], 2, world.group)
    schedule = lib.schedules._ScheduleForwardOnly(stages[0], 4)
    x, _ = batch(8)
    scale = torch.rand(8, 1, generator=torch.Generator().manual_seed(3))
    args = (x, (x > 0).float()) if world.rank == 0 else ()
    with torch.no_grad():
        return [schedule.step(*args, scale=scale) for _ in range(2)]


@program(2)
def none_among_the_arguments(lib: Any, world: Any) -> Any:
    class Takes(Layer):
        def forward(self, x: torch.Tensor, *, more: Any = "missing", last: Any = 3) -> torch.Tensor:
            assert more is None
            assert last is None
            return super().forward(x)

    found = []
    for name in (*SINGLE, "ScheduleInterleaved1F1B"):
        numbers, count = placed(name, world.rank, 2)
        modules = layers(numbers, Takes)
        stages = stages_of(lib, modules, numbers, count, world.group)
        schedule = getattr(lib, name)(stages[0] if name in SINGLE else stages, 4, loss_fn=mse)
        x, y = batch(8)
        losses: list[Any] = []
        first, last = (any(getattr(stage, what) for stage in stages) for what in ("is_first", "is_last"))
        output = schedule.step(
            *((x,) if first else ()),
            more=None,
            last=None,
            **({"target": y, "losses": losses} if last else {}),
        )
        found.append((output, [loss.detach() for loss in losses], gradients(modules)))
    return found


@program(1, exact=False)
def uneven_batches(lib: Any, world: Any) -> Any:
    """On one rank: over several torch has buffers of one size."""
    found = []
    for name in ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS"):
        schedule, stages, modules = built(lib, world, name, 1, 4)
        for rows in (10, 7, 4):
            if len(stages) == 1:
                found.append((step(schedule, stages, *batch(rows)), gradients(modules)))
        found.append((step(schedule, stages, *batch(8)), gradients(modules)))
    return found


@program(2)
def what_a_step_leaves_in_a_stage(lib: Any, world: Any) -> Any:
    found = []
    for name in (*SINGLE, *LOOPED):
        schedule, stages, _ = built(lib, world, name, 2, 4)
        for keep in (True, False):
            step(schedule, stages, *batch(8), return_outputs=keep)
            for stage in stages:
                found.append((len(forwards(stage)), len(stage.output_chunks), stage.has_backward))
                stage.clear_runtime_states()
                found.append((len(forwards(stage)), len(stage.output_chunks)))
    return found


@program(2)
def gradients_are_scaled_by_hand(lib: Any, world: Any) -> Any:
    found = []
    for name in ("Schedule1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"):
        schedule, stages, modules = built(lib, world, name, 2, 4, scale_grads=False)
        step(schedule, stages, *batch(8))
        found.append(gradients(modules))
        for stage in stages:
            stage.scale_grads(4)
        found.append(gradients(modules))
        for stage in stages:
            stage.scale_grads(1)
            stage.perform_reduce_grad(2)
        found.append(gradients(modules))
    return found


@program(2)
def inputs_that_are_frozen_or_whole_numbers(lib: Any, world: Any) -> Any:
    class Tokens(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            torch.manual_seed(number)
            self.embedding, self.layer = nn.Embedding(11, 6), Layer(number)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(self.embedding(x).mean(1) if x.dtype == torch.long else x)

    found = []
    tokens = torch.randint(0, 11, (8, 5), generator=torch.Generator().manual_seed(2))
    _, y = batch(8)
    for name in ("ScheduleGPipe", "ScheduleInterleavedZeroBubble"):
        numbers, count = placed(name, world.rank, 2)
        modules = layers(numbers, Tokens)
        stages = stages_of(lib, modules, numbers, count, world.group)
        schedule = getattr(lib, name)(stages[0] if name in SINGLE else stages, 4, loss_fn=mse)
        for frozen in (False, True):
            for module in modules:
                module.embedding.requires_grad_(not frozen)
                module.zero_grad()
            found.append((step(schedule, stages, tokens, y), gradients(modules)))
    return found


@program(4)
def names_of_traced_parameters(lib: Any, world: Any) -> Any:
    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(4)
            self.parts = nn.ModuleList(Layer(number) for number in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts:
                x = part(x)
            return x

    model = Whole()
    x, _ = batch(8)
    cuts = {f"parts.{number}": lib.SplitPoint.BEGINNING for number in range(1, 4)}
    pipe = lib.pipeline(model, mb_args=(x[:2],), split_spec=cuts)
    stage = pipe.build_stage(world.rank, CPU, world.group)
    schedule = lib.ScheduleGPipe(stage, 4)
    output = schedule.step(x) if world.rank == 0 else schedule.step()
    names = sorted(stage.submod.state_dict())
    assert set(names) <= set(model.state_dict())
    found = [output, names, pipe.num_stages, stage.is_first, stage.is_last, stage.stage_index]
    if world.rank == 3:
        found.append(torch.allclose(output, model(x)))
    return found


for each in ("ScheduleInterleaved1F1B", "ScheduleLoopedBFS"):
    in_columns(each, "fsdp mixed")
    in_columns(each, "fsdp nested")
in_columns("ScheduleGPipe", "fsdp mixed")
in_columns("ScheduleGPipe", "fsdp inside")


@program(4, exact=False)
def tensor_parallel_evaluation(lib: Any, world: Any) -> Any:
    """Values between stages are DTensors, cut by features."""
    rank, _ = column(world)
    mesh = world.mesh["dp"]

    class Parallel(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            given = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()])
            y = self.second(torch.tanh(self.first(given.redistribute(placements=[Replicate()]))))
            return y.redistribute(placements=[Shard(1)]) if rank == 0 else y

    module = Parallel(rank, hidden=8)
    second = RowwiseParallel(output_layouts=Replicate(), use_local_output=False)
    parallelize_module(module, mesh, {"first": ColwiseParallel(), "second": second})
    stages = stages_of(lib, [module], [rank], 2, world.mesh.get_group("pp"), get_mesh=lambda *_: mesh)
    schedule = lib.Schedule1F1B(stages[0], 4, loss_fn=lambda out, target: mse(out.full_tensor(), target))
    found = []
    for seed in range(2):
        module.zero_grad()
        found.append((step(schedule, stages, *batch(8, seed=seed)), gradients([module])))
        module.zero_grad()
        with torch.no_grad():
            found.append(step(schedule, stages, *batch(8, seed=seed + 4), call="eval"))
    return found


@program(2)
def two_stages_share_a_rank_and_a_parameter(lib: Any, world: Any) -> Any:
    """Tied weights of stages that are next to each other on one rank."""
    found = []
    for name, numbers in (
        ("ScheduleZBVZeroBubble", folded(world.rank, 2)),
        ("ScheduleLoopedBFS", looped(world.rank, 2, 2)),
    ):
        modules = layers(numbers)
        modules[1].first.weight = modules[0].first.weight
        stages = stages_of(lib, modules, numbers, 4, world.group)
        schedule = getattr(lib, name)(stages, 4, loss_fn=mse, scale_grads=False)
        found.append((step(schedule, stages, *batch(8)), gradients(modules)))
    return found
