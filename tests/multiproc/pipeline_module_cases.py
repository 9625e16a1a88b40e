"""What a stage's module may do, and what a step may bring: dropout, checkpointing, autocast, compiled parts,
micro-batches of unlike shapes, one value for several stages, bounded memory. Four ranks."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from meshcast.errors import AbortedError, LayoutError
from meshcast.pipelining import (
    Edge,
    PipelineStage,
    Schedule1F1B,
    ScheduleEager1F1B,
    ScheduleGPipe,
    ScheduleZBV,
    get_schedule_class,
    microbatch_seed,
)
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
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

mse = nn.functional.mse_loss

if Path(sys.argv[0]).name == "worker.py":
    # Each rank is a host of its own: a copy for each host is what multicast saves.
    os.environ["MESHCAST_HOST_ID"] = f"host {sys.argv[2]}"


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
    import meshcast.pipelining.varying as varying

    here = place(in_a_row([1, 1]))
    if here is None:
        return
    reference, module = mlp(2), mlp(2)[here.stage]
    stage = PipelineStage(module, here.stage, 2, CPU, group=here.group)
    kept, varying._KEPT = varying._KEPT, 2
    try:
        schedule = Schedule1F1B(stage, 2, loss_fn=mse, timeout=TIMEOUT, varying_shapes=True)
        for rows in (2, 4, 6, 2, 4):
            x, y = batch(rows, seed=rows)
            train_alone(nn.Sequential(*reference), x, y, 2)
            schedule.step(x, target=y)
    finally:
        varying._KEPT = kept
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
    raises((LayoutError, AbortedError), "stage 1", "too long", call=lambda: step(5))


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
                (loss / 6).backward()
                expected.append(loss.item())
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
            expected = train_alone(nn.Sequential(*reference), x, y, 6)
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


# ---- memory ----------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Counts the bytes of all tensors that operations made and that are alive; remembers the most."""

    def __init__(self) -> None:
        super().__init__()
        self.most = 0
        self._made: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = [value for value in (*args, *(kwargs or {}).values()) if isinstance(value, torch.Tensor)]
        before = {value.untyped_storage()._cdata for value in known}
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor) and value.untyped_storage()._cdata not in before:
                storage = value.untyped_storage()
                self._made[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.most = max(self.most, self.now())
        return result

    def now(self) -> int:
        self._made = {key: made for key, made in self._made.items() if not made[0].expired()}
        return sum(size for _, size in self._made.values())


def deep(width: int = 8, hidden: int = 2048) -> nn.Module:
    """Holds far more for its backward than what travels between stages."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, hidden), nn.Tanh(), nn.Tanh(), nn.Tanh(), nn.Linear(hidden, width))


def measured(run: Callable[[], Any]) -> tuple[int, int]:
    """Most bytes alive during the call, and those alive after it while its result is."""
    with Live() as live:
        kept = run()
        after = live.now()
        del kept
    return live.most, after


def memory_case(name: str, held: Callable[[int], int], **options: Any):
    """Live bytes stay below what the formula allows: all held micro-batches but one as they are between
    forward and backward, and one at the height of its own."""

    def case(context) -> dict:
        module = deep()
        x = torch.randn(48 * 12, 8)
        part = x[:48]
        _, one = measured(lambda: module(part.requires_grad_()))

        def both() -> None:
            module(part.detach().requires_grad_()).sum().backward()

        both()  # the parameters have gradients from now on
        height, _ = measured(both)
        schedule = chain(context.rank, 4, module, name, 12, **options)
        schedule.step(x, target=x)
        most, _ = measured(lambda: schedule.step(x, target=x, return_outputs=False))
        count = held(context.rank)
        allowed = (count - 1) * one + height
        assert most <= 1.05 * allowed, f"{most} bytes, {allowed} allowed for {count} micro-batches"
        # Else the figure would not be of activations.
        assert most >= 0.95 * count * one, f"{most} bytes, {count} micro-batches have {count * one}"
        return {"over": most / allowed}

    case.__name__ = f"memory_{name}{'_'.join(['', *options])}"
    return case


# ---- looking back ----------------------------------------------------------------------------------------


def exposed_communication(context) -> None:
    """Rank 0 sends late: the others wait, but not for a value that is on its way."""
    module = Sum(mlp(4)[context.rank], 0.2 if context.rank == 0 else 0.0)
    schedule = chain(context.rank, 4, module, "1F1B", 2)
    x, y = batch(4)
    schedule.step(x, target=y)
    line = schedule.summary(together=True)
    assert "held 2 micro-batches at most" in line if context.rank < 3 else "held 1 " in line, line
    waits = float(line.split("waits for values ")[1].split("%")[0])
    exposed = float(line.split(" (")[1].split("%")[0])
    assert 0.0 <= exposed <= waits <= 100.0, line
    if context.rank == 3:
        assert waits > 10.0, line
        assert exposed < 0.5 * waits, line
    assert "for values on their way" not in schedule.summary()
    assert schedule.summary(together=True).startswith(f"rank {context.rank}: step of")


def several_stages_count_together(context) -> None:
    group, indices = dist.new_group(), (context.rank, 7 - context.rank)
    stages = [PipelineStage(mlp(8)[index], index, 8, CPU, group=group) for index in indices]
    schedule = ScheduleZBV(stages, 8, loss_fn=mse, timeout=TIMEOUT)
    x, y = batch(8)
    schedule.step(x, target=y)
    assert "held 8 micro-batches at most" in schedule.summary()


CASES = [
    fan_case("GPipe", None),
    fan_case("1F1B", None),
    fan_case("1F1B", 2),
    fan_case("1F1B", 3, overlap=False),
    fan_case("Eager1F1B", 1, delay_weight_grad=True),
    fan_case("Eager1F1B", 3),
    fan_case("ZBH1", None),
    a_large_value_leaves_its_rank_once,
    varying_case("1F1B"),
    varying_case("Eager1F1B", delay_weight_grad=True),
    many_shapes_one_after_the_other,
    a_shape_that_a_stage_cannot_take,
    shapes_that_vary_by_themselves,
    a_wrong_number_of_pieces,
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
    memory_case("GPipe", lambda _: 12),
    memory_case("1F1B", lambda stage: 4 - stage),
    memory_case("Eager1F1B", lambda stage: 2 * (4 - stage) - 1),
    memory_case("Eager1F1B", lambda stage: 2 * (4 - stage) - 1, delay_weight_grad=True),
    exposed_communication,
    several_stages_count_together,
]
