"""A sender freezes in the middle of a large transfer, its receiver gives up at the limit, and the sender goes
on. From the error on, not one byte of the receiver's memory may change: it belongs to the program again.

Rank 0 sends, rank 1 receives. Each case makes a process group of its own, since a group that failed is over.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from typing import Any

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast import DeadlineExceededError, Layout, MeshcastError, Resharder, TensorSpec
from multiproc.meshes import quiet_mesh, resharder_between
from torch.distributed.tensor import DTensor, Replicate, Shard

GROUP_TIMEOUT = 60.0

SHAPE = (2048, 8192)  # of float32: 64 MiB, many messages
LIMIT = 2.0  # seconds, of the call that meets the frozen sender
FREEZES = os.environ["FREEZES"] == "1"  # 0: the control run
_TRIES = 5  # the transfer may be over before the sender is frozen
_OLD, _MINE = -1.0, -7.0  # what is in memory before the call, and what the program writes after the error
_LATE = 1.0  # seconds in which late bytes would have come

Start = Callable[[Any, torch.Tensor | None, torch.Tensor | None, float], Any]


def contiguous(context) -> None:
    give_up(context, torch.full(SHAPE, _OLD), lambda memory: memory, local)


def strided(context) -> None:
    """Every other column: what lies between is the program's all along."""
    give_up(context, torch.full((SHAPE[0], 2 * SHAPE[1]), _OLD), lambda memory: memory[:, ::2], local)


def transposed(context) -> None:
    give_up(context, torch.full(SHAPE[::-1], _OLD), lambda memory: memory.t(), local)


def resharder(context) -> None:
    give_up(context, torch.full(SHAPE, _OLD), lambda memory: memory, compiled)


def resharder_strided(context) -> None:
    give_up(context, torch.full(SHAPE[::-1], _OLD), lambda memory: memory.t(), compiled)


def a_sender_that_comes_late(context) -> None:
    """It calls after the receiver has given up."""
    group = dist.new_group([0, 1])
    if context.rank == 0:
        local(group, torch.zeros(SHAPE), None, 60.0).wait()
        context.wait_for_all("given up", limit=60.0)
        with pytest.raises(MeshcastError):
            local(group, torch.zeros(SHAPE), None, LIMIT).wait()
    else:
        memory = torch.full(SHAPE, _OLD)
        local(group, None, memory, 60.0).wait()
        handle = local(group, None, memory, LIMIT)
        with pytest.raises(DeadlineExceededError):
            handle.wait()
        memory.fill_(_MINE)
        context.wait_for_all("given up", limit=60.0)
        time.sleep(_LATE)
        assert bool((memory == _MINE).all())
    context.wait_for_all("looked", limit=60.0)
    dist.destroy_process_group(group)


def local(group: Any, given: torch.Tensor | None, taken: torch.Tensor | None, limit: float) -> Any:
    return meshcast.reshard_local(
        given,
        Layout([0], [Shard(0)]),
        taken,
        Layout([1], [Shard(0)]),
        shape=SHAPE,
        dtype=torch.float32,
        group=group,
        timeout=limit,
        async_op=True,
    )


_compiled: dict[Any, dict[float, Resharder]] = {}  # by process group and limit


def compiled(group: Any, given: torch.Tensor | None, taken: torch.Tensor | None, limit: float) -> Any:
    source, destination = quiet_mesh([0]), quiet_mesh([1])
    if group not in _compiled:
        _compiled[group] = {
            each: resharder_between(
                TensorSpec(SHAPE, torch.float32, source, [Replicate()]),
                TensorSpec(SHAPE, torch.float32, destination, [Replicate()]),
                group=group,
                timeout=each,
            )
            for each in (60.0, LIMIT)
        }
    x, out = (
        None if each is None else DTensor.from_local(each, mesh, [Replicate()], run_check=False)
        for each, mesh in ((given, source), (taken, destination))
    )
    return _compiled[group][limit].start(x, out=out)


def give_up(
    context, memory: torch.Tensor, view: Callable[[torch.Tensor], torch.Tensor], start: Start
) -> None:
    for turn in range(_TRIES):
        group = dist.new_group([0, 1])
        work = _send if context.rank == 0 else _receive
        done = work(context, turn, group, memory, view, start)
        dist.destroy_process_group(group)
        _compiled.clear()
        if done:
            return
    raise AssertionError("the transfer was over each time before its sender was frozen")


def _send(context, turn: int, group: Any, _memory: Any, _view: Any, start: Start) -> bool:
    given = torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE)
    context.store.set(f"{context.case} {turn} pid", str(os.getpid()))
    start(group, given, None, 60.0).wait()  # agreed on before, so that bytes move at once
    context.wait_for_all(f"agreed {turn}", limit=60.0)
    handle = start(group, given, None, LIMIT if FREEZES else 60.0)
    failed = False
    try:
        handle.wait()
    except MeshcastError:
        failed = True
    context.wait_for_all(f"looked {turn}", limit=60.0)
    outcome = context.store.get(f"{context.case} {turn} outcome").decode()
    assert FREEZES or not failed
    return outcome == "done"


def _receive(context, turn: int, group: Any, memory: torch.Tensor, view: Any, start: Start) -> bool:
    taken = view(memory)
    start(group, None, taken, 60.0).wait()
    memory.fill_(_OLD)
    sender = int(context.store.get(f"{context.case} {turn} pid"))
    context.wait_for_all(f"agreed {turn}", limit=60.0)
    handle = start(group, None, taken, LIMIT if FREEZES else 60.0)
    outcome = "done"
    if not FREEZES:
        handle.wait()
        assert not bool((taken == _OLD).any())
    else:
        while not bool((taken[::64, 0] != _OLD).any()) and not handle.is_completed():
            pass
        os.kill(sender, signal.SIGSTOP)
        try:
            handle.wait()
            outcome = "over"
        except DeadlineExceededError:
            memory.fill_(_MINE)
        finally:
            os.kill(sender, signal.SIGCONT)
        if outcome == "done":
            time.sleep(_LATE)
            late = int((memory != _MINE).sum())
            assert late == 0, f"{late} elements have changed after the error"
    context.store.set(f"{context.case} {turn} outcome", outcome)
    context.wait_for_all(f"looked {turn}", limit=60.0)
    return outcome == "done"


CASES = [contiguous, strided, transposed, resharder, resharder_strided]
if FREEZES:
    CASES.append(a_sender_that_comes_late)
