"""Programs about stages: values between them, micro-batches, traced stages, data and tensor parallelism."""

from __future__ import annotations

from typing import Any

import torch
from multiproc.torch_programs import (
    CPU,
    Layer,
    batch,
    gradients,
    layers,
    looped,
    program,
    raised,
    stages_of,
    step,
)
from multiproc.torch_schedule_cases import built, mse
from torch import nn
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

PAIR = ("ScheduleGPipe", "Schedule1F1B", "ScheduleInterleaved1F1B", "ScheduleInterleavedZeroBubble")


class Several(Layer):
    """Tensors in, more out: one is whole numbers, one nobody uses, one is the input as it was."""

    def forward(self, x: torch.Tensor, *more: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y = super().forward(x) + (more[0].float().sum() * 0.01 if more else 0)
        return y, torch.arange(x.shape[0]) + 1, y.exp(), x * 1.0


class Scaled(Layer):
    """Takes keyword arguments, some of which are not there."""

    def forward(
        self, x: torch.Tensor, *, scale: Any = None, nothing: Any = None, more: Any = None
    ) -> torch.Tensor:
        assert nothing is None
        y = super().forward(x)
        y = y if scale is None else y * scale
        return y if more is None else y + more["bias"] * more["factor"]


def first_of(output: Any, target: torch.Tensor) -> torch.Tensor:
    return mse(output[0], target) + output[2].mean()


@program(3)
def several_values(lib: Any, world: Any) -> Any:
    found = []
    for name in ("ScheduleGPipe", "Schedule1F1B"):
        modules = layers([world.rank], Several)
        stages = stages_of(lib, modules, [world.rank], 3, world.group)
        schedule = getattr(lib, name)(stages[0], 4, loss_fn=first_of)
        found.append((step(schedule, stages, *batch(8)), gradients(modules)))
    return found


@program(2)
def several_values_in_a_loop(lib: Any, world: Any) -> Any:
    numbers = looped(world.rank, 2, 2)
    modules = layers(numbers, Several)
    stages = stages_of(lib, modules, numbers, 4, world.group)
    schedule = lib.ScheduleInterleavedZeroBubble(stages, 4, loss_fn=first_of)
    return step(schedule, stages, *batch(8)), gradients(modules)


@program(3)
def keyword_arguments_of_every_stage(lib: Any, world: Any) -> Any:
    found = []
    for name in ("ScheduleGPipe", "Schedule1F1B"):
        modules = layers([world.rank], Scaled)
        stages = stages_of(lib, modules, [world.rank], 3, world.group)
        schedule = getattr(lib, name)(stages[0], 4, loss_fn=mse)
        scale = torch.rand(8, 1, generator=torch.Generator().manual_seed(world.rank))
        more = {"bias": torch.ones(8, 6) * world.rank, "factor": 0.5}
        found.append(step(schedule, stages, *batch(8), scale=scale, nothing=None, more=more))
        found.append(gradients(modules))
    return found


@program(2)
def how_arguments_are_cut(lib: Any, world: Any) -> Any:
    TensorChunkSpec, replicate = lib.microbatch.TensorChunkSpec, lib.microbatch._Replicate

    class Columns(Layer):
        def forward(self, x: torch.Tensor, bias: Any = None, *, wide: Any = None) -> torch.Tensor:
            y = super().forward(x.t().contiguous() if bias is not None else x)
            return y if bias is None else y + bias + wide.t()

    modules = layers([world.rank], Columns)
    stages = stages_of(lib, modules, [world.rank], 2, world.group)
    specs = {}
    if world.rank == 0:
        specs["args_chunk_spec"] = (TensorChunkSpec(1), replicate())
        specs["kwargs_chunk_spec"] = TensorChunkSpec.from_dict({"wide": 1})
    schedule = lib.ScheduleGPipe(stages[0], 4, loss_fn=mse, **specs)
    x, y = batch(8)
    if world.rank == 0:
        output = schedule.step(x.t().contiguous(), torch.ones(6), wide=torch.arange(48.0).reshape(6, 8))
    else:
        output = schedule.step(target=y)
    return output, gradients(modules)


@program(2)
def how_outputs_are_joined(lib: Any, world: Any) -> Any:
    TensorChunkSpec, add = lib.microbatch.TensorChunkSpec, lib.microbatch.sum_reducer
    largest = lib.microbatch._CustomReducer(torch.tensor(-1e9), lambda a, b: torch.maximum(a, b))

    class Last(Layer):
        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x)
            return (y, y.t().contiguous(), y.sum(), y.max()) if self.last else y

    modules = layers([world.rank], Last)
    modules[0].last = world.rank == 1
    stages = stages_of(lib, modules, [world.rank], 2, world.group)
    spec = (TensorChunkSpec(0), TensorChunkSpec(1), add, largest)
    schedule = lib.ScheduleGPipe(
        stages[0], 4, loss_fn=lambda output, target: mse(output[0], target), output_merge_spec=spec
    )
    found = [step(schedule, stages, *batch(8)), gradients(modules)]
    with torch.no_grad():
        found.append(step(schedule, stages, *batch(8), call="eval"))
    return found


@program(2)
def pieces_of_a_batch(lib: Any, _: Any) -> Any:
    m = lib.microbatch
    x, y = batch(10)
    args, kwargs = m.split_args_kwargs_into_chunks((x, 3), {"y": y, "none": None}, 4)
    merged = m.merge_chunks([{"a": each[0]} for each in args], None)
    block = torch.nn.attention.flex_attention.create_block_mask(
        lambda _, __, q, k: q >= k, 8, None, 256, 256, device="cpu"
    )
    masks = m._split_block_mask(block, 4)
    return args, kwargs, merged, [mask.kv_num_blocks for mask in masks], str(m.TensorChunkSpec(1))


@program(2)
def block_masks(lib: Any, world: Any) -> Any:
    class Masked(Layer):
        def forward(self, x: torch.Tensor, block: Any = None) -> torch.Tensor:
            y = super().forward(x)
            if block is None:
                return y
            assert block.kv_num_blocks.shape[0] in (1, 2), block.kv_num_blocks.shape
            return y * (1 + block.kv_num_blocks.sum() * 0.01)

    create = torch.nn.attention.flex_attention.create_block_mask
    found = []
    for rows in (8, None):
        modules = layers([world.rank], Masked)
        stages = stages_of(lib, modules, [world.rank], 2, world.group)
        schedule = lib.Schedule1F1B(stages[0], 4, loss_fn=mse)
        block = create(lambda b, _, q, k: q + b * 32 >= k, rows, None, 256, 256, device="cpu")
        found.append((step(schedule, stages, *batch(8), block=block), gradients(modules)))
    return found


@program(2)
def an_input_that_needs_a_gradient(lib: Any, world: Any) -> Any:
    found = []
    for name in PAIR:
        schedule, stages, modules = built(lib, world, name, 2, 4)
        x, y = batch(8)
        step(schedule, stages, x.requires_grad_(), y)
        found.append((x.grad if world.rank == 0 else None, gradients(modules)))
    return found


@program(2)
def given_shapes(lib: Any, world: Any) -> Any:
    example = torch.empty(2, 6, device="meta", requires_grad=True)
    found = []
    for more in (
        {"input_args": example, "output_args": example},
        {"input_args": (example,), "output_args": (example,), "output_grads": None},
        {"output_args": example},
    ):
        modules = layers([world.rank])
        stages = stages_of(lib, modules, [world.rank], 2, world.group, **more)
        schedule = lib.Schedule1F1B(stages[0], 4, loss_fn=mse)
        found.append((step(schedule, stages, *batch(8)), gradients(modules)))
    return found


@program(2)
def dtypes(lib: Any, world: Any) -> Any:
    found = []
    for dtype in (torch.float64, torch.bfloat16):
        modules = layers([world.rank], lambda number, dtype=dtype: Layer(number, dtype=dtype))
        stages = stages_of(lib, modules, [world.rank], 2, world.group)
        schedule = lib.Schedule1F1B(stages[0], 4, loss_fn=mse)
        found.append((step(schedule, stages, *batch(8, dtype=dtype)), gradients(modules)))
    return found


@program(2)
def dropout_and_recomputation(lib: Any, world: Any) -> Any:
    class Block(Layer):
        def body(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.dropout(super().forward(x), 0.3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.body, x, use_reentrant=False)

    found = []
    for name in ("ScheduleGPipe", "Schedule1F1B"):
        modules = layers([world.rank], Block)
        stages = stages_of(lib, modules, [world.rank], 2, world.group)
        schedule = getattr(lib, name)(stages[0], 4, loss_fn=mse)
        torch.manual_seed(world.rank)
        found.append((step(schedule, stages, *batch(8)), gradients(modules), torch.rand(2)))
    return found


@program(2)
def frozen_parameters(lib: Any, world: Any) -> Any:
    found = []
    for name in PAIR:
        schedule, stages, modules = built(lib, world, name, 2, 4)
        for module in modules:
            module.first.weight.requires_grad_(False)
        found.append((step(schedule, stages, *batch(8)), gradients(modules)))
    return found


class Whole(nn.Module):
    """What the tracer cuts. skip: the second part uses a value of the first, the fourth again."""

    def __init__(self, skip: bool = False) -> None:
        super().__init__()
        torch.manual_seed(9)
        self.parts = nn.ModuleList(Layer(number) for number in range(4))
        self.skip = skip

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        first = self.parts[0](x) * scale
        y = self.parts[1](first)
        y = self.parts[2](y)
        return self.parts[3](y) + (first if self.skip else 0)


def traced(lib: Any, model: nn.Module, x: torch.Tensor, scale: torch.Tensor, count: int) -> Any:
    cuts = {f"parts.{number}": lib.SplitPoint.BEGINNING for number in range(1, 4) if number * count % 4 == 0}
    return lib.pipeline(model, mb_args=(x,), mb_kwargs={"scale": scale}, split_spec=cuts)


def traced_case(name: str, direct: bool) -> None:
    @program(4, name=f"traced_{name}_{'build_stage' if direct else 'pipe'}")
    def run(lib: Any, world: Any) -> Any:
        x, y = batch(16)
        scale = torch.rand(16, 1)
        pipe = traced(lib, Whole(), x[:2], scale[:2], 4)
        group = world.group
        if direct:
            module = pipe.get_stage_module(world.rank)
            stage = lib.stage.build_stage(module, world.rank, pipe.info(), CPU, group)
        else:
            stage = pipe.build_stage(world.rank, CPU, group)
        schedule = getattr(lib, name)(stage, 8, loss_fn=mse)
        found = []
        for _ in range(2):
            if world.rank == 0:
                found.append(schedule.step(x, scale=scale))
            else:
                found.append(step(schedule, [stage], x, y))
        return found, gradients([stage.submod]), pipe.num_stages, stage.submod is not None


traced_case("ScheduleGPipe", False)
traced_case("Schedule1F1B", True)


@program(4)
def traced_with_a_skip(lib: Any, world: Any) -> Any:
    x, _ = batch(16)
    scale = torch.rand(16, 1)
    pipe = traced(lib, Whole(skip=True), x[:2], scale[:2], 4)
    stage = pipe.build_stage(world.rank, CPU, world.group)
    schedule = lib.schedules._ScheduleForwardOnly(stage, 8)
    with torch.no_grad():
        return schedule.step(x, scale=scale) if world.rank == 0 else schedule.step()


@program(2)
def traced_in_a_loop(lib: Any, world: Any) -> Any:
    x, y = batch(16)
    cuts = {str(number): lib.SplitPoint.BEGINNING for number in (1, 2, 3)}
    pipe = lib.pipeline(nn.Sequential(*layers([0, 1, 2, 3])), mb_args=(x[:4],), split_spec=cuts)
    stages = [pipe.build_stage(number, CPU, world.group) for number in looped(world.rank, 2, 2)]
    schedule = lib.ScheduleInterleaved1F1B(stages, 4, loss_fn=mse)
    return step(schedule, stages, x, y), gradients([stage.submod for stage in stages])


@program(4)
def cut_inside_the_model(lib: Any, world: Any) -> Any:
    class Marked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.ModuleList(Layer(number) for number in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for part in self.parts[:3]:
                x = part(x)
                lib.pipe_split()
            return self.parts[3](x)

    x, y = batch(16)
    pipe = lib.pipeline(Marked(), mb_args=(x[:2],))
    stage = pipe.build_stage(world.rank, CPU, world.group)
    schedule = lib.ScheduleGPipe(stage, 8, loss_fn=mse)
    return step(schedule, [stage], x, y), gradients([stage.submod])


def column(world: Any) -> tuple[int, int]:
    """This rank's stage, of two, and its data-parallel part."""
    return world.mesh.get_local_rank("pp"), world.mesh.get_local_rank("dp")


def in_columns(name: str, how: str) -> None:
    @program(4, name=f"columns_{how}_{name}", exact=how == "none")
    def run(lib: Any, world: Any) -> Any:
        rank, part = column(world)
        numbers, count = ([rank], 2) if name in ("ScheduleGPipe", "Schedule1F1B") else (looped(rank, 2, 2), 4)
        inner, over = layers(numbers), world.mesh["dp"]
        modules: list[Any] = []
        for module in inner:
            if how == "ddp":
                module = DistributedDataParallel(module, process_group=world.mesh.get_group("dp"))
            elif how == "fsdp":
                fully_shard(module, mesh=over)
            elif how == "fsdp nested":
                fully_shard(module.first, mesh=over)
                fully_shard(module, mesh=over)
            elif how == "fsdp mixed":
                policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
                fully_shard(module, mesh=over, mp_policy=policy)
            elif how == "fsdp inside":
                module = nn.Sequential(fully_shard(module, mesh=over), nn.Identity())
            elif how == "replicated":
                replicate(module, mesh=over)
            modules.append(module)
        stages = stages_of(lib, modules, numbers, count, world.mesh.get_group("pp"))
        for stage, module in zip(stages, modules, strict=True) if "late" in how else ():
            if how == "fsdp late":
                fully_shard(module, mesh=over)
            else:
                stage.submod = DistributedDataParallel(module, process_group=world.mesh.get_group("dp"))
        schedule = getattr(lib, name)(stages[0] if count == 2 else stages, 4, loss_fn=mse)
        optimizer = torch.optim.SGD([p for m in modules for p in m.parameters()], lr=0.1)
        found = []
        for seed in range(2):
            optimizer.zero_grad()
            output, losses = step(schedule, stages, *batch(8, seed=seed * 2 + part))
            found.append((None if output is None else output.float(), losses, gradients(modules)))
            optimizer.step()
        return found


for how in (
    "none",
    "ddp",
    "fsdp",
    "fsdp nested",
    "fsdp mixed",
    "fsdp inside",
    "fsdp late",
    "ddp late",
    "replicated",
):
    in_columns("Schedule1F1B", how)
in_columns("ScheduleGPipe", "fsdp")
in_columns("ScheduleInterleaved1F1B", "fsdp")
in_columns("ScheduleInterleavedZeroBubble", "fsdp")
in_columns("ScheduleLoopedBFS", "fsdp")


@program(4, exact=False)
def ddp_without_synchronization(lib: Any, world: Any) -> Any:
    rank, part = column(world)
    module = DistributedDataParallel(Layer(rank), process_group=world.mesh.get_group("dp"))
    stages = stages_of(lib, [module], [rank], 2, world.mesh.get_group("pp"))
    schedule = lib.ScheduleGPipe(stages[0], 4, loss_fn=mse, scale_grads=False)
    with module.no_sync():
        step(schedule, stages, *batch(8, seed=part))
    apart = gradients([module])
    step(schedule, stages, *batch(8, seed=part + 2))
    return apart, gradients([module])


def dtensor_stages(name: str, keeps: bool) -> None:
    @program(4, name=f"tensor_parallel_{name}_{'dtensors' if keeps else 'plain'}", exact=False)
    def run(lib: Any, world: Any) -> Any:
        rank, _ = column(world)
        mesh = world.mesh["dp"]

        class Parallel(Layer):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                given = (
                    x if isinstance(x, DTensor) or not keeps else DTensor.from_local(x, mesh, [Replicate()])
                )
                y = self.second(torch.tanh(self.first(given)))
                return given + y if keeps else x + y

        module = Parallel(rank, hidden=8)
        plan = {
            "first": ColwiseParallel(),
            "second": RowwiseParallel(output_layouts=Replicate(), use_local_output=not keeps),
        }
        parallelize_module(module, mesh, plan)
        more = {"get_mesh": lambda *_: mesh} if keeps else {}
        stages = stages_of(lib, [module], [rank], 2, world.mesh.get_group("pp"), **more)

        def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
            return mse(output.full_tensor() if isinstance(output, DTensor) else output, target)

        schedule = getattr(lib, name)(stages[0], 4, loss_fn=loss_fn)
        found = []
        for seed in range(2):
            found.append((step(schedule, stages, *batch(8, seed=seed)), gradients([module])))
        return found


for each in ("ScheduleGPipe", "Schedule1F1B"):
    dtensor_stages(each, True)
    dtensor_stages(each, False)


@program(4, exact=False)
def dtensors_that_are_sharded(lib: Any, world: Any) -> Any:
    rank, _ = column(world)
    mesh = world.mesh["dp"]

    class Rows(Layer):
        """Its values are cut by samples; its parameters are whole."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            given = x if isinstance(x, DTensor) else DTensor.from_local(x, mesh, [Replicate()])
            given = given.redistribute(placements=[Shard(0)])
            return given + self.second(torch.tanh(self.first(given)))

    module = Rows(rank)
    for part in (module.first, module.second):
        parallelize_module(part, mesh, {})
        for key, value in list(part.named_parameters()):
            whole = DTensor.from_local(value.detach(), mesh, [Replicate()])
            part.register_parameter(key, nn.Parameter(whole))
    stages = stages_of(lib, [module], [rank], 2, world.mesh.get_group("pp"), get_mesh=lambda *_: mesh)
    schedule = lib.Schedule1F1B(stages[0], 4, loss_fn=lambda out, target: mse(out.full_tensor(), target))
    return step(schedule, stages, *batch(8)), gradients([module])


@program(2)
def other_names(lib: Any, world: Any) -> Any:
    s, g, m, u, b = lib.schedules, lib.stage, lib.microbatch, lib._utils, lib._backward
    names = [
        *(s._PipelineSchedule, s.PipelineScheduleSingle, s.PipelineScheduleMulti, s._PipelineScheduleRuntime),
        *(
            g._PipelineStageBase,
            s._ScheduleForwardOnly,
            s._Action,
            s._PipelineContext,
            s._CustomFunctionProtocol,
        ),
        *(
            s._wait_batch_p2p,
            g._normalize_model_output_as_tuple,
            m._split_block_mask,
            m._Replicate,
            s._batch_p2p,
        ),
        *(b.stage_backward, b.stage_backward_input, b.stage_backward_weight, u.flatten_args, u.PipeInfo),
        *(g.PipelineStage, g.build_stage, g._PipelineStage, s._ComputationType, s.get_schedule_class),
    ]
    stage = lib.PipelineStage(Layer(0), world.rank, 2, CPU, group=world.group)
    schedule = lib.ScheduleGPipe(stage, 2)
    return [
        [name.__name__ for name in names],
        [s.OVERLAP_F_B.value, s.FORWARD.value, s.I.value],
        isinstance(stage, g._PipelineStageBase),
        isinstance(schedule, s.PipelineScheduleSingle) and isinstance(schedule, s._PipelineSchedule),
        issubclass(lib.ScheduleZBVZeroBubble, s._PipelineScheduleRuntime),
        issubclass(lib.ScheduleInterleaved1F1B, s.PipelineScheduleMulti),
        raised(lambda: schedule.step(torch.ones(1, 2), 3, 4, target=3, losses=4), Exception) != "",
    ]
