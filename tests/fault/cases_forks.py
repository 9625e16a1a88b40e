"""A rank forks, as data loaders do. Its child calls meshcast, ends the group or just exits, in every way.

It gets an error that says why, and nothing of it is seen by its parent or by the other ranks.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import meshcast
import torch
import torch.distributed as dist
from meshcast import AbortedError, Layout
from multiproc.meshes import quiet_mesh, resharder_between, sharded
from patience import patient
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 60.0
CHILD_LIMIT = 20.0  # seconds in which a child must have ended; none waits for anything
CASE_LIMIT = 100.0
ROWS = 1 << 14  # times 64 floats: 4 MiB
OURS = os.environ.get("BACKEND") == "meshcast"


def _values() -> torch.Tensor:
    return torch.arange(ROWS * 64, dtype=torch.float32).reshape(ROWS, 64)


def _send(context: Any, **more: Any) -> Any:
    """All ranks get what ranks 0 and 1 hold."""
    rank = context.rank
    mine = _values()[rank * ROWS // 2 :][: ROWS // 2] if rank < 2 else None
    source, destination = Layout([0, 1], [Shard(0)]), Layout([0, 1, 2], [Replicate()])
    options = {"shape": (ROWS, 64), "dtype": torch.float32, "timeout": 20.0, **more}
    return meshcast.reshard_local(mine, source, None, destination, **options)


def _all_is_well(context: Any) -> None:
    assert torch.equal(_send(context), _values())
    x = torch.full((1 << 15,), float(context.rank))
    dist.all_reduce(x)
    assert bool((x == 3.0).all())
    if OURS:
        for size in (8, 1 << 17):
            got = torch.zeros(size)
            work = dist.isend(torch.full((size,), float(context.rank)), (context.rank + 1) % 3)
            dist.recv(got, (context.rank + 2) % 3)
            work.wait()
            assert bool((got == (context.rank + 2) % 3).all())


def _ended(child: int) -> int:
    """Its status; a child that hangs is killed."""
    end = time.monotonic() + CHILD_LIMIT
    while time.monotonic() < end:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.005)
    try:
        stacks = _native_stacks(child)
    finally:
        os.kill(child, signal.SIGABRT)  # faulthandler prints where it hangs in Python
        os.waitpid(child, 0)
    raise AssertionError(f"a forked child hangs:\n{stacks}")


def _native_stacks(pid: int) -> str:
    """Which lock it waits for, and whose."""
    gdb = shutil.which("gdb")
    if gdb is None:
        return "without gdb there are no stacks of C++ here"
    command = [gdb, "-batch", "-p", str(pid), "-ex", "thread apply all backtrace 30"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout[-4000:]


def _in_child(what: Callable[[], None], leave: Callable[[], None]) -> int:
    """Forks a child that does it and leaves; its process id."""
    faulthandler.cancel_dump_traceback_later()  # its end in a child waits for a thread that is not there
    child = os.fork()
    if child == 0:
        try:
            what()
        except BaseException:
            traceback.print_exc()
            sys.stderr.flush()
            os._exit(3)
        leave()
        os._exit(4)
    faulthandler.dump_traceback_later(CASE_LIMIT, exit=True)
    return child


def _refused(call: Callable[[], Any]) -> None:
    begin = time.monotonic()
    try:
        call()
    except AbortedError as error:
        assert "was forked from process" in str(error), error
        assert "spawn" in str(error), error
    else:
        raise AssertionError(f"no error: {call}")
    assert time.monotonic() - begin < patient(2.0)


LEAVE: dict[str, Callable[[], None]] = {
    "_exit": lambda: os._exit(0),
    "exit": lambda: sys.exit(0),  # through the worker's own frames: the interpreter ends
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "terminated": lambda: os.kill(os.getpid(), signal.SIGTERM),
}
STATUS = {"killed": -signal.SIGKILL, "terminated": -signal.SIGTERM}


def a_child_calls(context: Any) -> None:
    _all_is_well(context)
    full = _values()
    x = sharded(full, quiet_mesh([0, 1]), [Shard(0)], context.rank)
    there = sharded(full, quiet_mesh([2]), [Shard(0)], context.rank)
    resharder = resharder_between(x, there, reuse_output=True)
    for _ in range(3):
        resharder.run(x)
    context.wait_for_all("ready")
    if context.rank == 2:
        time.sleep(1.0)  # so that the handle of the others is in flight
        handle = _send(context, async_op=True)
    else:
        handle = _send(context, async_op=True)

        def calls() -> None:
            assert handle.is_completed()
            _refused(handle.wait)
            _refused(lambda: handle.get_future().wait())
            _refused(lambda: _send(context))
            _refused(lambda: _send(context, async_op=True))
            _refused(lambda: resharder.run(x))
            _refused(lambda: resharder.start(x))
            _refused(lambda: meshcast.prepare([0, 1, 2]))
            _refused(lambda: meshcast.reshard(x, quiet_mesh([2]), [Shard(0)]))
            _refused(lambda: meshcast.measure_topology())
            if OURS:
                _refused(lambda: dist.all_reduce(torch.ones(8)))
                _refused(lambda: dist.broadcast(torch.ones(1 << 22), 0))
                _refused(lambda: dist.send(torch.ones(8), 1 - context.rank))
                _refused(lambda: dist.recv(torch.ones(8)))
                _refused(dist.monitored_barrier)

        for name, leave in LEAVE.items():
            assert _ended(_in_child(calls, leave)) == STATUS.get(name, 0), name
    handle.wait()
    _all_is_well(context)


def a_child_ends_the_group(context: Any) -> None:
    _all_is_well(context)
    for leave in (LEAVE["_exit"], LEAVE["exit"]):
        assert _ended(_in_child(dist.destroy_process_group, leave)) == 0
    _all_is_well(context)


def a_child_just_exits(context: Any) -> None:
    _all_is_well(context)
    for name, leave in LEAVE.items():
        assert _ended(_in_child(lambda: None, leave)) == STATUS.get(name, 0), name
    worker = multiprocessing.get_context("fork").Process(target=time.sleep, args=(0.01,))
    worker.start()
    worker.join(CHILD_LIMIT)
    assert worker.exitcode == 0
    _all_is_well(context)


def forks_while_calls_are_in_flight(context: Any) -> None:
    """Some of them hold locks at that moment, in this thread or in others."""
    _all_is_well(context)
    stop = threading.Event()
    forks: list[int] = []

    def fork_all_the_time() -> None:
        while not stop.is_set():
            child = _in_child(lambda: _refused(lambda: _send(context)), LEAVE["_exit"])
            assert _ended(child) == 0
            forks.append(child)

    forker = threading.Thread(target=fork_all_the_time)
    if context.rank == 0:
        forker.start()
    for _ in range(30):
        handles = [_send(context, async_op=True) for _ in range(3)]
        for handle in handles:
            assert torch.equal(handle.wait(), _values())
    stop.set()
    if context.rank == 0:
        forker.join()
        assert len(forks) > 2
    _all_is_well(context)


def children_make_a_group_of_their_own(context: Any) -> None:
    _all_is_well(context)
    port = os.environ["CHILDREN_PORT"]

    def own_group() -> None:
        store = dist.TCPStore("127.0.0.1", int(port), is_master=False, wait_for_workers=False)
        dist.distributed_c10d._world.pg_map.clear()  # left alone, as a library that forks its ranks would
        dist.distributed_c10d.GroupMember.WORLD = None
        dist.init_process_group(
            "gloo",
            store=dist.PrefixStore("children", store),
            rank=context.rank,
            world_size=3,
            timeout=timedelta(seconds=30),
        )
        _all_is_well(context)

    assert _ended(_in_child(own_group, LEAVE["_exit"])) == 0
    _all_is_well(context)


CASES = [
    a_child_calls,
    a_child_ends_the_group,
    a_child_just_exits,
    forks_while_calls_are_in_flight,
    children_make_a_group_of_their_own,
]
