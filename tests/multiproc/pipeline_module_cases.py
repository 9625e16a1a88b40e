"""What a stage's module may do: dropout, checkpointing, autocast, compiled parts; and the cases of
pipeline_memory_cases.py and pipeline_value_cases.py. Four ranks."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshcast.pipelining import (
    PipelineStage,
    ScheduleEager1F1B,
    ScheduleGPipe,
    ScheduleZBV,
    get_schedule_class,
    microbatch_seed,
)
from multiproc.pipeline_memory_cases import CASES as MEMORY_CASES
from multiproc.pipeline_models import (
    CPU,
    TIMEOUT,
    batch,
    largest_difference,
    mlp,
    place,
    scale_once,
    train_alone,
)
from multiproc.pipeline_value_cases import CASES as VALUE_CASES
from multiproc.pipeline_value_cases import Sum, chain, mse
from torch import nn
from torch.utils.checkpoint import checkpoint

if Path(sys.argv[0]).name == "worker.py":
    # Each rank is a host of its own: a copy for each host is what multicast saves.
    os.environ["MESHCAST_HOST_ID"] = f"host {sys.argv[2]}"


# ---- modules ---------------------------------------------------------------------------------------------


class Dropping(nn.Module):
    """Draws random numbers; may recompute its activations, and with them what it drew."""

    def __init__(self, body: nn.Module, recompute: bool) -> None:
        super().__init__()
        self.body, self.recompute = body, recompute

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.run, x, use_reentrant=False) if self.recompute else self.run(x)

    def run(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(self.body(x), 0.5)


def dropout_case(name: str, recompute: bool, **options: Any):
    """With `seed` every schedule draws what one process draws that sets the same seeds."""

    def case(context) -> None:
        rows = [[0, 7], [1, 6], [2, 5], [3, 4]] if name == "ZBV" else [[stage] for stage in range(4)]
        count = sum(map(len, rows))
        reference, mine = ([Dropping(body, recompute) for body in mlp(count)] for _ in range(2))
        x, y = batch(12)
        indices = rows[context.rank]
        group = dist.new_group()
        stages = [PipelineStage(mine[index], index, count, CPU, group=group) for index in indices]
        schedule = get_schedule_class(name)(
            stages if len(stages) > 1 else stages[0], 6, loss_fn=mse, timeout=TIMEOUT, seed=11, **options
        )
        torch.manual_seed(100 + context.rank)
        before = torch.get_rng_state()
        for step in range(2):
            expected = []
            for number, (part, target) in enumerate(zip(x.chunk(6), y.chunk(6), strict=True)):
                value = part
                for index, module in enumerate(reference):
                    torch.manual_seed(microbatch_seed(11, step, index, number))
                    value = module(value)
                loss = mse(value, target)
                loss.backward()
                expected.append(loss.item())
            scale_once(reference, 6)
            torch.set_rng_state(before)
            losses: list[torch.Tensor] = []
            schedule.step(x, target=y, losses=losses)
            assert torch.equal(torch.get_rng_state(), before), "the rank's own random state changed"
            for index in indices:
                assert largest_difference(mine[index], reference[index]) <= 1e-14
            if count - 1 in indices:
                assert [loss.item() for loss in losses] == expected

    case.__name__ = f"dropout_{name}{'_recompute' if recompute else ''}{'_'.join(['', *options])}"
    return case


def ranks_with_other_samples_draw_other_numbers(_) -> None:
    here = place([[0], [1, 2, 3]])
    stage = PipelineStage(
        Dropping(nn.Identity(), False), here.stage, 2, CPU, group=here.group, mesh=here.mesh
    )
    schedule = ScheduleGPipe(stage, 2, timeout=TIMEOUT, seed=5)
    if here.stage == 0:
        stage.submod.run = lambda x: x
    output = schedule.eval(torch.ones(6, 64))
    if here.stage == 1:
        drawn = [torch.empty_like(output) for _ in range(3)]
        dist.all_gather(drawn, output, group=here.mesh.get_group())
        assert all(not torch.equal(a, b) for a, b in ((drawn[0], drawn[1]), (drawn[1], drawn[2])))
        assert not torch.equal(output[:1], output[1:]), "its micro-batches differ as well"


def autocast_case(name: str, **options: Any):
    """Mixed precision: values between stages are bfloat16, parameters and their gradients float32."""

    def case(context) -> None:
        reference, module = mlp(4, dtype=torch.float32), mlp(4, dtype=torch.float32)[context.rank]
        x, y = batch(12, dtype=torch.float32)
        schedule = chain(context.rank, 4, module, name, 6, **options)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            expected = train_alone(nn.Sequential(*reference), x, y, 6, as_torch=reference)
            losses: list[torch.Tensor] = []
            schedule.step(x, target=y, losses=losses)
        assert largest_difference(module, reference[context.rank]) == 0.0
        if context.rank == 0:
            assert schedule.bytes_sent == 12 * 6 * 2, "a value takes two bytes"
        if context.rank == 3:
            assert [loss.item() for loss in losses] == expected.losses

    case.__name__ = f"autocast_{name}{'_'.join(['', *options])}"
    return case


def gradient_scaler(context) -> None:
    """The scale goes into the loss, as without a pipeline; unscaled gradients are the plain ones."""
    reference, module = mlp(4), mlp(4)[context.rank]
    x, y = batch(8)
    train_alone(nn.Sequential(*reference), x, y, 4)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    stage = PipelineStage(module, context.rank, 4, CPU, group=dist.new_group())
    schedule = ScheduleEager1F1B(
        stage, 4, loss_fn=lambda output, target: scaler.scale(mse(output, target)), timeout=TIMEOUT
    )
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    scaler.scale(torch.ones(()))  # ranks without a loss make the scale as well
    schedule.step(x, target=y)
    scaler.unscale_(optimizer)
    assert largest_difference(module, reference[context.rank]) == 0.0


def compiled_case(name: str, **options: Any):
    """A stage under torch.compile; without a code generator, since only the graph capture matters here."""

    def case(context) -> None:
        reference, plain = mlp(4), mlp(4)[context.rank]
        x, y = batch(8)
        train_alone(nn.Sequential(*reference), x, y, 4)
        module = torch.compile(plain, backend="aot_eager", dynamic=False)
        # Compiled ahead: the stages would do it one after the other, against the timeout of the transfers.
        module(torch.ones_like(x[:2]).requires_grad_(context.rank > 0)).sum().backward()
        context.wait_for_all("compiled", limit=100.0)
        schedule = chain(context.rank, 4, module, name, 4, **options)
        for _ in range(2):
            plain.zero_grad()
            schedule.step(x, target=y)
            assert largest_difference(plain, reference[context.rank]) <= 1e-14

    case.__name__ = f"compiled_{name}{'_'.join(['', *options])}"
    return case


# ---- looking back ----------------------------------------------------------------------------------------


def exposed_communication(context) -> None:
    """Of its waits a rank learns which part was for values on their way: never more than all of it."""
    module = Sum(mlp(4)[context.rank], 0.05 if context.rank == 0 else 0.0)
    schedule = chain(context.rank, 4, module, "1F1B", 2)
    x, y = batch(4)
    schedule.step(x, target=y)
    line = schedule.summary(together=True)
    assert f"held {1 if context.rank == 3 else 2} micro-batches at most" in line, line
    waits = float(line.split("waits for values ")[1].split("%")[0])
    exposed = float(line.split(" (")[1].split("%")[0])
    assert 0.0 <= exposed <= waits <= 100.0, line
    assert "for values in flight" not in schedule.summary()
    assert schedule.summary(together=True).startswith(f"rank {context.rank}: step of")


def several_stages_count_together(context) -> None:
    group, indices = dist.new_group(), (context.rank, 7 - context.rank)
    stages = [PipelineStage(mlp(8)[index], index, 8, CPU, group=group) for index in indices]
    schedule = ScheduleZBV(stages, 8, loss_fn=mse, timeout=TIMEOUT)
    x, y = batch(8)
    schedule.step(x, target=y)
    assert "held 8 micro-batches at most" in schedule.summary()


CASES = [
    *VALUE_CASES,
    dropout_case("GPipe", False),
    dropout_case("1F1B", True),
    dropout_case("Eager1F1B", True, delay_weight_grad=True),
    dropout_case("ZBV", False),
    ranks_with_other_samples_draw_other_numbers,
    autocast_case("1F1B"),
    autocast_case("Eager1F1B", delay_weight_grad=True),
    gradient_scaler,
    compiled_case("1F1B"),
    compiled_case("Eager1F1B", delay_weight_grad=True),
    *MEMORY_CASES,
    exposed_communication,
    several_stages_count_together,
]
