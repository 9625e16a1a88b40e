"""Programs about rarer values: frozen stages, DTensors in loops, outputs of other kinds, one micro-batch."""

from __future__ import annotations

from typing import Any

import torch
from multiproc.torch_programs import (
    CPU,
    TORCH,
    Layer,
    batch,
    folded,
    forwards,
    gradients,
    layers,
    looped,
    program,
    raised,
    stages_of,
    step,
)
from multiproc.torch_schedule_cases import built, mse, placed, shapes
from multiproc.torch_stage_cases import column
from torch import nn
from torch.distributed.tensor import DTensor, Partial, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module


def frozen_stage(number: int) -> None:
    @program(3, name=f"stage_{number}_is_frozen")
    def run(lib: Any, world: Any) -> Any:
        found = []
        for name in ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"):
            schedule, stages, modules = built(lib, world, name, 3, 6)
            for stage, module in zip(stages, modules, strict=True):
                if stage.stage_index == number:
                    module.requires_grad_(False)
            found.append((step(schedule, stages, *batch(12)), gradients(modules)))
        return found


frozen_stage(0)
frozen_stage(1)


@program(2)
def one_microbatch(lib: Any, world: Any) -> Any:
    found = []
    for name in ("ScheduleGPipe", "ScheduleInterleaved1F1B", "ScheduleLoopedBFS"):
        schedule, stages, modules = built(lib, world, name, 2, 1)
        found.append((step(schedule, stages, *batch(4)), gradients(modules)))
    return found


@program(2)
def outputs_of_the_last_stage(lib: Any, world: Any) -> Any:
    class Last(Layer):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return {"logits": y, "more": [y * 2, (y + 1,)]} if world.rank else y

    modules = layers([world.rank], Last)
    example = torch.empty(2, 6, device="meta", requires_grad=True)
    stages = stages_of(  # with shapes: torch cannot find those of a dictionary
        lib, modules, [world.rank], 2, world.group, input_args=example, output_args=example
    )
    schedule = lib.schedules._ScheduleForwardOnly(stages[0], 4)
    x, _ = batch(8)
    with torch.no_grad():
        return schedule.step(x) if world.rank == 0 else schedule.step()


@program(2)
def lists_between_stages(lib: Any, world: Any) -> Any:
    class Two(Layer):
        def forward(self, x: torch.Tensor, y: Any = None) -> Any:
            z = super().forward(x if y is None else x + y)
            return z if world.rank else [z, z.sin()]

    modules = layers([world.rank], Two)
    stages = stages_of(lib, modules, [world.rank], 2, world.group)
    schedule = lib.ScheduleGPipe(stages[0], 4, loss_fn=mse)
    return step(schedule, stages, *batch(8)), gradients(modules)


@program(2)
def scaling_is_switched(lib: Any, world: Any) -> Any:
    schedule, stages, modules = built(lib, world, "Schedule1F1B", 2, 4)
    found = []
    for flag in (True, False, True):
        schedule.scale_grads = flag
        found.append((step(schedule, stages, *batch(8)), gradients(modules)))
    return found


@program(2)
def evaluation_alone(lib: Any, world: Any) -> Any:
    found = []
    for name in ("ScheduleGPipe", "ScheduleInterleaved1F1B"):
        schedule, stages, _ = built(lib, world, name, 2, 4, None)
        x, _ = batch(8)
        with torch.no_grad():
            found += [schedule.eval(x) if stages[0].is_first else schedule.eval() for _ in range(2)]
    return found


@program(2, exact=False)
def two_schedules_of_the_same_stages(lib: Any, world: Any) -> Any:
    modules = layers([world.rank])
    stages = stages_of(lib, modules, [world.rank], 2, world.group)
    found = []
    for name in ("ScheduleGPipe", "Schedule1F1B"):
        schedule = getattr(lib, name)(stages[0], 4, loss_fn=mse)
        found.append((step(schedule, stages, *batch(8)), gradients(modules)))
    return found


def dtensors_in_a_loop(name: str) -> None:
    @program(4, name=f"dtensors_{name}", exact=False)
    def run(lib: Any, world: Any) -> Any:
        rank, _ = column(world)
        mesh = world.mesh["dp"]
        numbers = folded(rank, 2) if name == "ScheduleZBVZeroBubble" else looped(rank, 2, 2)

        class Parallel(Layer):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                given = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()])
                return given + self.second(torch.tanh(self.first(given)))

        modules = [Parallel(number, hidden=8) for number in numbers]
        for module in modules:
            second = RowwiseParallel(output_layouts=Replicate(), use_local_output=False)
            parallelize_module(module, mesh, {"first": ColwiseParallel(), "second": second})
        stages = stages_of(lib, modules, numbers, 4, world.mesh.get_group("pp"), get_mesh=lambda *_: mesh)
        schedule = getattr(lib, name)(stages, 4, loss_fn=lambda out, target: mse(out.full_tensor(), target))
        return [(step(schedule, stages, *batch(8, seed=seed)), gradients(modules)) for seed in range(2)]


for each in ("ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble", "ScheduleZBVZeroBubble"):
    dtensors_in_a_loop(each)


@program(4, exact=False)
def dtensors_with_given_shapes(lib: Any, world: Any) -> Any:
    rank, _ = column(world)
    mesh = world.mesh["dp"]

    class Parallel(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.second(torch.tanh(self.first(x)))

    module = Parallel(rank, hidden=8)
    second = RowwiseParallel(output_layouts=Replicate(), use_local_output=False)
    parallelize_module(module, mesh, {"first": ColwiseParallel(), "second": second})

    def example(needs: bool) -> DTensor:
        # A gradient is a sum over the ranks that have a part of the weights.
        placement = Replicate() if needs else Partial()
        return DTensor.from_local(torch.empty(2, 6), mesh, [placement]).requires_grad_(needs)

    stage = lib.PipelineStage(
        module,
        rank,
        2,
        CPU,
        input_args=example(True) if rank else DTensor.from_local(torch.empty(2, 6), mesh, [Replicate()]),
        output_args=example(True),
        input_grads=example(False) if rank else None,
        output_grads=example(False) if not rank else None,
        group=world.mesh.get_group("pp"),
        get_mesh=lambda *_: mesh,
    )
    schedule = lib.Schedule1F1B(stage, 4, loss_fn=lambda out, target: mse(out.full_tensor(), target))
    x, y = batch(8)
    given = DTensor.from_local(x, mesh, [Replicate()])
    return step(schedule, [stage], given, y), gradients([module])


@program(2)
def microbatches_given_one_by_one(lib: Any, world: Any) -> Any:
    found = []
    for name in ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"):
        schedule, stages, modules = built(lib, world, name, 2, 4)
        x, y = batch(8)
        losses: list[Any] = []
        for stage in stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        args = [(each,) for each in x.chunk(4)] if stages[0].is_first else None
        last = any(stage.is_last for stage in stages)
        schedule._step_microbatches(args, None, list(y.chunk(4)) if last else None, losses if last else None)
        found.append(([loss.detach() for loss in losses], gradients(modules)))
        found.append([chunk for stage in stages for chunk in stage.output_chunks])
        found.append(raised(lambda: schedule._check_inputs([1]), ValueError))  # noqa: B023
        found.append(raised(lambda: schedule._check_inputs((1,) * 4), TypeError))  # noqa: B023
    return found


@program(2)
def backward_without_autograd(lib: Any, world: Any) -> Any:
    s = lib.schedules
    numbers = looped(world.rank, 2, 2)
    modules = layers(numbers)
    stages = stages_of(lib, modules, numbers, 4, world.group, **shapes(4))
    schedule = lib.ScheduleInterleaved1F1B(stages, 4, loss_fn=mse, backward_requires_autograd=False)
    seen: list[str] = []

    def backward(action: Any, context: Any) -> None:
        seen.append(str(action))
        stage = next(each for each in context.schedule_ref._stages if each.stage_index == action.stage_index)
        if not stage.is_last:
            s._wait_batch_p2p(
                context.schedule_ref.bwd_recv_ops.pop((action.stage_index, action.microbatch_index))
            )
        forwards(stage).pop(action.microbatch_index)
        stage.bwd_cache[action.microbatch_index] = (torch.ones(2, 6),) if not stage.is_first else ()

    schedule.register_custom_function(s.FULL_BACKWARD, backward)
    schedule.register_custom_function(s.REDUCE_GRAD, lambda *_: None)
    with torch.no_grad():
        return step(schedule, stages, *batch(8)), seen


class Sequences(nn.Module):
    """Reads on the host how long the sequences of a micro-batch are, and which of its rows count."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.body = Layer(number)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, rows: torch.Tensor, kind: str) -> torch.Tensor:
        self.seen += int(lengths.max())
        parts = x.split(lengths.tolist())
        assert kind == "mean" and all(0 <= row < len(x) for row in rows.tolist())
        return torch.cat([self.body(part) - part.mean(0) for part in parts])[rows]


def host_values(name: str) -> None:
    """Values that a stage reads on the host are those of the micro-batch while shapes are found."""

    @program(2, name=f"host_values_{name}")
    def run(lib: Any, world: Any) -> Any:
        numbers, count = placed(name, world.rank, 2)
        modules = layers(numbers, Sequences)
        stages = stages_of(lib, modules, numbers, count, world.group)
        schedule = getattr(lib, name)(stages[0] if len(numbers) == 1 else stages, 4, loss_fn=mse)
        lengths = torch.tensor([1, 3, 2, 2, 4, 0, 3, 1])  # of two sequences in each micro-batch of 4 rows
        rows = torch.tensor([3, 2, 1, 0, 0, 1, 1, 2, 3, 3, 0, 1, 2, 1, 0, 3])
        found = []
        for seed in (1, 2):
            x, y = batch(16, seed=seed)
            named = {"lengths": lengths.roll(2 * seed), "rows": rows.roll(4 * seed), "kind": "mean"}
            found.append(step(schedule, stages, x, y, **named))
        longest = int(lengths.view(4, 2).max(1).values.sum())
        if lib.root != TORCH:  # which leaves in the buffers what it ran to find shapes
            assert [int(module.seen) for module in modules] == [2 * longest] * len(modules)
        return found, gradients(modules)

    del run


for each in ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B"):
    host_values(each)
