"""Delayed weights and several stages on a rank train as one process does. Five ranks."""

from __future__ import annotations

import torch
import torch.distributed as dist
from meshcast.errors import AbortedError, LayoutError
from meshcast.pipelining import Edge, PipelineStage, ScheduleInterleaved1F1B, get_schedule_class
from multiproc.pipeline_fault_cases import raises
from multiproc.pipeline_models import (
    CPU,
    TIMEOUT,
    batch,
    in_a_row,
    largest_difference,
    mlp,
    place,
    schedule_of,
    train_alone,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.nn.parallel import DistributedDataParallel

# Stages of each row of the schedule, and the ranks of the rows.
ROWS = {
    "interleaved_2_rows": ("Interleaved1F1B", [[0, 2], [1, 3]], [[0], [1]]),
    "interleaved_1_to_2": ("Interleaved1F1B", [[0, 2], [1, 3]], [[0], [1, 2]]),
    "interleaved_2_to_3": ("Interleaved1F1B", [[0, 2, 4], [1, 3, 5]], [[0, 1], [2, 3, 4]]),
    "zbv_2_to_1": ("ZBV", [[0, 3], [1, 2]], [[0, 1], [2]]),
    "zbv_three_rows": ("ZBV", [[0, 5], [1, 4], [2, 3]], [[0], [1], [2]]),
}


def several(rows: list[list[int]], ranks: list[list[int]]) -> tuple[list[int], DeviceMesh, object] | None:
    """This rank's stages, their mesh and the group of the pipeline; None on a rank in no mesh."""
    meshes = [DeviceMesh("cpu", torch.tensor(each), mesh_dim_names=("data",)) for each in ranks]
    group = dist.new_group(sorted(rank for each in ranks for rank in each))
    for stages, mesh in zip(rows, meshes, strict=True):
        if dist.get_rank() in mesh.mesh.tolist():
            return stages, mesh, group
    return None


def rows_case(label: str, delayed: bool):
    def case(_) -> None:
        name, rows, ranks = ROWS[label]
        here = several(rows, ranks)
        if here is None:
            return
        indices, mesh, group = here
        count = sum(len(stages) for stages in rows)
        reference, mine = mlp(count), mlp(count)
        x, y = batch(20)
        expected = train_alone(nn.Sequential(*reference), x, y, 5, as_torch=reference)
        stages = [PipelineStage(mine[i], i, count, CPU, group=group, mesh=mesh) for i in indices]
        schedule = get_schedule_class(name)(
            stages, 5, loss_fn=nn.functional.mse_loss, delay_weight_grad=delayed, timeout=TIMEOUT
        )
        exact = all(len(each) == 1 for each in ranks)
        for step in range(2):
            for index in indices:
                mine[index].zero_grad()
            losses: list[torch.Tensor] = []
            output = schedule.step(x, target=y, losses=losses)
            for index in indices:
                difference = largest_difference(mine[index], reference[index])
                assert difference <= (0.0 if exact else 1e-12), f"step {step}, stage {index}: {difference}"
            if count - 1 in indices:
                assert max(abs(a.item() - b) for a, b in zip(losses, expected.losses, strict=True)) <= 1e-12
                assert exact is False or torch.equal(output, torch.cat(expected.outputs))
            else:
                assert output is None
        schedule.eval(x, target=y, losses=losses)
        texts = {str(action) for row in schedule.actions.values() for action in row}
        assert ("0I0" in texts) == (delayed or name == "ZBV")
        assert f"{count // 2}RECV_F0" in texts or name == "ZBV"

    case.__name__ = f"{label}{'_delayed' if delayed else ''}"
    return case


def delayed_case(name: str, **options):
    """A chain on different meshes, gradients split."""

    def case(_) -> None:
        here = place(in_a_row([1, 3, 1]))
        reference, module = mlp(3), mlp(3)[here.stage]
        x, y = batch(16)
        train_alone(nn.Sequential(*reference), x, y, 4)
        stage = PipelineStage(module, here.stage, 3, CPU, group=here.group, mesh=here.mesh)
        schedule = get_schedule_class(name)(
            stage, 4, loss_fn=nn.functional.mse_loss, timeout=TIMEOUT, **options
        )
        schedule.step(x, target=y)
        difference = largest_difference(module, reference[here.stage])
        assert difference <= 1e-12, f"gradients differ by {difference}"

    case.__name__ = "_".join([name, *(f"{key}_{value}" for key, value in options.items())])
    return case


def one_rank_per_stage_is_bit_equal_when_delayed(context) -> None:
    reference = mlp(context.world)
    x, y = batch(24)
    train_alone(nn.Sequential(*reference), x, y, 8)
    module = mlp(context.world)[context.rank]
    for name in ("Eager1F1B", "ZBH1", "ZBH2"):
        module.zero_grad()
        stage = PipelineStage(module, context.rank, context.world, CPU)
        schedule = get_schedule_class(name)(
            stage, 8, loss_fn=nn.functional.mse_loss, timeout=TIMEOUT, delay_weight_grad=True
        )
        schedule.step(x, target=y)
        assert largest_difference(module, reference[context.rank]) == 0.0, name


def two_stages_per_rank_without_meshes(context) -> None:
    """As in torch: no mesh, stage s on rank s mod p."""
    count = 2 * context.world
    reference, mine = mlp(count), mlp(count)
    x, y = batch(20)
    train_alone(nn.Sequential(*reference), x, y, 10, as_torch=reference)
    indices = [context.rank, context.rank + context.world]
    stages = [PipelineStage(mine[index], index, count, CPU) for index in indices]
    schedule = ScheduleInterleaved1F1B(stages, 10, loss_fn=nn.functional.mse_loss, timeout=TIMEOUT)
    schedule.step(x, target=y)
    for index in indices:
        assert largest_difference(mine[index], reference[index]) == 0.0


class Branch(nn.Module):
    """Adds up its inputs; returns two values."""

    def __init__(self, body: nn.Module, outputs: int) -> None:
        super().__init__()
        self.body, self.outputs = body, outputs

    def forward(self, *inputs: torch.Tensor):
        value = self.body(torch.stack(inputs).sum(0))
        return (value, value.sin()) if self.outputs == 2 else value


# One output of stage 0 goes to stages 1, 2 and 3: to another rank, to its own rank, to another.
BRANCHES = [
    Edge(0, 0, 1, 0), Edge(0, 0, 2, 1), Edge(0, 1, 3, 1), Edge(1, 0, 2, 0), Edge(2, 0, 3, 0), Edge(0, 0, 3, 2)
]  # fmt: skip


def branches_case(delayed: bool):
    def case(_) -> None:
        here = several([[0, 2], [1, 3]], [[0, 1], [2, 3, 4]])
        indices, mesh, group = here

        def build() -> list[nn.Module]:
            return [Branch(body, 2 if index == 0 else 1) for index, body in enumerate(mlp(4))]

        reference, mine = build(), build()
        x, y = batch(12)

        def run(part: torch.Tensor) -> torch.Tensor:
            first, second = reference[0](part)
            third = reference[2](reference[1](first), first)
            return reference[3](third, second, first)

        train_alone(run, x, y, 2)
        stages = [
            PipelineStage(mine[index], index, 4, CPU, group=group, mesh=mesh, edges=BRANCHES)
            for index in indices
        ]
        schedule = ScheduleInterleaved1F1B(
            stages, 2, loss_fn=nn.functional.mse_loss, timeout=TIMEOUT, delay_weight_grad=delayed
        )
        schedule.step(x, target=y)
        for index in indices:
            difference = largest_difference(mine[index], reference[index])
            assert difference <= 1e-12, f"stage {index}: gradients differ by {difference}"

    case.__name__ = f"branches{'_delayed' if delayed else ''}"
    return case


def stages_of_one_rank_may_lay_out_values_differently(_) -> None:
    """Stage 1 splits rows over two ranks, stage 2, on the same ranks, columns: a transfer inside the mesh."""
    here = several([[0, 3], [1, 2]], [[0], [1, 2]])
    if here is None:
        return
    indices, mesh, group = here

    def build() -> list[nn.Module]:
        first, second, _, last = mlp(4)
        return [first, second, nn.Tanh(), last]

    reference, mine = build(), build()
    x, y = batch(12)
    train_alone(nn.Sequential(*reference), x, y, 3)
    columns = {"input_placements": [Shard(1)], "output_placements": [Shard(1)]}
    stages = [
        PipelineStage(mine[index], index, 4, CPU, group=group, mesh=mesh, **(columns if index == 2 else {}))
        for index in indices
    ]
    schedule = get_schedule_class("ZBV")(stages, 3, loss_fn=nn.functional.mse_loss, timeout=TIMEOUT)
    schedule.step(x, target=y)
    for index in indices:
        assert largest_difference(mine[index], reference[index]) <= 1e-12


def replicated_stages(_) -> None:
    """Both ranks of a stage hold everything: nothing is summed over them."""
    here = several([[0, 2], [1, 3]], [[0], [1, 2]])
    if here is None:
        return
    indices, mesh, group = here
    reference, mine = mlp(4), mlp(4)
    x, y = batch(12)
    train_alone(nn.Sequential(*reference), x, y, 3)
    everywhere = {"input_placements": [Replicate()], "output_placements": [Replicate()]}
    stages = [
        PipelineStage(mine[index], index, 4, CPU, group=group, mesh=mesh, **everywhere) for index in indices
    ]
    ScheduleInterleaved1F1B(stages, 3, loss_fn=nn.functional.mse_loss, timeout=TIMEOUT).step(x, target=y)
    for index in indices:
        assert largest_difference(mine[index], reference[index]) <= 1e-12


def stages_in_the_wrong_place(_) -> None:
    here = several([[0, 3], [1, 2]], [[0], [1]])
    if here is None:
        return
    indices, mesh, group = here
    stages = [PipelineStage(mlp(4)[index], index, 4, CPU, group=group, mesh=mesh) for index in indices]
    schedule = ScheduleInterleaved1F1B(stages, 2, loss_fn=nn.functional.mse_loss, timeout=TIMEOUT)
    x, y = batch(8)
    raises(
        (LayoutError, AbortedError),
        "runs stages [[0, 2], [1, 3]] together",
        "found stages [[0, 3], [1, 2]]",
        call=lambda: schedule.step(x, target=y),
    )


def stages_that_share_some_ranks(context) -> None:
    meshes = [DeviceMesh("cpu", torch.tensor(each), mesh_dim_names=("data",)) for each in ([0, 1], [1, 2])]
    group = dist.new_group([0, 1, 2])
    if context.rank > 2:
        return
    mine = {0: [0], 1: [1], 2: [1]}[context.rank]
    mesh = meshes[mine[0]]
    stage = PipelineStage(mlp(2)[mine[0]], mine[0], 2, CPU, group=group, mesh=mesh)
    schedule = get_schedule_class("1F1B")(stage, 2, loss_fn=nn.functional.mse_loss, timeout=TIMEOUT)
    x, y = batch(8)
    raises(LayoutError, "stage 0 is on a mesh of ranks [0, 1]", call=lambda: schedule.step(x, target=y))


def delaying_is_agreed_on(context) -> None:
    here = place(in_a_row([1, 1]))
    if here is None:
        return
    stage = PipelineStage(mlp(2)[here.stage], here.stage, 2, CPU, group=here.group, mesh=here.mesh)
    schedule = get_schedule_class("1F1B")(stage, 2, timeout=TIMEOUT, delay_weight_grad=context.rank == 1)
    raises(LayoutError, "disagree on schedule", call=lambda: schedule.step(batch(8)[0]))


def without_overlap(_) -> None:
    here = place(in_a_row([2, 2]))
    if here is None:
        return
    reference, module = mlp(2), mlp(2)[here.stage]
    x, y = batch(16)
    train_alone(nn.Sequential(*reference), x, y, 4)
    schedule_of("1F1B", here, module, 2, 4).step(x, target=y)
    module.zero_grad()
    stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
    schedule = get_schedule_class("1F1B")(
        stage, 4, loss_fn=nn.functional.mse_loss, timeout=TIMEOUT, overlap=False
    )
    schedule.step(x, target=y)
    assert largest_difference(module, reference[here.stage]) <= 1e-12


class Embed(nn.Module):
    def __init__(self, weight: torch.Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(weight.clone())

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(tokens, self.weight)


class Unembed(Embed):
    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden @ self.weight.t()


def tied_case(
    name: str, rows: list[list[int]], ranks: list[list[int]], *, replaced: bool = False, one: bool = False
):
    """Embedding in the first stage, the same weight in the last; ranks with several stages have two copies,
    or one. Two steps: gradients accumulate. replaced: between them all parameters become other objects, as
    load_state_dict(assign=True) leaves them."""

    def case(_) -> None:
        here = several(rows, ranks)
        if here is None:
            return
        indices, mesh, group = here
        count = sum(len(stages) for stages in rows)
        torch.manual_seed(9)
        weight = torch.randn(7, 6, dtype=torch.float64)
        tokens, target = torch.randint(0, 7, (12,)), torch.randint(0, 7, (12,))

        def build() -> list[nn.Module]:
            return [Embed(weight), *mlp(count - 2), Unembed(weight)]

        reference, mine = build(), build()
        reference[-1].weight = reference[0].weight
        if one:
            mine[-1].weight = mine[0].weight
        stages = [
            PipelineStage(
                mine[index],
                index,
                count,
                CPU,
                group=group,
                mesh=mesh,
                shared_parameters={"embedding": "weight"} if index in (0, count - 1) and not one else None,
            )
            for index in indices
        ]
        loss_fn = nn.functional.cross_entropy
        schedule = get_schedule_class(name)(
            stages if len(rows[0]) > 1 else stages[0], 3, loss_fn=loss_fn, timeout=TIMEOUT
        )
        for turn in range(2):
            train_alone(nn.Sequential(*reference), tokens, target, 3, loss_fn)
            schedule.step(tokens, target=target)
            for index in indices:
                difference = largest_difference(mine[index], reference[index])
                assert difference <= 1e-12, f"step {turn}, stage {index}: gradients differ by {difference}"
            for modules in (reference, mine) if replaced and turn == 0 else ():
                for module in modules:
                    state = {key: value * 1.5 for key, value in module.state_dict().items()}
                    module.load_state_dict(state, assign=True)
                if one or modules is reference:
                    modules[-1].weight = modules[0].weight

    case.__name__ = "_".join(["tied", name, *["one"] * one, *["replaced"] * replaced])
    return case


def shared_parameters_that_do_not_fit(context) -> None:
    here = place([[0], [1]])
    if here is None:
        return
    options = {"group": here.group, "mesh": here.mesh}
    raises(
        LayoutError,
        "has no parameter 'wait'",
        call=lambda: PipelineStage(nn.Linear(6, 6), 0, 2, CPU, shared_parameters={"w": "wait"}, **options),
    )
    module = nn.Linear(6, 6 + context.rank).double()
    stage = PipelineStage(module, here.stage, 2, CPU, shared_parameters={"w": "weight"}, **options)
    schedule = get_schedule_class("1F1B")(stage, 2, timeout=TIMEOUT)
    raises(LayoutError, "shared parameter 'w': stage 0 has", call=lambda: schedule.step(batch(8)[0]))


def wrapped_case(name: str, **options):
    """FSDP2 in the first stage, DDP in the second, on different degrees: summed once per step."""

    def case(_) -> None:
        here = place(in_a_row([2, 3]))
        reference, module = mlp(2), mlp(2)[here.stage]
        x, y = batch(24)
        train_alone(nn.Sequential(*reference), x, y, 4)
        if here.stage == 0:
            fully_shard(module, mesh=here.mesh)
            shapes = {"output_args": torch.empty(3, 6, dtype=torch.float64, device="meta")}
        else:
            module = DistributedDataParallel(module, process_group=here.mesh.get_group())
            shapes = {}
        stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh, **shapes)
        schedule = get_schedule_class(name)(
            stage, 4, loss_fn=nn.functional.mse_loss, timeout=TIMEOUT, **options
        )
        for _ in range(2):
            module.zero_grad()
            schedule.step(x, target=y)
            difference = largest_difference(stage.submod, reference[here.stage])
            assert difference <= 1e-12, f"gradients differ by {difference}"

    case.__name__ = f"wrappers_{name}{'_delayed' if options else ''}"
    return case


def wrappers_over_other_ranks_are_refused(_) -> None:
    # On every rank: with use_local_synchronization torch >= 2.14 counts groups on members only.
    wrong = [dist.new_group([rank]) for rank in range(dist.get_world_size())][dist.get_rank()]
    here = place([[0, 1], [2, 3]])
    if here is None:
        return
    module = DistributedDataParallel(mlp(2)[here.stage], process_group=wrong)
    raises(
        LayoutError,
        "DistributedDataParallel reduces gradients over ranks [",
        "but the stage splits its samples over ranks [",
        call=lambda: PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh),
    )


CASES = [
    *[rows_case(label, delayed) for label in ROWS for delayed in (False, True)],
    *[delayed_case(name, delay_weight_grad=True) for name in ("GPipe", "1F1B", "Eager1F1B")],
    delayed_case("ZBH1"),
    delayed_case("ZBH2"),
    delayed_case("Eager1F1B", warmup="auto", memory_budget=4),
    delayed_case("Eager1F1B", warmup=4, delay_weight_grad=True),
    one_rank_per_stage_is_bit_equal_when_delayed,
    two_stages_per_rank_without_meshes,
    branches_case(False),
    branches_case(True),
    stages_of_one_rank_may_lay_out_values_differently,
    replicated_stages,
    stages_in_the_wrong_place,
    stages_that_share_some_ranks,
    delaying_is_agreed_on,
    without_overlap,
    wrapped_case("1F1B"),
    wrapped_case("Eager1F1B", delay_weight_grad=True),
    wrappers_over_other_ranks_are_refused,
    tied_case("1F1B", [[0], [1], [2]], [[0], [1, 2], [3, 4]]),
    tied_case("Interleaved1F1B", [[0, 2], [1, 3]], [[0, 1], [2, 3, 4]]),
    tied_case("ZBV", [[0, 3], [1, 2]], [[0, 1], [2]]),
    tied_case("1F1B", [[0], [1], [2]], [[0], [1, 2], [3, 4]], replaced=True),
    tied_case("ZBV", [[0, 3], [1, 2]], [[0, 1], [2]], replaced=True),
    tied_case("ZBV", [[0, 3], [1, 2]], [[0, 1], [2]], replaced=True, one=True),
    shared_parameters_that_do_not_fit,
]
