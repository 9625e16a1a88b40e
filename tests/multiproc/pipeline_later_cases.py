"""Several stages gathered by FSDP2, gradients of several steps, sends on their way, contexts of forwards, and
connections with the store. Four ranks."""

from __future__ import annotations

import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch
import torch.distributed as dist
from meshcast.errors import AbortedError, LayoutError
from meshcast.pipelining import PipelineStage, ScheduleInterleaved1F1B
from multiproc.pipeline_fault_cases import raises
from multiproc.pipeline_models import (
    CPU,
    TIMEOUT,
    batch,
    check_gradients,
    columns,
    in_a_row,
    mlp,
    place,
    schedule_for,
    train_alone,
)
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

mse = nn.functional.mse_loss


def several_steps(name: str):
    """FSDP2 over two pipelines; of three steps only the last reduces."""

    def case(context: Any) -> None:
        reference, stage, x, y = columns(context.rank)
        schedule = schedule_for(name, stage, 2)
        part = context.rank % 2
        for number in range(3):
            x, y = batch(12, seed=number)
            mine = slice(6 * part, 6 * part + 6)
            given = (x[mine],) if stage.is_first else ()
            more = {"target": y[mine]} if stage.is_last else {}
            schedule.step(*given, **more, finalize_gradients=number == 2)
            held = [parameter.grad for parameter in stage.submod.parameters()]
            assert all((grad is None) == (number < 2) for grad in held), (number, held)
            for each in (slice(0, 6), slice(6, 12)):
                train_alone(nn.Sequential(*reference), x[each], y[each], 2, lambda a, b: mse(a, b) / 2)
        check_gradients(stage.submod, reference[stage.stage_index])
        for module in (stage.submod, *reference):
            module.zero_grad()
        given = (x[mine],) if stage.is_first else ()
        schedule.step(*given, **({"target": y[mine]} if stage.is_last else {}))  # nothing is left of those
        for each in (slice(0, 6), slice(6, 12)):
            train_alone(nn.Sequential(*reference), x[each], y[each], 2, lambda a, b: mse(a, b) / 2)
        check_gradients(stage.submod, reference[stage.stage_index])

    case.__name__ = f"several_steps_{name}"
    return case


def several_steps_on_meshes(_: Any) -> None:
    """FSDP2 inside a stage, over its three ranks, one of which has no samples."""
    here = place(in_a_row([1, 3]))
    assert here is not None
    reference, module = mlp(2), mlp(2)[here.stage]
    if here.stage == 1:
        fully_shard(module, mesh=here.mesh)
    stage = PipelineStage(module, here.stage, 2, CPU, group=here.group, mesh=here.mesh)
    schedule = schedule_for("1F1B", stage, 3)
    for number in range(3):
        x, y = batch(6, seed=number)  # micro-batches of two samples
        schedule.step(x, target=y, finalize_gradients=number != 1)
        train_alone(nn.Sequential(*reference), x, y, 3)
        if number == 0:
            check_gradients(module, reference[here.stage])
    check_gradients(module, reference[here.stage])


def unlike_ranks_are_refused(context: Any) -> None:
    """Not all let their gradients wait: nothing is sent, the next step runs."""
    reference, module = mlp(4), mlp(4)[context.rank]
    stage = PipelineStage(module, context.rank, 4, CPU, group=dist.new_group())
    schedule = schedule_for("GPipe", stage, 2)
    x, y = batch(4)
    given = (x,) if stage.is_first else ()
    more = {"target": y} if stage.is_last else {}
    raises(
        (AbortedError, LayoutError),
        "rank 2 calls step with finalize_gradients=False",
        call=lambda: schedule.step(*given, **more, finalize_gradients=context.rank != 2),
    )
    schedule.step(*given, **more)
    train_alone(nn.Sequential(*reference), x, y, 2)
    check_gradients(module, reference[context.rank])


def gathered_stages(active: int):
    """Two pipelines of four stages, two on each rank: FSDP2 really gathers over the other pipeline."""

    def case(context: Any) -> None:
        groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
        meshes = [DeviceMesh("cpu", torch.tensor(ranks)) for ranks in ([0, 1], [2, 3])]
        row, part = divmod(context.rank, 2)
        reference, modules = mlp(4, hidden=7), [mlp(4, hidden=7)[number] for number in (row, row + 2)]
        for module in modules:
            fully_shard(module, mesh=meshes[row], reshard_after_forward=False)
        stages = [
            PipelineStage(module, number, 4, CPU, group=groups[part])
            for module, number in zip(modules, (row, row + 2), strict=True)
        ]
        most = [0]

        @contextmanager
        def look(info: Any) -> Iterator[None]:
            yield
            if not info.is_metadata_inference:
                held = [not isinstance(next(module.parameters()), DTensor) for module in modules]
                most[0] = max(most[0], sum(held))

        for stage in stages:
            stage.register_forward_context(look)
        schedule = ScheduleInterleaved1F1B(stages, 4, loss_fn=mse, timeout=TIMEOUT, max_active_stages=active)
        for seed in range(2):
            x, y = batch(16, seed=seed)
            mine = slice(8 * part, 8 * part + 8)
            for module in (*modules, *reference):
                module.zero_grad()
            schedule.step(*((x[mine],) if row == 0 else ()), **({"target": y[mine]} if row else {}))
            for each in (slice(0, 8), slice(8, 16)):
                train_alone(nn.Sequential(*reference), x[each], y[each], 4, lambda a, b: mse(a, b) / 2)
            for stage, module in zip(stages, modules, strict=True):
                check_gradients(module, reference[stage.stage_index])
        assert most[0] == active, most

    case.__name__ = f"gathered_stages_{active}"
    return case


def sends_on_their_way(limit: int | None, name: str, **options: Any):
    """Large values and a last rank that is slow to take them: how many sends are on their way at once."""

    def case(context: Any) -> dict[str, int]:
        width = 20000
        reference, module = mlp(4, width=width), mlp(4, width=width)[context.rank]
        stage = PipelineStage(module, context.rank, 4, CPU, group=dist.new_group())
        schedule = schedule_for(name, stage, 8, max_outstanding_sends=limit, **options)
        most = [0]

        @contextmanager
        def look(_: Any) -> Iterator[None]:
            if schedule._runtime is not None:
                most[0] = max(most[0], len(schedule._runtime._sends))
                time.sleep(0.1 * (context.rank == 1 and limit is None))
            yield

        stage.register_forward_context(look)
        x, y = batch(80, width=width)
        for _ in range(2):
            module.zero_grad()
            schedule.step(*((x,) if stage.is_first else ()), **({"target": y} if stage.is_last else {}))
        train_alone(nn.Sequential(*reference), x, y, 8)
        check_gradients(module, reference[context.rank])
        assert limit is None or most[0] <= limit, most
        assert limit is not None or context.rank or most[0] > 1, "nothing was to be limited"
        return {"most": most[0]}

    case.__name__ = "_".join(["sends_on_their_way", name, str(limit), *options])
    return case


def a_limit_that_is_none(context: Any) -> None:
    stage = PipelineStage(mlp(4)[context.rank], context.rank, 4, CPU, group=dist.new_group())
    raises(
        LayoutError,
        "max_outstanding_sends must be None or an integer of at least 1, found 0",
        call=lambda: schedule_for("GPipe", stage, 2, max_outstanding_sends=0),
    )


def open_with_the_store() -> int:
    """Connections of this process with the rendezvous store.

    What earlier cases left unreachable ends first; it would end at any time otherwise. Each
    descriptor is asked for its peer: the kernel's table of connections misses rows while others
    come and go.
    """
    gc.collect()
    base: Any = dist.distributed_c10d._get_default_store()
    while isinstance(base, dist.PrefixStore):
        base = base.underlying_store
    found = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # not connected, or closed since it was listed
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                with socket.socket(fileno=os.dup(int(name))) as each:
                    internet = each.family in (socket.AF_INET, socket.AF_INET6)
                    found += internet and each.getpeername()[1] == base.port
    return found


def one_connection_for_all_schedules(context: Any) -> dict[str, int]:
    """Of one group; they may run by turns, and in threads of their own."""
    group = dist.new_group()
    before = open_with_the_store()
    schedules = []
    for number in range(6):
        module = mlp(4, seed=number)[context.rank]
        stage = PipelineStage(module, context.rank, 4, CPU, group=group)
        schedules.append((schedule_for("GPipe", stage, 2), stage, module))
    x, y = batch(4)

    def run(number: int) -> None:
        schedule, stage, module = schedules[number]
        schedule.step(*((x,) if stage.is_first else ()), **({"target": y} if stage.is_last else {}))
        reference = mlp(4, seed=number)
        train_alone(nn.Sequential(*reference), x, y, 2)
        check_gradients(module, reference[context.rank])

    run(0)
    first = open_with_the_store() - before
    for number in range(1, 4):
        run(number)
    later = open_with_the_store() - before
    assert later == first, f"{first} connections after one schedule, {later} after four"
    failed: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            run(number)
        except BaseException as error:
            failed.append(error)

    for number in (4, 5):
        thread = threading.Thread(target=guarded, args=(number,))
        thread.start()
        thread.join(60.0)
        assert not thread.is_alive()
    assert not failed, failed
    return {"connections": first}


CASES = [
    several_steps("1F1B"),
    several_steps("GPipe"),
    several_steps_on_meshes,
    unlike_ranks_are_refused,
    gathered_stages(1),
    gathered_stages(2),
    sends_on_their_way(1, "GPipe"),
    sends_on_their_way(2, "GPipe"),
    sends_on_their_way(1, "1F1B"),
    sends_on_their_way(2, "Eager1F1B", delay_weight_grad=True),
    sends_on_their_way(None, "GPipe"),
    a_limit_that_is_none,
    one_connection_for_all_schedules,
]
