"""Pipelines over different meshes train as one process does: losses, outputs, all gradients. Six ranks."""

from __future__ import annotations

import json
import os

import torch
from meshcast.pipelining import Edge, PipelineStage, Schedule1F1B
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
from torch.distributed.tensor import DTensor, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

SIZES = {"1_to_2": [1, 2], "2_to_3": [2, 3], "3_to_2": [3, 2], "2_3_1": [2, 3, 1], "alone_on_3": [3]}
SCHEDULES = ("GPipe", "1F1B", "Eager1F1B")


def chain_case(name: str, label: str, dtype: torch.dtype, tolerance: float):
    """Two steps and an evaluation of a chain. 16 rows in 4 micro-batches: 3 ranks have 2, 2 and 0."""

    def case(_) -> dict | None:
        sizes = SIZES[label]
        here = place(in_a_row(sizes))
        if here is None:
            return None
        stages, last = len(sizes), here.stage == len(sizes) - 1
        reference = mlp(stages, dtype=dtype)
        x, y = batch(16, dtype=dtype)
        expected = train_alone(nn.Sequential(*reference), x, y, 4)
        module = mlp(stages, dtype=dtype)[here.stage]
        schedule = schedule_of(name, here, module, stages, 4)
        worst = 0.0
        for _ in range(2):
            module.zero_grad()
            losses: list[torch.Tensor] = []
            output = schedule.step(x, target=y, losses=losses)
            worst = max(worst, largest_difference(module, reference[here.stage]))
            check_outputs(here, expected, output if last else None, losses)
            assert last or output is None
        losses = []
        output = schedule.eval(x, target=y, losses=losses)
        check_outputs(here, expected, output if last else None, losses)
        assert worst <= tolerance, f"gradients differ by {worst}"
        return {"difference": worst}

    def check_outputs(here, expected, output, losses) -> None:
        if output is None:
            assert losses == []
            return
        assert len(losses) == 4
        for mine, theirs in zip(losses, expected.losses, strict=True):
            assert abs(mine.item() - theirs) <= tolerance
            assert not mine.requires_grad
        parts, index = here.mesh.size(), here.mesh.get_local_rank()
        shards = [[*each.chunk(parts), *[each[:0]] * parts][index] for each in expected.outputs]
        assert (
            (output - torch.cat(shards)).abs().max().item() <= tolerance
            if output.numel()
            else not torch.cat(shards).numel()
        )

    case.__name__ = f"{name}_{label}_{str(dtype).removeprefix('torch.')}"
    return case


def one_rank_per_stage_is_bit_equal(context) -> None:
    """Without mesh=, as in torch: nothing is reduced, so nothing may differ."""
    reference = mlp(context.world)
    x, y = batch(24)
    expected = train_alone(nn.Sequential(*reference), x, y, 8)
    module = mlp(context.world)[context.rank]
    stage = PipelineStage(module, context.rank, context.world, CPU)
    schedule = Schedule1F1B(stage, 8, loss_fn=nn.functional.mse_loss, timeout=TIMEOUT)
    losses: list[torch.Tensor] = []
    output = schedule.step(x, target=y, losses=losses)
    assert largest_difference(module, reference[context.rank]) == 0.0
    if context.rank == context.world - 1:
        assert [loss.item() for loss in losses] == expected.losses
        assert torch.equal(output, torch.cat(expected.outputs))
    rows = schedule.actions
    assert sorted(rows) == list(range(context.world))
    assert str(rows[0][-1]) == "0B7"


class Fork(nn.Module):
    """Two values, one of them used twice downstream, and an integer one that takes no gradient."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        hidden = self.body(x)
        return hidden, hidden.sin(), (hidden > 0).long()


class Middle(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.body(hidden) * mask


class Join(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, value: torch.Tensor, skipped: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return self.body(value + skipped) + hidden


SKIP_EDGES = [Edge(0, 0, 1, 0), Edge(0, 2, 1, 1), Edge(1, 0, 2, 0), Edge(0, 1, 2, 1), Edge(0, 0, 2, 2)]


def skip_case(name: str):
    def case(_) -> dict | None:
        here = place(in_a_row([2, 3, 1]))

        def build() -> list[nn.Module]:
            return [kind(body) for kind, body in zip((Fork, Middle, Join), mlp(3), strict=True)]

        reference, mine = build(), build()
        x, y = batch(16)

        def run(part: torch.Tensor) -> torch.Tensor:
            hidden, skipped, mask = reference[0](part)
            return reference[2](reference[1](hidden, mask), skipped, hidden)

        expected = train_alone(run, x, y, 4)
        module = mine[here.stage]
        schedule = schedule_of(name, here, module, 3, 4, edges=SKIP_EDGES)
        losses: list[torch.Tensor] = []
        schedule.step(x, target=y, losses=losses)
        difference = largest_difference(module, reference[here.stage])
        assert difference <= 1e-12, f"gradients differ by {difference}"
        if here.stage == 2:
            assert max(abs(a.item() - b) for a, b in zip(losses, expected.losses, strict=True)) <= 1e-12
        assert any(str(action) == "0SEND_F3>2" for action in schedule.actions[0])
        return {"difference": difference}

    case.__name__ = f"{name}_skip_connection"
    return case


def gradients_accumulate_over_steps(_) -> None:
    here = place(in_a_row([2, 3]))
    if here is None:
        return
    reference, mine = mlp(2), mlp(2)
    module = mine[here.stage]
    schedule = schedule_of("1F1B", here, module, 2, 2)
    for seed in (1, 2, 3):
        x, y = batch(8, seed=seed)
        train_alone(nn.Sequential(*reference), x, y, 2)
        schedule.step(x, target=y)
    assert largest_difference(module, reference[here.stage]) <= 1e-12


def an_unused_parameter_keeps_no_gradient(_) -> None:
    here = place(in_a_row([2, 2]))
    if here is None:
        return
    module = mlp(2)[here.stage]
    module.register_parameter("unused", nn.Parameter(torch.ones(3)))
    x, y = batch(8)
    schedule_of("1F1B", here, module, 2, 2).step(x, target=y)
    assert module.unused.grad is None
    assert all(p.grad is not None for name, p in module.named_parameters() if name != "unused")


def a_parameter_that_some_ranks_do_not_use(context) -> None:
    """Only the last rows meet it; it comes first, so the sums of the other parameters must not slip."""
    here = place([[0, 1]])
    if here is None:
        return

    class Choosy(nn.Module):
        def __init__(self, used: bool) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.seldom, self.always = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()
            self.used = used

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.always(self.seldom(x) if self.used else x)

    reference, mine = Choosy(True), Choosy(context.rank == 1)
    x, y = batch(8)

    def run(part: torch.Tensor) -> torch.Tensor:
        return reference.always(torch.cat([part[:2], reference.seldom(part[2:])]))

    train_alone(run, x, y, 2)
    schedule_of("1F1B", here, mine, 1, 2).step(x, target=y)
    assert largest_difference(mine, reference) <= 1e-12


def an_input_that_is_not_used_sends_zeros(_) -> None:
    here = place([[0], [1]])
    if here is None:
        return

    class First(nn.Linear):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return super().forward(x), x * self.weight.sum()

    class Second(nn.Linear):
        def forward(self, x: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
            return super().forward(x)

    def build() -> list[nn.Module]:
        torch.manual_seed(5)
        return [First(6, 6).double(), Second(6, 6).double()]

    reference, mine = build(), build()
    x, y = batch(4)
    train_alone(lambda part: reference[1](*reference[0](part)), x, y, 2)
    schedule_of("GPipe", here, mine[here.stage], 2, 2).step(x, target=y)
    assert largest_difference(mine[here.stage], reference[here.stage]) == 0.0


def tensor_parallel_stage(_) -> None:
    """(2, 2) mesh, data x tensor parallel with DTensor parameters, into a data-parallel stage on 2 ranks."""
    here = place([[[0, 1], [2, 3]], [4, 5]])
    reference, mine = mlp(2, width=8, hidden=8), mlp(2, width=8, hidden=8)
    x, y = batch(12, width=8)
    train_alone(nn.Sequential(*reference), x, y, 3)
    module = mine[here.stage]
    if here.stage == 0:
        parallelize_module(module, here.mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    schedule_of("1F1B", here, module, 2, 3).step(x, target=y)
    assert largest_difference(module, reference[here.stage]) <= 1e-12


def mean_square(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Not mse_loss: in torch 2.13 its gradient for sharded DTensors is divided by the local size."""
    return (output - target).square().mean()


def dtensor_activations(_) -> None:
    """Modules that take, return and hold DTensors, on both stages; the loss is a DTensor as well."""
    here = place(in_a_row([2, 4]))
    reference, mine = mlp(2), mlp(2)
    x, y = batch(24)
    expected = train_alone(nn.Sequential(*reference), x, y, 3, mean_square)
    module = distribute_module(mine[here.stage], here.mesh)
    losses: list[torch.Tensor] = []
    schedule = schedule_of("Eager1F1B", here, module, 2, 3, mean_square, use_dtensor=True)
    output = schedule.step(x, target=y, losses=losses)
    difference = largest_difference(module, reference[here.stage])
    assert difference <= 1e-12, f"gradients differ by {difference}"
    if here.stage == 1:
        assert isinstance(output, DTensor)
        assert max(abs(a.item() - b) for a, b in zip(losses, expected.losses, strict=True)) <= 1e-12


def other_dimensions_and_given_shapes(_) -> None:
    """Sequence-sharded values (dimension 1, 5 rows over 2 ranks) and output_args in place of inference."""
    here = place(in_a_row([2, 2]))
    if here is None:
        return
    reference, mine = mlp(2), mlp(2)
    torch.manual_seed(7)
    x, y = torch.randn(4, 5, 6, dtype=torch.float64), torch.randn(4, 5, 6, dtype=torch.float64)
    train_alone(nn.Sequential(*reference), x, y, 2)
    if here.stage == 0:
        rows = (3, 2)[here.mesh.get_local_rank()]
        options = {
            "input_placements": [Shard(1)],
            "output_placements": [Shard(1)],
            "output_args": torch.empty(2, rows, 6, dtype=torch.float64, device="meta"),
        }
    else:
        options = {}
    module = mine[here.stage]
    schedule_of("1F1B", here, module, 2, 2, **options).step(x, target=y)
    # Shard(1) is not data parallelism to the pipeline: what parameters need then is the module's affair.
    if here.stage == 0:
        for parameter in module.parameters():
            torch.distributed.all_reduce(parameter.grad, group=here.mesh.get_group())
    assert largest_difference(module, reference[here.stage]) <= 1e-12


def outputs_losses_and_options(context) -> None:
    """Keyword arguments, loss_kwargs, scale_grads, gradients summed by hand, no outputs, bytes and trace."""
    here = place(in_a_row([1, 2]))
    if here is None:
        return

    class Scaled(nn.Linear):
        def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> torch.Tensor:
            return super().forward(x) * scale

    def build() -> list[nn.Module]:
        torch.manual_seed(3)
        return [Scaled(6, 6).double(), Scaled(6, 6).double()]

    def loss_fn(output: torch.Tensor, target: torch.Tensor, *, factor: float) -> torch.Tensor:
        return nn.functional.mse_loss(output, target) * factor

    reference, mine = build(), build()
    x, y = batch(8)
    scale = torch.rand(8, 1, dtype=torch.float64)
    for part, target, each in zip(x.chunk(2), y.chunk(2), scale.chunk(2), strict=True):
        loss_fn(reference[1](reference[0](part, scale=each), scale=each), target, factor=3.0).backward()
    module = mine[here.stage]
    stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
    # Only the last stage needs the loss function.
    schedule = Schedule1F1B(
        stage,
        2,
        loss_fn=loss_fn if here.stage else None,
        scale_grads=False,
        sync_gradients=False,
        timeout=TIMEOUT,
    )
    output = schedule.step(x, target=y, loss_kwargs={"factor": 3.0}, return_outputs=False, scale=scale)
    assert output is None
    stage.sync_gradients()
    assert largest_difference(module, reference[here.stage]) <= 1e-12
    assert schedule.bytes_sent == (8 if here.stage == 0 else 4) * 6 * 8
    path = f"/tmp/meshcast-trace-{context.store.num_keys()}-{context.rank}.json"
    try:
        schedule.trace(path)
        with open(path) as file:
            names = [event["name"] for event in json.load(file)["traceEvents"]]
    finally:
        os.unlink(path)
    summary = schedule.summary()
    assert summary.startswith(f"rank {context.rank}: step of ")
    assert summary.endswith(f"sent {schedule.bytes_sent / 1e6:.4g} MB")
    assert 0.0 < float(summary.split("computes ")[1].split("%")[0]) < 100.0
    expected = {"0F0", "0B1", "0SEND_F0"} if here.stage == 0 else {"1F1", "1B0", "1SEND_B1"}
    assert expected <= set(names)


CASES = [
    *[chain_case(name, label, torch.float64, 1e-12) for name in SCHEDULES for label in SIZES],
    *[chain_case(name, "2_3_1", torch.float32, 1e-5) for name in SCHEDULES],
    *[skip_case(name) for name in SCHEDULES],
    one_rank_per_stage_is_bit_equal,
    gradients_accumulate_over_steps,
    an_unused_parameter_keeps_no_gradient,
    a_parameter_that_some_ranks_do_not_use,
    an_input_that_is_not_used_sends_zeros,
    tensor_parallel_stage,
    dtensor_activations,
    other_dimensions_and_given_shapes,
    outputs_losses_and_options,
]
