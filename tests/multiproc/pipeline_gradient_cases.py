"""Gradients of pipelines whose ranks share values, parameters and losses, against one process. Six ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import meshcast
import torch
import torch.distributed as dist
from meshcast.errors import AbortedError, LayoutError
from meshcast.pipelining import Edge, PipelineStage, ScheduleZBV, get_schedule_class
from multiproc.pipeline_fault_cases import raises
from multiproc.pipeline_models import (
    CPU,
    TIMEOUT,
    batch,
    in_a_row,
    largest_difference,
    mlp,
    place,
    train_alone,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

mse = nn.functional.mse_loss
SHARD, WHOLE = [Shard(0)], [Replicate()]


def schedule_of(name: str, stage: Any, microbatches: int, loss_fn: Callable[..., Any] = mse, **options: Any):
    return get_schedule_class(name)(stage, microbatches, loss_fn=loss_fn, timeout=TIMEOUT, **options)


def check(module: nn.Module, reference: nn.Module, tolerance: float = 1e-12) -> None:
    difference = largest_difference(module, reference)
    assert difference <= tolerance, f"gradients differ by {difference}"


# ---- values that are whole on data-parallel ranks --------------------------------------------------------


class Bias(nn.Module):
    """A first stage with an output made of parameters alone."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.bias = body, nn.Parameter(torch.linspace(0.1, 1.0, 6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.body(x), self.bias.sin()


class Contrast(nn.Module):
    """Its own rows against all rows."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, mine: torch.Tensor, every: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.body(mine) @ every.t(), dim=1) @ every + bias


def whole_values_case(name: str, sizes: Sequence[int], **options: Any):
    """Output 0 goes to the last stage twice: in shards and as a whole. Output 1 is whole on both sides."""

    def case(_) -> None:
        here = place(in_a_row(sizes))
        if here is None:
            return
        reference, mine = ([Bias(mlp(2)[0]), Contrast(mlp(2)[1])] for _ in range(2))
        x, y = batch(12)

        def run(part: torch.Tensor) -> torch.Tensor:
            hidden, bias = reference[0](part)
            return reference[1](hidden, hidden, bias)

        train_alone(run, x, y, 2)
        placements: dict[str, Any] = (
            {"output_placements": [SHARD, WHOLE]}
            if here.stage == 0
            else {"input_placements": [SHARD, WHOLE, WHOLE]}
        )
        stage = PipelineStage(
            mine[here.stage], here.stage, 2, CPU, group=here.group, mesh=here.mesh,
            edges=[Edge(0, 0, 1, 0), Edge(0, 0, 1, 1), Edge(0, 1, 1, 2)], **placements,
        )  # fmt: skip
        schedule_of(name, stage, 2, **options).step(x, target=y)
        check(mine[here.stage], reference[here.stage])

    case.__name__ = f"whole_values_{name}_{'_'.join(map(str, sizes))}{'_'.join(['', *options])}"
    return case


class Guided(nn.Module):
    """A stage between two: passes on what depends on its input, and what depends on parameters alone."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.query = body, nn.Parameter(torch.linspace(0.2, 1.0, 6, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.body(x), (self.query * self.query).sin()


class Scaled(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return self.body(x * query)


def parameters_alone_case(name: str, **options: Any):
    """Where the backward is split, a root that depends on no input is one all the same."""

    def case(_) -> None:
        rows = [[0, 3], [1, 2]] if name == "ZBV" else [[0], [1], [2]]
        count = sum(map(len, rows))
        here = place(in_a_row([1] * len(rows)))
        if here is None:
            return

        def build() -> list[nn.Module]:
            bodies = mlp(count)
            return [bodies[0], Guided(bodies[1]), Scaled(bodies[2]), *bodies[3:]]

        reference, mine = build(), build()
        x, y = batch(8)

        def run(part: torch.Tensor) -> torch.Tensor:
            value = reference[2](*reference[1](reference[0](part)))
            return reference[3](value) if count == 4 else value

        train_alone(run, x, y, 4)
        stages = [
            PipelineStage(mine[index], index, count, CPU, group=here.group, mesh=here.mesh)
            if index != 1
            else PipelineStage(
                mine[1], 1, count, CPU, group=here.group, mesh=here.mesh, output_placements=[SHARD, WHOLE]
            )
            for index in rows[here.stage]
        ]
        schedule_of(name, stages if len(stages) > 1 else stages[0], 4, **options).step(x, target=y)
        for index in rows[here.stage]:
            check(mine[index], reference[index])

    case.__name__ = f"parameters_alone_{name}{'_'.join(['', *options])}"
    return case


# ---- one parameter in two stages of a rank ---------------------------------------------------------------


def a_parameter_in_two_stages_of_a_rank(_) -> None:
    here = place(in_a_row([3, 2]))
    if here is None:
        return

    def build() -> list[nn.Module]:
        bodies = mlp(4)
        bodies[3][2].weight = bodies[0][2].weight
        return bodies

    reference, mine = build(), build()
    x, y = batch(12)
    train_alone(nn.Sequential(*reference), x, y, 4)
    stages = [
        PipelineStage(mine[index], index, 4, CPU, group=here.group, mesh=here.mesh)
        for index in ([0, 3], [1, 2])[here.stage]
    ]
    for by_step in (True, False):
        for stage in stages:
            stage.submod.zero_grad()
        schedule = ScheduleZBV(stages, 4, loss_fn=mse, timeout=TIMEOUT, sync_gradients=by_step)
        schedule.step(x, target=y)
        if not by_step:
            for stage in stages:
                stage.sync_gradients()
        for stage in stages:
            check(stage.submod, reference[stage.stage_index])


# ---- wrappers --------------------------------------------------------------------------------------------


class Blocks(nn.Module):
    """Nested modules, with a parameter of its own and a buffer that a forward changes."""

    def __init__(self, dtype: torch.dtype, seed: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(2, dtype=dtype, seed=seed))
        self.scale = nn.Parameter(torch.full((6,), 1.5, dtype=dtype))
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        for block in self.blocks:
            x = x + block(x)
        return x * self.scale


def sharded(module: Blocks, mesh: DeviceMesh, nested: bool) -> nn.Module:
    if nested:
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
    return fully_shard(module, mesh=mesh)


def alone_in_float64(x: torch.Tensor, y: torch.Tensor, microbatches: int) -> list[Blocks]:
    """The reference of two stages of Blocks: values of `x.dtype` parameters, arithmetic in float64."""
    reference = [Blocks(x.dtype, seed).double() for seed in range(2)]
    train_alone(nn.Sequential(*reference), x.double(), y.double(), microbatches)
    return reference


def difference(module: nn.Module, reference: nn.Module) -> float:
    """Largest relative difference of a gradient."""
    found = []
    for mine, theirs in zip(module.parameters(), reference.parameters(), strict=True):
        grad = mine.grad.full_tensor() if isinstance(mine.grad, DTensor) else mine.grad
        found.append(((grad.double() - theirs.grad.double()).norm() / theirs.grad.double().norm()).item())
    return max(found)


def fsdp_case(dtype: torch.dtype, nested: bool, hybrid: bool = False):
    """FSDP2 over a stage's own ranks, no shapes given: gradients are those of the global batch. Training and
    evaluation in turn, by two schedules."""

    def case(_) -> None:
        here = place([[[0, 1], [2, 3]] if hybrid else [0, 1, 2], [4, 5]])
        if here is None:
            return
        x, y = batch(12, dtype=dtype)
        reference = alone_in_float64(x, y, 2)
        expected = reference[here.stage]
        coarse = [Blocks(dtype, seed) for seed in range(2)]
        train_alone(nn.Sequential(*coarse), x, y, 2)
        options: dict[str, Any] = {}
        if here.mesh.ndim == 2:
            split = [Shard(0), Shard(0)]
            options = {"input_placements": split, "output_placements": split}
        module = sharded(Blocks(dtype, here.stage), here.mesh, nested)
        stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh, **options)
        schedules = [schedule_of(name, stage, 2) for name in ("1F1B", "GPipe")]
        limit = 1e-5 if dtype == torch.float32 else 4 * difference(coarse[here.stage], expected)
        for schedule in (schedules[0], schedules[0], schedules[1]):
            module.zero_grad()
            schedule.eval(x[:6])
            schedule.step(x, target=y)
            schedules[1].eval(x)
            found = difference(module, expected)
            assert found <= limit, f"gradients differ by {found}, allowed {limit}"
        assert int(module.calls) == 3 * 3 * 2, "the inference of shapes ran the module"

    kind = "hybrid" if hybrid else "nested" if nested else "flat"
    case.__name__ = f"fsdp_{kind}_{str(dtype).removeprefix('torch.')}"
    return case


def columns_case(wrapper: str):
    """torch's way: a pipeline in each of three data-parallel columns; gradients are the mean over these."""

    def case(context) -> None:
        column, index = context.rank % 3, context.rank // 3
        groups = [dist.new_group([each, each + 3]) for each in range(3)]
        meshes = [DeviceMesh("cpu", list(ranks)) for ranks in ((0, 1, 2), (3, 4, 5))]
        dtype = torch.float32
        x, y = batch(12, dtype=dtype)
        reference = alone_in_float64(x, y, 3)
        module: nn.Module = Blocks(dtype, index)
        if wrapper == "ddp":
            module = DistributedDataParallel(module, process_group=meshes[index].get_group())
        else:
            module = sharded(module, meshes[index], wrapper == "nested")
        stage = PipelineStage(module, index, 2, CPU, group=groups[column])
        schedule = schedule_of("1F1B", stage, 2)
        for _ in range(2):
            module.zero_grad()
            schedule.step(x.chunk(3)[column], target=y.chunk(3)[column])
            found = difference(module, reference[index])
            assert found <= 1e-5, f"gradients differ by {found}"

    case.__name__ = f"columns_{wrapper}"
    return case


# ---- losses ----------------------------------------------------------------------------------------------


def token_loss(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    total = nn.functional.cross_entropy(
        output.flatten(0, -2), target.flatten(), ignore_index=-100, reduction="sum"
    )
    return total, (target != -100).sum()


def labels(rows: int, tokens: int, seed: int = 3) -> torch.Tensor:
    """Few of the tokens count, and unlike many in each row."""
    torch.manual_seed(seed)
    found = torch.randint(0, 6, (rows, tokens))
    for row in range(rows):
        found[row, row % (tokens + 1) :] = -100
    return found


def weighted_case(name: str, wrapper: str = "", sizes: Sequence[int] = (2, 3), **options: Any):
    """Tokens that are not counted, unlike many on each rank and micro-batch; ranks without samples."""

    def case(_) -> None:
        here = place(in_a_row(sizes))
        if here is None:
            return
        reference, mine = mlp(2), mlp(2)
        torch.manual_seed(1)
        x, y = torch.randn(7, 4, 6, dtype=torch.float64), labels(7, 4)
        total, weight = token_loss(nn.Sequential(*reference)(x), y)
        (total / weight).backward()
        module = mine[here.stage]
        if wrapper:
            module = fully_shard(module, mesh=here.mesh)
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(torch.ones(()))

        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            found, count = token_loss(output, target)
            return scaler.scale(found), count

        stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
        schedule = schedule_of(name, stage, 3, loss_fn, **options)
        for step in range(3):  # gradients add up: those of earlier steps are not divided again
            with torch.no_grad():
                module(x[:2])  # a forward of the user's own leaves FSDP2's parameters gathered
            losses: list[torch.Tensor] = []
            schedule.step(x, target=y, losses=losses)
            if here.stage:
                each = [
                    token_loss(nn.Sequential(*reference)(a), b)
                    for a, b in zip(x.tensor_split(3), y.tensor_split(3), strict=True)
                ]
                for found, (part, count) in zip(losses, each, strict=True):
                    assert abs(found / 64 - part / max(1, count)) <= 1e-12
            for parameter in module.parameters():
                parameter.grad.div_(64 * (step + 1))
            check(module, reference[here.stage])
            for parameter in module.parameters():
                parameter.grad.mul_(64 * (step + 1))

    label = "_".join(map(str, sizes))
    case.__name__ = f"weighted_{name}_{label}{'_' + wrapper if wrapper else ''}{'_'.join(['', *options])}"
    return case


def sequence_case(tensor_parallel: bool, weighted: bool):
    """The loss over a sequence that ranks share: context parallelism, or sequence shards of a tensor-parallel
    stage."""

    def case(_) -> None:
        here = place([[0], [[1, 2], [3, 4]]])
        if here is None:
            return
        reference, mine = mlp(2, hidden=8), mlp(2, hidden=8)
        torch.manual_seed(1)
        tokens = 4 if tensor_parallel else 5  # torch's tensor parallelism cuts sequences evenly
        x, y = torch.randn(6, tokens, 6, dtype=torch.float64), labels(6, tokens)
        plain = y.clamp(min=0)

        def mean_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(output.flatten(0, -2), target.flatten())

        output = nn.Sequential(*reference)(x)
        if weighted:
            total, weight = token_loss(output, y)
            (total / weight).backward()
        else:
            mean_loss(output, plain).backward()
        module = mine[here.stage]
        options: dict[str, Any] = {}
        if here.stage:
            options = {"input_placements": [Shard(0), Shard(1)], "loss_dims": ["data", "tensor"]}
            if tensor_parallel:
                ways = {
                    "0": ColwiseParallel(input_layouts=Shard(1)),
                    "2": RowwiseParallel(output_layouts=Shard(1)),
                }
                parallelize_module(module, here.mesh["tensor"], ways)
            else:
                options["data_dims"] = ["data", "tensor"]
        loss_fn = token_loss if weighted else mean_loss

        def stage(**more: Any) -> PipelineStage:
            return PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh, **more)

        unsaid = {"input_placements": options["input_placements"]} if here.stage else {}
        raises(
            LayoutError if here.stage else AbortedError,
            "loss_dims=[0, 1]",
            call=lambda: schedule_of("1F1B", stage(**unsaid), 2, loss_fn).step(x, target=y),
        )
        schedule_of("1F1B", stage(**options), 2, loss_fn).step(x, target=y if weighted else plain)
        check(module, reference[here.stage])

    kind = "tensor_parallel" if tensor_parallel else "context"
    case.__name__ = f"sequence_{kind}_{'weighted' if weighted else 'mean'}"
    return case


# ---- batches of other sizes, and modules that fake tensors cannot run ------------------------------------


class Heads(nn.Module):
    """Cannot run on an empty batch."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = x.view(x.shape[0], -1, 2, 3).softmax(dim=2)
        return self.body(x) + heads.reshape(x.shape)


class InPlace(nn.Module):
    """Writes on its input."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x.tanh_())


class Experts(nn.Module):
    """Which rows go where depends on the data."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.experts = nn.ModuleList([body, mlp(1, seed=5)[0]])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x.sum(-1) > 0).long()
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero()[:, 0]
            if len(rows):
                result = result.index_add(0, rows, expert(x[rows]))
        return result


def sizes_case(name: str, kind: type[nn.Module], **options: Any):
    """Batches of 12, 7, 2 and 1 samples in 4 micro-batches on ranks that often have none; evaluation of 5."""

    def case(_) -> None:
        here = place(in_a_row([2, 3, 1]))
        reference, mine = ([kind(body) for body in mlp(3)] for _ in range(2))
        module = mine[here.stage]
        stage = PipelineStage(module, here.stage, 3, CPU, group=here.group, mesh=here.mesh)
        schedule = schedule_of(name, stage, 4, **options)
        for step, rows in enumerate((12, 7, 12, 2, 1)):
            x, y = batch(rows, seed=step)
            for each in (*reference, module):
                each.zero_grad()
            # A micro-batch counts by its samples: the loss is that of the whole batch.
            mse(nn.Sequential(*reference)(x.clone()), y).backward()
            output = schedule.step(x, target=y)
            for (label, mine_), theirs in zip(
                module.named_parameters(), reference[here.stage].parameters(), strict=True
            ):
                expected = torch.zeros_like(theirs) if theirs.grad is None else theirs.grad
                found = torch.zeros_like(theirs) if mine_.grad is None else mine_.grad
                assert (found - expected).abs().max() <= 1e-12, f"{rows} rows: {label}"
            if here.stage == 2:
                assert output.shape == (rows, 6)
        result = schedule.eval(batch(5)[0])
        if here.stage == 2:
            assert (result - nn.Sequential(*reference)(batch(5)[0])).abs().max() <= 1e-12

    case.__name__ = f"sizes_{name}_{kind.__name__}{'_'.join(['', *options])}"
    return case


def evaluation_in_inference_mode(_) -> None:
    here = place(in_a_row([2, 3]))
    if here is None:
        return
    reference, module = mlp(2), mlp(2)[here.stage]
    stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
    schedule = schedule_of("1F1B", stage, 2)
    x, y = batch(8)
    train_alone(nn.Sequential(*reference), x, y, 2)
    for _ in range(2):
        module.zero_grad()
        losses: list[torch.Tensor] = []
        with torch.inference_mode():
            output = schedule.eval(x, target=y, losses=losses)
        if here.stage:
            assert len(losses) == 2
            shards = [each.tensor_split(3)[here.mesh.get_local_rank()] for each in
                      nn.Sequential(*reference)(x).detach().chunk(2)]  # fmt: skip
            sizes = [[2, 2, 0][here.mesh.get_local_rank()]] * 2
            assert output.shape[0] == sum(sizes), shards
        schedule.step(x, target=y)
        check(module, reference[here.stage])


# ---- refusals --------------------------------------------------------------------------------------------


def what_a_constructor_refuses_on_one_rank(context) -> None:
    """The others hear of it at once; then all can go on."""
    here = place(in_a_row([2, 3]))
    if here is None:
        return
    reference, module = mlp(2), mlp(2)[here.stage]
    x, y = batch(8)

    def step(**options: Any) -> None:
        stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh, **options)
        schedule_of("1F1B", stage, 2).step(x, target=y)

    wrong = {"data_dims": [3]} if context.rank == 3 else {}
    raises(
        LayoutError if wrong else AbortedError, "data_dims: expected mesh dimensions 0..0", "found 3",
        call=lambda: step(**wrong),
    )  # fmt: skip
    wrong = {"shared_parameters": {"tied": "0.nothing"}} if context.rank == 0 else {}
    raises(LayoutError if wrong else AbortedError, "no parameter '0.nothing'", call=lambda: step(**wrong))
    train_alone(nn.Sequential(*reference), x, y, 2)
    step()
    check(module, reference[here.stage])


def a_plain_reshard_after_a_refusal(context) -> None:
    """Between the same meshes, on the private group that the pipeline uses."""
    meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3, 4])]
    group = dist.new_group(list(range(5)))
    if context.rank == 5:
        return
    index = int(context.rank > 1)
    schedule = schedule_of(
        "1F1B", PipelineStage(mlp(2)[index], index, 2, CPU, group=group, mesh=meshes[index]), 2
    )
    x, y = batch(8)
    schedule.step(x, target=y)
    raises((LayoutError, AbortedError), "no samples", call=lambda: schedule.step(x[:0], target=y))
    value = distribute_tensor(x, meshes[0], [Shard(0)], src_data_rank=None) if index == 0 else None
    given = value if value is not None else meshcast.TensorSpec(x.shape, x.dtype, meshes[0], [Shard(0)])
    moved = meshcast.reshard(given, meshes[1], [Replicate()], group=group)
    if index:
        assert torch.equal(moved.to_local(), x)
    schedule.step(x, target=y)


def an_ambiguous_stage_is_refused(_) -> None:
    """An input that is whole beside one that is cut by features or tokens, and plain parameters."""
    here = place([[0], [1, 2]])
    if here is None:
        return
    options: dict[str, Any] = {}
    if here.stage:
        options = {"input_placements": [[Shard(1)], [Replicate()]]}

    class Two(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return self.body(x), self.body(x).mean(0)

    class Join(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def forward(self, x: torch.Tensor, m: torch.Tensor) -> torch.Tensor:
            return (x.sum() + m.sum()) * self.scale

    def step(**more: Any) -> None:
        module = Join() if here.stage else Two(mlp(1)[0])
        stage = PipelineStage(
            module, here.stage, 2, CPU, group=here.group, mesh=here.mesh,
            edges=[Edge(0, 0, 1, 0), Edge(0, 1, 1, 1)],
            **({"output_placements": WHOLE} if here.stage == 0 else {}), **options, **more,
        )  # fmt: skip
        schedule_of("1F1B", stage, 2, lambda out, _: out).step(*batch(4)[:1], target=batch(4)[1])

    raises(LayoutError if here.stage else AbortedError, "data_dims=[0]", "data_dims=[]", call=step)
    step(**({"data_dims": []} if here.stage else {}))


CASES = [
    *[whole_values_case("1F1B", sizes) for sizes in ((1, 2), (2, 1), (2, 3), (3, 3))],
    whole_values_case("ZBH1", (2, 3)),
    *[parameters_alone_case(name) for name in ("1F1B", "ZBH1", "ZBH2", "ZBV")],
    parameters_alone_case("Eager1F1B", delay_weight_grad=True),
    a_parameter_in_two_stages_of_a_rank,
    *[fsdp_case(dtype, nested) for dtype in (torch.float32, torch.bfloat16) for nested in (False, True)],
    fsdp_case(torch.float32, True, hybrid=True),
    *[columns_case(wrapper) for wrapper in ("ddp", "flat", "nested")],
    weighted_case("1F1B"),
    weighted_case("1F1B", sizes=(1, 2)),
    weighted_case("Eager1F1B", delay_weight_grad=True),
    weighted_case("GPipe", "fsdp"),
    *[sequence_case(parallel, weighted) for parallel in (False, True) for weighted in (False, True)],
    sizes_case("1F1B", Heads),
    sizes_case("1F1B", InPlace),
    sizes_case("1F1B", Experts),
    sizes_case("ZBH1", Heads),
    evaluation_in_inference_mode,
    what_a_constructor_refuses_on_one_rank,
    a_plain_reshard_after_a_refusal,
    an_ambiguous_stage_is_refused,
]
