"""What travels between stages: one value for several of them, micro-batches of different shapes. Four ranks,
each on a host of its own; run by pipeline_module_cases.py."""

from __future__ import annotations

import re
import time
from typing import Any

import torch
import torch.distributed as dist
from meshcast import Topology
from meshcast.errors import AbortedError, LayoutError, MeshcastError
from meshcast.pipelining import Edge, PipelineStage, Schedule1F1B, get_schedule_class
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
from torch.distributed.tensor import Replicate

mse = nn.functional.mse_loss


def chain(rank: int, world: int, module: nn.Module, name: str, microbatches: int, **options: Any) -> Any:
    """A schedule of one stage on each rank, in a group of its own: what fails stays there."""
    edges = options.pop("edges", None)
    stage = PipelineStage(module, rank, world, CPU, group=dist.new_group(), edges=edges)
    return get_schedule_class(name)(stage, microbatches, loss_fn=mse, timeout=TIMEOUT, **options)


# ---- one value for several stages ------------------------------------------------------------------------


class Sum(nn.Module):
    """Adds up what it gets; slow: takes its time, so that others are ahead of it."""

    def __init__(self, body: nn.Module, slow: float = 0.0) -> None:
        super().__init__()
        self.body, self.slow = body, slow

    def forward(self, *values: torch.Tensor) -> torch.Tensor:
        time.sleep(self.slow)
        return self.body(sum(values[1:], values[0]))


# Output 0 of stage 0 goes to all others, to the last one twice.
FAN = [
    Edge(0, 0, 1, 0),
    Edge(0, 0, 2, 1),
    Edge(0, 0, 3, 1),
    Edge(0, 0, 3, 2),
    Edge(1, 0, 2, 0),
    Edge(2, 0, 3, 0),
]


def fan_case(name: str, slow: int | None, **options: Any):
    """A value for three stages, one of which may lag behind (slow)."""

    def case(context) -> None:
        reference = [Sum(body) for body in mlp(4)]
        mine = Sum(mlp(4)[context.rank], 0.03 if context.rank == slow else 0.0)
        x, y = batch(12)

        def run(part: torch.Tensor) -> torch.Tensor:
            first = reference[0](part)
            third = reference[2](reference[1](first), first)
            return reference[3](third, first, first)

        expected = train_alone(run, x, y, 6)
        schedule = chain(context.rank, 4, mine, name, 6, edges=FAN, **options)
        losses: list[torch.Tensor] = []
        schedule.step(x, target=y, losses=losses)
        difference = largest_difference(mine, reference[context.rank])
        assert difference <= 1e-12, f"gradients differ by {difference}"
        if context.rank == 3:
            assert max(abs(a.item() - b) for a, b in zip(losses, expected.losses, strict=True)) <= 1e-12
        mine.slow = 0.0
        output = schedule.eval(x)
        if context.rank == 3:
            assert (output - torch.cat(expected.outputs)).abs().max() <= 1e-12

    case.__name__ = f"fan_{name}{'' if slow is None else f'_slow_{slow}'}{'_'.join(['', *options])}"
    return case


def a_large_value_leaves_its_rank_once(context) -> None:
    """Small ones may leave three times: latency is all that they cost."""
    values = 1 << 17
    schedule = chain(context.rank, 4, Sum(nn.Identity()), "GPipe", 2, edges=FAN)
    x = torch.arange(2 * values, dtype=torch.float32).reshape(2, values) % 1021
    output = schedule.eval(x)
    if context.rank == 3:  # stages 0, 1 and 2 give x, x and 2 x
        assert torch.equal(output, 4 * x)
    if context.rank == 0:
        copies = schedule.bytes_sent / x.nbytes
        assert copies == 1, f"the value left {copies} times, for three consumers"


def a_stage_names_the_strategy_of_its_transfers(_) -> None:
    """A value for three replicas, each on a host of its own: a message to each, or one that is passed on."""
    here = place([[0], [1, 2, 3]])
    assert here is not None
    topology = Topology.uniform(ranks_per_host=1, nic_gbps=0.1, latency_us=0.0)
    x = torch.arange(1 << 18, dtype=torch.float32).reshape(1, -1)
    for strategy, copies in (("send_recv", 3), ("broadcast", 1)):
        stage = PipelineStage(
            nn.Identity(), here.stage, 2, CPU, group=here.group, mesh=here.mesh, strategy=strategy,
            topology=topology, input_placements=[Replicate()],
        )  # fmt: skip
        schedule = get_schedule_class("GPipe")(stage, 1, loss_fn=mse, timeout=TIMEOUT)
        output = schedule.eval(x)
        if here.stage == 0:
            assert schedule.bytes_sent == copies * x.nbytes
            times = schedule.transfer_times()
            assert 0.95 < times[0, 1] / (copies * x.nbytes * 8 / 1e8) < 1.2, (strategy, times)
        else:
            assert torch.equal(output, x)
        schedule.close()
    wrong = {"group": here.group, "mesh": here.mesh, "strategy": "fastest"}
    raises(LayoutError, "strategy", call=lambda: PipelineStage(nn.Identity(), here.stage, 2, CPU, **wrong))


def transfers_take_what_the_planner_says(_) -> None:
    """A link of 1 Gbit/s and values of 1 MiB."""
    here = place(in_a_row([1, 1, 1]))
    if here is None:
        return
    edges = [Edge(0, 0, 1, 0), Edge(0, 0, 2, 1), Edge(1, 0, 2, 0)]
    module = Sum(nn.Linear(1, 1))
    stage = PipelineStage(module, here.stage, 3, CPU, group=here.group, mesh=here.mesh, edges=edges)
    schedule = Schedule1F1B(stage, 1, loss_fn=mse, timeout=TIMEOUT)
    raises(MeshcastError, "there is no step yet", call=schedule.transfer_times)
    x = torch.ones(1 << 18, 1)
    schedule.step(x, target=x)
    topology = Topology.uniform(ranks_per_host=1, nic_gbps=1.0, latency_us=0.0)
    times = schedule.transfer_times(topology)
    alone = x.nbytes * 8 / 1e9
    assert sorted(times) == [(0, 1), (0, 2), (1, 2)]
    assert abs(times[1, 2] / alone - 1) < 0.001
    # One chain through both consumers, longer than one hop by a chunk only.
    assert times[0, 1] == times[0, 2]
    assert 1.0 <= times[0, 1] / alone < 1.2


# ---- shapes that vary ------------------------------------------------------------------------------------


def varying_case(name: str, **options: Any):
    """Sequences of several lengths, in a step and from step to step, over data-parallel stages."""

    def case(_) -> None:
        here = place(in_a_row([1, 3]))
        reference, module = mlp(2), mlp(2)[here.stage]
        stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
        schedule = get_schedule_class(name)(
            stage, 3, loss_fn=mse, timeout=TIMEOUT, varying_shapes=True, **options
        )
        # Samples and lengths of each micro-batch; of 2 samples the last of three ranks has none.
        for step, sizes in enumerate([[(3, 4), (2, 7), (3, 4)], [(2, 7), (5, 1), (3, 4)], [(1, 2)] * 3]):
            torch.manual_seed(step)
            xs = [torch.randn(*size, 6, dtype=torch.float64) for size in sizes]
            ys = [torch.randn_like(x) for x in xs]
            for each in (*reference, module):
                each.zero_grad()
            losses, outputs = [], []
            for x, y in zip(xs, ys, strict=True):
                output = nn.Sequential(*reference)(x)
                loss = mse(output, y)
                (loss / 3).backward()
                losses.append(loss.item())
                outputs.append(output.detach())
            found: list[torch.Tensor] = []
            result = schedule.step(arg_mbs=[(x,) for x in xs], target_mbs=ys, losses=found)
            difference = largest_difference(module, reference[here.stage])
            assert difference <= 1e-12, f"step {step}: gradients differ by {difference}"
            if here.stage == 1:
                assert max(abs(a.item() - b) for a, b in zip(found, losses, strict=True)) <= 1e-12
                index = here.mesh.get_local_rank()
                shards = [[*each.chunk(3), *[each[:0]] * 3][index] for each in outputs]
                mine = result if isinstance(result, list) else [result]
                theirs = shards if isinstance(result, list) else [torch.cat(shards)]
                for a, b in zip(mine, theirs, strict=True):
                    assert a.shape == b.shape
                    assert torch.allclose(a, b, rtol=0, atol=1e-12)
                assert isinstance(result, list) == (step < 2)

    case.__name__ = f"varying_shapes_{name}{'_'.join(['', *options])}"
    return case


def many_shapes_one_after_the_other(_) -> None:
    """More than are kept: those not used for longest are compiled anew."""
    import meshcast.pipelining.step as step

    here = place(in_a_row([1, 1]))
    if here is None:
        return
    reference, module = mlp(2), mlp(2)[here.stage]
    stage = PipelineStage(module, here.stage, 2, CPU, group=here.group)
    kept, step._KEPT = step._KEPT, 2
    try:
        schedule = Schedule1F1B(stage, 2, loss_fn=mse, timeout=TIMEOUT, varying_shapes=True)
        for rows in (2, 4, 6, 2, 4):
            x, y = batch(rows, seed=rows)
            train_alone(nn.Sequential(*reference), x, y, 2, as_torch=reference)
            schedule.step(x, target=y)
    finally:
        step._KEPT = kept
    assert largest_difference(module, reference[here.stage]) <= 1e-12
    assert len(schedule._wirings.transfers()) == 2 * 2


def a_shape_that_a_stage_cannot_take(_) -> None:
    """Found while the ranks meet for a new shape: all of them learn it, from the stage that refuses."""
    here = place(in_a_row([1, 2, 1]))
    module = mlp(3)[here.stage]

    class Picky(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if x.shape[1] > 4:
                raise ValueError("too long")
            return x * 2

    if here.stage == 1:
        module = Picky()
    stage = PipelineStage(module, here.stage, 3, CPU, group=here.group, mesh=here.mesh)
    schedule = Schedule1F1B(stage, 2, loss_fn=mse, timeout=TIMEOUT, varying_shapes=True)

    def step(length: int) -> None:
        x = torch.ones(4, length, 6, dtype=torch.float64)
        schedule.step(x, target=x)

    step(3)
    text = raises((LayoutError, AbortedError), "stage 1", "too long", call=lambda: step(5))
    assert re.match(r"(pipeline on )?rank [12]\b", text), f"one that has stage 1 is to blame: {text}"
    step(3)
    step(4)


def shapes_that_vary_by_themselves(_) -> None:
    here = place(in_a_row([1, 1]))
    if here is None:
        return
    stage = PipelineStage(mlp(2)[here.stage], here.stage, 2, CPU, group=here.group)
    schedule = Schedule1F1B(stage, 2, loss_fn=mse, timeout=TIMEOUT)
    xs = [torch.ones(2, 6, dtype=torch.float64), torch.ones(3, 6, dtype=torch.float64)]
    raises(
        (LayoutError, AbortedError),
        "micro-batch 1 has shapes [[3, 6, 'float64']]",
        "varying_shapes=True",
        call=lambda: schedule.step(arg_mbs=[(x,) for x in xs], target_mbs=xs),
    )


def a_wrong_number_of_pieces(_) -> None:
    here = place(in_a_row([1, 1]))
    if here is None:
        return
    stage = PipelineStage(mlp(2)[here.stage], here.stage, 2, CPU, group=here.group)
    schedule = Schedule1F1B(stage, 2, loss_fn=mse, timeout=TIMEOUT)
    x, y = batch(4)
    raises(
        (LayoutError, AbortedError),
        "arg_mbs must have one entry for each of the 2 micro-batches, found 1",
        call=lambda: schedule.step(arg_mbs=[(x,)] if here.stage == 0 else None, target=y),
    )


CASES = [
    fan_case("GPipe", None),
    fan_case("1F1B", None),
    fan_case("1F1B", 2),
    fan_case("1F1B", 3, overlap=False),
    fan_case("Eager1F1B", 1, delay_weight_grad=True),
    fan_case("Eager1F1B", 3),
    fan_case("ZBH1", None),
    a_large_value_leaves_its_rank_once,
    a_stage_names_the_strategy_of_its_transfers,
    transfers_take_what_the_planner_says,
    varying_case("1F1B"),
    varying_case("Eager1F1B", delay_weight_grad=True),
    many_shapes_one_after_the_other,
    a_shape_that_a_stage_cannot_take,
    shapes_that_vary_by_themselves,
    a_wrong_number_of_pieces,
]
