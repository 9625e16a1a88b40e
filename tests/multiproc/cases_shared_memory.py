"""When ranks of one host share memory, when not and what is said then; and that they leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import subprocess
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast import Layout, MeshcastError
from multiproc.threads import lasting_threads, thread_names, transfer_threads
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 60.0
LEAVE_UP = True  # the last case ends the process group itself
ROWS = 300


def regions() -> int:
    """Memories of groups that this process maps, its own and those of its peers."""
    return Path("/proc/self/maps").read_text().count("memfd:meshcast ")


def times_woken(thread: str) -> int:
    """How often the one thread with this name went to sleep."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == thread:
            status = (task / "status").read_text()
            found += [int(line.split()[1]) for line in status.splitlines() if line.startswith("voluntary")]
    (count,) = found
    return count


def move(rank: int, ranks: list[int], rows: int = ROWS) -> None:
    """From the first rank to all others, by columns, so that no box is contiguous; checks every element."""
    full = torch.arange(rows * 7, dtype=torch.int32).reshape(rows, 7)
    others = ranks[1:]
    layouts = Layout([ranks[0]], [Replicate()]), Layout(others, [Shard(1)])
    if rank not in ranks:
        return
    out = meshcast.reshard_local(
        full if rank == ranks[0] else None, layouts[0], None, layouts[1], shape=full.shape, dtype=torch.int32
    )
    if rank in others:
        assert out is not None
        part = dict(enumerate(torch.chunk(full, len(others), dim=1))).get(others.index(rank), full[:, :0])
        assert torch.equal(out, part)


@contextlib.contextmanager
def environment(**values: str) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def told(rank: int, ranks: list[int]) -> list[str]:
    """What a first transfer between these ranks warns of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        move(rank, ranks)
    return [str(w.message) for w in caught if issubclass(w.category, RuntimeWarning)]


def nothing_grows(context) -> None:
    """200 transfers of all sizes: no descriptor, mapping or thread is added."""
    ranks = list(range(context.world))
    for rows in (1, 7, ROWS, 50_000):
        move(context.rank, ranks, rows)
    assert regions() == context.world, "the ranks of one host must share memory"

    def census() -> tuple[int, int, int]:
        return regions(), len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))

    before = census()
    for i in range(200):
        move(context.rank, ranks, (1, 7, ROWS, 50_000)[i % 4])
    # The thread that sets a new plan up ends by itself, a moment after the transfer that it started.
    end = time.monotonic() + 20.0
    while any(now > then for now, then in zip(census(), before, strict=True)):
        assert time.monotonic() < end, f"regions, descriptors, threads: {census()}, before {before}"
        time.sleep(0.01)


def one_thread_for_all_groups(context) -> None:
    """However many groups there are; and nothing wakes it while they are idle."""
    ranks = list(range(context.world))
    groups = [dist.new_group(ranks) for _ in range(8)]
    src, dst = Layout([0, 1], [Shard(0)]), Layout([2, 3], [Shard(0)])
    for number, group in enumerate(groups):
        mine, got = (torch.full((2,), number), None) if context.rank < 2 else (None, torch.empty(2).long())
        meshcast.reshard_local(mine, src, got, dst, shape=(4,), dtype=torch.int64, group=group)
        assert got is None or torch.equal(got, torch.full((2,), number))
    assert [name for name in lasting_threads() if name != "async"] == [
        "mc-progress", "mc-record", "mc-work",
    ]  # fmt: skip
    context.wait_for_all("all groups have moved something")
    end = time.monotonic() + 20.0
    before = -1
    while before != times_woken("mc-progress"):  # on its way to sleep
        assert time.monotonic() < end
        before = times_woken("mc-progress")
        time.sleep(0.3)
    context.wait_for_all("all threads sleep")
    before = times_woken("mc-progress")
    time.sleep(1.0)
    assert times_woken("mc-progress") == before
    context.wait_for_all("all have looked")
    for group in groups:
        dist.destroy_process_group(group)


def one_rank_has_it_off(context) -> None:
    before = regions()
    with environment(MESHCAST_SHM="0" if context.rank == 1 else "1"):
        said = told(context.rank, [0, 1, 2])
    assert regions() == before
    if context.rank in (0, 1, 2):
        assert len(said) == 1
        assert "rank 1: MESHCAST_SHM is 0" in said[0]


def all_have_it_off(context) -> None:
    before = regions()
    with environment(MESHCAST_SHM="0"):
        assert told(context.rank, [0, 2]) == []
    assert regions() == before


def one_rank_has_no_room(context) -> None:
    before = regions()
    with environment(MESHCAST_SHM_MB="1" if context.rank == 2 else "64"):
        said = told(context.rank, [2, 3, 1])
    assert regions() == before
    if context.rank in (1, 2, 3):
        assert len(said) == 1
        assert "(1 MiB) is used up" in said[0]
        assert "rank 2" in said[0]


# Calls at whatever a rank listens at; half of its calls stay open and say nothing.
_STRANGER = """
import re, socket, sys, time
calls, end = [], time.monotonic() + 60
print("here", flush=True)
while time.monotonic() < end:
    for name in set(re.findall(r"@(meshcast-[0-9a-f]+)", open("/proc/net/unix").read())):
        call = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        call.setblocking(False)
        try:
            call.connect("\\0" + name)
        except OSError:
            continue
        if len(calls) < 200 and len(calls) % 2 == 0:
            calls.append(call)
        else:
            calls.append(None)
            call.close()
    time.sleep(0.001)
"""


def strangers_call(context) -> None:
    """Processes of this user, and of another where the test may have one, cannot keep ranks from sharing
    memory, nor keep them waiting."""
    ranks, before = [0, 2, 3], regions()
    strangers = []
    if context.rank == 1:
        for user in (None, 65534) if os.geteuid() == 0 else (None,):
            strangers.append(
                subprocess.Popen(
                    ["/usr/bin/env", "python3", "-c", _STRANGER], stdout=subprocess.PIPE, user=user
                )
            )
        for stranger in strangers:
            assert stranger.stdout is not None
            assert stranger.stdout.readline() == b"here\n"
    context.wait_for_all("strangers are here")
    begin = time.monotonic()
    if context.rank == 3:
        time.sleep(1.0)  # the others are there to be called meanwhile
    assert told(context.rank, ranks) == []
    assert time.monotonic() - begin < 10.0
    assert regions() - before == (len(ranks) if context.rank in ranks else 0)
    context.wait_for_all("met")
    for stranger in strangers:
        assert stranger.poll() is None, "it must have called all along"
        stranger.kill()
        stranger.wait()


def other_hosts(context) -> None:
    """Ranks 0 and 1 on one host, 2 and 3 on another."""
    before = regions()
    with environment(MESHCAST_HOST_ID=f"host {context.rank // 2}"):
        assert told(context.rank, [3, 0, 1]) == []
    assert regions() - before == (2 if context.rank in (0, 1) else 0)


def bad_values(context) -> None:
    for name, value in (("MESHCAST_SHM", "yes"), ("MESHCAST_SHM_MB", "0"), ("MESHCAST_SHM_MB", "1.5")):
        # A group that failed to come up stays failed: each try needs another one.
        group = dist.new_group([0, 1, 2, 3])
        src, dst = Layout([0, 1], [Shard(0)]), Layout([2, 3], [Shard(0)])
        mine = torch.zeros(2) if context.rank < 2 else None
        with environment(**{name: value}), pytest.raises(MeshcastError, match=name):
            meshcast.reshard_local(mine, src, None, dst, shape=(4,), dtype=torch.float32, group=group)


def destroying_ends_its_threads(context) -> None:
    """Not only when the garbage collector comes by."""
    ranks = [0, 1, 2, 3]
    move(context.rank, ranks, ROWS)
    gc.collect()
    gc.disable()
    try:
        before = transfer_threads()
        group = dist.new_group(ranks)
        src, dst = Layout([0, 1], [Shard(0)]), Layout([2, 3], [Shard(0)])
        mine, got = (torch.ones(2), None) if context.rank < 2 else (None, torch.empty(2))
        meshcast.reshard_local(mine, src, got, dst, shape=(4,), dtype=torch.float32, group=group)
        assert transfer_threads() > before, "this test must see the group's threads"
        context.wait_for_all("moved")
        dist.destroy_process_group(group)
        del group
        end = time.monotonic() + 20.0
        while transfer_threads() > before:
            assert time.monotonic() < end, thread_names()
            time.sleep(0.01)
    finally:
        gc.enable()


def destroying_unmaps(context) -> None:
    assert regions() > 0
    context.wait_for_all("done")
    dist.destroy_process_group()
    assert "memfd:meshcast" not in Path("/proc/self/maps").read_text(), "neither regions nor doorbells"
    assert "mc-progress" not in thread_names()


CASES = [
    nothing_grows,
    one_thread_for_all_groups,
    one_rank_has_it_off,
    all_have_it_off,
    one_rank_has_no_room,
    strangers_call,
    other_hosts,
    bad_values,
    destroying_ends_its_threads,
    destroying_unmaps,
]
