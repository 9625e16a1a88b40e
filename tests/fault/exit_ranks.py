"""The ranks of a round of exits.py: forked from here before anything but imports is done.

    exit_ranks.py JSON PORT

prints a line of JSON: how each ended, and its output.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
import tempfile
import threading
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from fault.exits import LIMIT, WORLD, Exit

CALL_LIMIT = 8.0
ROWS = 1 << 16  # times 64 floats: 16 MiB


def main() -> int:
    what, port = Exit(**json.loads(sys.argv[1])), int(sys.argv[2])
    import meshcast

    for name in meshcast.__all__:
        getattr(meshcast, name)
    outputs = [tempfile.TemporaryFile("w+b") for _ in range(WORLD)]  # noqa: SIM115
    ranks: dict[int, int] = {}
    for rank in range(WORLD):
        child = os.fork()
        if child == 0:
            return become_rank(rank, what, port, outputs[rank].fileno())
        ranks[child] = rank
    status = _wait(ranks)
    output = []
    for file in outputs:
        file.seek(0)
        output.append(file.read().decode(errors="replace"))
    print(json.dumps([{"status": status[rank], "output": output[rank]} for rank in range(WORLD)]), flush=True)
    return 0


def _wait(ranks: dict[int, int]) -> dict[int, int | str]:
    status: dict[int, int | str] = {}
    end = time.monotonic() + LIMIT
    while ranks:
        pid, how = os.waitpid(-1, os.WNOHANG)
        if pid:
            status[ranks.pop(pid)] = os.waitstatus_to_exitcode(how)
        elif time.monotonic() > end:
            for pid in ranks:  # faulthandler prints the stacks
                os.kill(pid, signal.SIGUSR1)
            time.sleep(1.0)
            for pid, rank in ranks.items():
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                status[rank] = "hung"
            break
        else:
            time.sleep(0.01)
    return status


def become_rank(rank: int, what: Exit, port: int, output: int) -> int:
    os.dup2(output, 1)
    os.dup2(output, 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    leaves = what.everybody or rank == what.victim
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    dist.init_process_group(
        what.backend,
        store=dist.PrefixStore("world", store),
        rank=rank,
        world_size=WORLD,
        timeout=timedelta(seconds=20),
    )
    kept: list[Any] = []
    if what.way == "SIGTERM handled" and leaves:
        signal.signal(signal.SIGTERM, _stop)
    if leaves and what.state in ("waiting", "meeting") and what.way.startswith("SIG"):
        number = signal.SIGTERM if what.way == "SIGTERM handled" else getattr(signal, what.way)
        threading.Timer(0.3 + what.delay, os.kill, (os.getpid(), number)).start()
    try:
        _reach(what, rank, leaves, kept)
    except dist.DistError as error:  # typed: of those that stay, or that are overtaken
        print(f"{type(error).__name__}: {error}", flush=True)
    except RuntimeError as error:  # gloo's own collective, when a rank has gone
        if what.state != "imported":
            raise
        print(error, flush=True)
    time.sleep(what.delay)
    if leaves:
        return _leave(what.way)
    time.sleep(0.5)
    for call in (lambda: send(rank), lambda: [handle.wait() for handle in kept]):
        try:
            call()
        except dist.DistError as error:
            print(f"{type(error).__name__}: {error}", flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
    return 0


def send(rank: int, **more: Any) -> Any:
    import meshcast
    from meshcast import Layout
    from torch.distributed.tensor import Replicate, Shard

    rows = ROWS // 4
    mine = torch.full((rows, 64), float(rank)) if rank != 1 else torch.ones(2 * rows, 64)
    mine = mine if rank != 2 else mine[: ROWS - 3 * rows]
    source, destination = Layout([0, 2], [Shard(0)]), Layout([0, 1, 2], [Replicate()])
    options = {"shape": (2 * rows, 64), "dtype": torch.float32, "timeout": CALL_LIMIT, **more}
    return meshcast.reshard_local(None if rank == 1 else mine, source, None, destination, **options)


def _reach(what: Exit, rank: int, leaves: bool, kept: list[Any]) -> None:
    """Brings this rank into the state in which it leaves, or lets it go on as the others do."""
    state = what.state
    if state == "imported":
        if not what.everybody:
            dist.all_reduce(torch.ones(16))
    elif state == "messages":
        kept.append(dist.irecv(torch.empty(1 << 20), (rank + 1) % WORLD))
    elif state == "meeting":
        if what.everybody and rank == 0:
            return
        send(rank)
    else:
        send(rank)
    if state == "in flight":
        kept.extend(send(rank, async_op=True) for _ in range(3))
    elif state == "waiting" and (leaves or not what.everybody):
        if rank == (what.victim + 1) % WORLD:  # it stays away, so that the others wait
            return
        send(rank)
    elif state == "failed":
        try:
            send(rank, shape=(1, 1))
        except dist.DistError as error:
            print(type(error).__name__, flush=True)
    elif state == "destroyed":
        dist.destroy_process_group()


def _stop(_number: int, _frame: Any) -> None:
    sys.exit(7)


def _leave(way: str) -> int:
    if way == "sys.exit":
        sys.exit(0)
    if way == "raise":
        raise ValueError("on its way out")
    if way == "os._exit":
        os._exit(0)
    if way == "exit in a thread":
        thread = threading.Thread(target=lambda: sys.exit(5))
        thread.start()
        thread.join()
    if way in ("SIGTERM", "SIGHUP", "SIGINT"):
        os.kill(os.getpid(), getattr(signal, way))
        time.sleep(5.0)
    if way == "SIGTERM handled":
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(5.0)
    return 0


if __name__ == "__main__":
    sys.exit(main())
