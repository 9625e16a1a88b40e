"""A signal comes while rank 0 waits in a call that cannot end, since rank 2 stays away from it.

What its handler raises ends the wait at once, unchanged. The group is over, and the ranks that wait in the
same call hear of it. A handler that raises nothing changes nothing.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import meshcast
import torch
import torch.distributed as dist
from meshcast import AbortedError, Layout
from multiproc.meshes import quiet_mesh, sharded
from multiproc.pipeline_models import batch, in_a_row, mlp, place, schedule_of
from patience import patient
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 60.0
LIMIT = 40.0  # seconds: of the calls that are interrupted
RAISED_WITHIN = patient(5.0)  # seconds after the signal
TOLD_WITHIN = patient(5.0)
AFTER = 0.6  # seconds from the call to the signal
ROWS = 1 << 15  # times 64 floats: 8 MiB, so that no sender is through before its receiver has come


class Enough(Exception):  # noqa: N818
    """What a handler raises; an Exception, as those of time limits are."""


class Stopped(BaseException):
    pass


def _values() -> torch.Tensor:
    return torch.arange(ROWS * 64, dtype=torch.float32).reshape(ROWS, 64)


Call = Callable[[], Any]


@contextmanager
def _group(context: Any) -> Iterator[dist.ProcessGroup]:
    """Of all ranks; a private group that fails is of no more use, and goes with it."""
    group = dist.new_group(list(range(context.world)))
    yield group
    dist.destroy_process_group(group)


def _send(context: Any, group: dist.ProcessGroup, **more: Any) -> Any:
    """Ranks 0 and 1 both need what rank 2 holds, and it needs what they hold."""
    rank = context.rank
    mine = _values()[rank * ROWS // 4 :][: ROWS // 4]
    source, destination = Layout([0, 1, 2, 3], [Shard(0)]), Layout([0, 1, 2, 3], [Replicate()])
    options = {"shape": (ROWS, 64), "dtype": torch.float32, "group": group, "timeout": LIMIT, **more}
    return meshcast.reshard_local(mine, source, None, destination, **options)


def _interrupted(call: Call, kind: type[BaseException], number: int) -> float:
    """Seconds from the signal to what the call raises, which is of this very type."""
    sent: list[float] = []

    def send() -> None:
        sent.append(time.monotonic())
        signal.pthread_kill(threading.main_thread().ident or 0, number)

    timer = threading.Timer(AFTER, send)
    timer.start()
    try:
        call()
    except BaseException as raised:
        seen = time.monotonic()
        timer.join()
        assert type(raised) is kind, f"{type(raised).__name__}: {raised}"
        if kind is not KeyboardInterrupt:
            assert raised.args == ("by a handler",)
        return seen - sent[0]
    raise AssertionError("nothing was raised")


@contextmanager
def _handled(number: int, raised: type[BaseException] | None) -> Iterator[list[int]]:
    came: list[int] = []

    def handler(_number: int, _frame: Any) -> None:
        came.append(_number)
        if raised is not None:
            raise raised("by a handler")

    before = signal.signal(number, handler)
    try:
        yield came
    finally:
        signal.signal(number, before)


def _check(context: Any, call: Call, kind: type[BaseException] = KeyboardInterrupt) -> None:
    """Ranks 0, 1 and 3 make the call, rank 2 does not."""
    rank = context.rank
    number = signal.SIGINT if kind is KeyboardInterrupt else signal.SIGUSR2
    context.wait_for_all("ready")
    begin = time.monotonic()
    if rank == 0:
        if kind is KeyboardInterrupt:
            took = _interrupted(call, kind, number)
        else:
            with _handled(number, kind):
                took = _interrupted(call, kind, number)
        assert took < RAISED_WITHIN, took
        _fails(call, RAISED_WITHIN)  # the group is over
    elif rank != 2:
        error = _fails(call, AFTER + TOLD_WITHIN)
        assert error.peer == 0 or context.case == "a_pipeline", error
        assert "rank 0" in str(error), error
        assert kind.__name__ in str(error), error
    assert time.monotonic() - begin < AFTER + RAISED_WITHIN + TOLD_WITHIN
    context.wait_for_all("over")


def _fails(call: Call, limit: float) -> AbortedError:
    begin = time.monotonic()
    try:
        call()
    except AbortedError as error:
        assert time.monotonic() - begin < limit, error
        return error
    raise AssertionError("no error")


def in_a_call(context: Any) -> None:
    for kind in (KeyboardInterrupt, Enough, Stopped):
        with _group(context) as group:
            _send(context, group)
            context.case = f"in_a_call {kind.__name__}"
            _check(context, lambda group=group: _send(context, group), kind)


def in_the_wait_of_a_handle(context: Any) -> None:
    with _group(context) as group:
        _send(context, group)
        _check(context, lambda: _send(context, group, async_op=True).wait())


def in_the_wait_of_a_future(context: Any) -> None:
    with _group(context) as group:
        _send(context, group)
        _check(context, lambda: _send(context, group, async_op=True).get_future().wait(), Enough)


def in_a_backward(context: Any) -> None:
    with _group(context) as group:
        source, target = quiet_mesh([0, 1]), quiet_mesh([2, 3])
        x = sharded(_values(), source, [Shard(0)], context.rank).requires_grad_()
        y = meshcast.reshard(x, target, [Shard(1)], group=group, timeout=LIMIT)
        # The gradients of ranks 0 and 1 come from ranks 2 and 3.
        loss = (3 * y.to_local()).sum() if context.rank > 1 else None
        if context.rank != 2:
            again: list[int] = []

            def back() -> None:
                if again:  # the graph is used up
                    _send(context, group)
                again.append(1)
                meshcast.backward(loss)

            if context.rank == 3:
                context.wait_for_all("ready")
                meshcast.backward(loss)  # it only sends
                context.wait_for_all("over")
            else:
                _check(context, back)
        else:
            _check(context, lambda: None)


def while_ranks_meet(context: Any) -> None:
    with _group(context) as group:
        _check(context, lambda: _send(context, group))


def while_a_group_is_prepared(context: Any) -> None:
    with _group(context) as group:
        _check(context, lambda: meshcast.prepare([0, 1, 2, 3], group=group, timeout=LIMIT))


def while_ranks_agree(context: Any) -> None:
    with _group(context) as group:
        meshcast.prepare([0, 1, 2, 3], group=group)
        _check(context, lambda: _send(context, group))


def in_a_pipeline_step(context: Any) -> None:
    context.case = "a_pipeline"
    here = place(in_a_row([1, 1, 1, 1]))
    schedule = schedule_of("1F1B", here, mlp(4)[here.stage], 4, 4)
    x, y = batch(8)
    schedule.step(x, target=y)
    _check(context, lambda: schedule.step(x, target=y))


def a_handler_that_raises_nothing(context: Any) -> None:
    with _group(context) as group:
        _send(context, group)
        context.wait_for_all("ready")
        if context.rank == 2:
            time.sleep(1.2)
            result = _send(context, group)
        else:
            with _handled(signal.SIGUSR2, None) as came:
                main = threading.main_thread().ident or 0
                timers = [
                    threading.Timer(0.1 * i, signal.pthread_kill, (main, signal.SIGUSR2)) for i in range(1, 9)
                ]
                begin = time.monotonic()
                for timer in timers:
                    timer.start()
                result = _send(context, group)
                assert time.monotonic() - begin > 0.9
                assert came, "the handler ran in the wait"
                for timer in timers:
                    timer.join()
        assert torch.equal(result, _values())


CASES = [
    in_a_call,
    in_the_wait_of_a_handle,
    in_the_wait_of_a_future,
    in_a_backward,
    while_ranks_meet,
    while_a_group_is_prepared,
    while_ranks_agree,
    in_a_pipeline_step,
    a_handler_that_raises_nothing,
]
