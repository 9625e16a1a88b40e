"""A process dies or freezes while trainers serve a WeightReader in a push; ranks 0 and 1 train, and hold
whole copies, and 2 reads. The environment says which, and how.

The reader: the push ends on both trainers, within its limit, as if nobody had read, and so do the next ones.
A trainer: the other one's push ends in the same way, the next one fails, and a WeightSync of the other serves
the reader, which gets no error from the loss.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import meshcast
import pytest
import torch
import torch.distributed as dist
from meshcast import Layout
from meshcast.resharding import weight_offers, weight_reader
from meshcast.resharding.meeting import Meeting
from torch.distributed.tensor import Replicate, Shard

GROUP_TIMEOUT = 60.0
LEAVE_UP = True  # the case ends the group itself

VICTIM = int(os.environ["VICTIM"])
FAULT = os.environ[
    "FAULT"
]  # killed, frozen: as it is to send or receive; choosing: killed before that; slow:
# frozen before that
LIMIT = 12.0  # seconds
SHAPE = (513, 257)
TRAINERS, READER = [0, 1], 2


def values(version: int) -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float32).reshape(SHAPE) + version


def fail(context) -> None:
    context.say("failing")
    os.kill(os.getpid(), signal.SIGSTOP if FAULT in ("frozen", "slow") else signal.SIGKILL)


def fails_in_the_middle(context) -> None:
    def now(*_, **__):
        fail(context)

    if FAULT not in ("choosing", "slow"):
        Meeting.move = now
    elif context.rank == READER:
        weight_reader.WeightReader._meet = now
    else:
        weight_offers.Pushing._answer = now


def has_ended(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except FileNotFoundError:
        return True


def waits(context, reads: int) -> None:
    store = dist.PrefixStore("meshcast weights of trainers", context.store)
    context.wait_until(lambda: store.check([f"ask/{reads}"]), "a reader waits", 30.0)


def pushed(sync, held: dict[str, torch.Tensor], version: int, within: float) -> None:
    held["w"].copy_(values(version))
    begin = time.monotonic()
    sync.push(version)
    print(f"version {version}: pushed after {time.monotonic() - begin:.2f} s", flush=True)
    assert time.monotonic() - begin < within
    held["w"].fill_(-1)


def trains(context, living: list[int]) -> None:
    held = {"w": torch.zeros(SHAPE)}
    group = dist.group.WORLD
    options = {"group": group, "readers": context.store, "timeout": LIMIT}
    sync = meshcast.WeightSync(held, {}, lost=[READER], **options)
    waits(context, 1)
    if context.rank == VICTIM:
        context.store.set("victim", str(os.getpid()))
        fails_in_the_middle(context)
    context.wait_for_all("ready", ranks=TRAINERS, limit=60.0)
    pushed(sync, held, 1, LIMIT + 2)
    if VICTIM == READER:
        pushed(sync, held, 2, LIMIT)
        if context.rank == 0:
            context.store.set("go on", "")
            victim = int(context.store.get("victim"))
            if FAULT in ("frozen", "slow"):
                os.kill(victim, signal.SIGKILL)
        context.wait_for_all("pushed", ranks=TRAINERS, limit=60.0)
        if context.rank == 1:  # in the place of the reader that was lost
            reader = meshcast.WeightReader(
                context.store, {"w": Layout([0], [Replicate()])}, rank=0, timeout=2 * LIMIT
            )
            found: list[int] = []
            thread = threading.Thread(target=lambda: found.append(reader.pull()))
            thread.start()
            waits(context, 2)
            context.say("asks again")
        context.wait_until(lambda: context.store.check([f"{context.case}/asks again/1"]), "it asks", 30.0)
        pushed(sync, held, 3, LIMIT)
        if context.rank == 1:
            thread.join(30)
            assert found == [3]
            assert torch.equal(reader.state["w"], values(3))
    else:
        with pytest.raises(meshcast.MeshcastError) as caught:
            pushed(sync, held, 2, LIMIT)
        print(f"{caught.value}", flush=True)
        if FAULT in ("frozen", "slow"):
            os.kill(int(context.store.get("victim")), signal.SIGKILL)
        victim = int(context.store.get("victim"))
        context.wait_until(lambda: has_ended(victim), "the victim ends")
        again = meshcast.WeightSync(held, {}, lost=[VICTIM, READER], **options)
        version = 2
        while not context.store.check([f"{context.case}/read/{READER}"]):
            version += 1
            pushed(again, held, version, LIMIT)
            time.sleep(0.05)
        again.close()
    context.wait_for_all("over", living, limit=60.0)
    sync.close()
    dist.destroy_process_group()


def lost_in_serving(context) -> None:
    living = [rank for rank in range(3) if rank != VICTIM]
    if context.rank != READER:
        return trains(context, living)
    if VICTIM == READER:
        context.store.set("victim", str(os.getpid()))
        fails_in_the_middle(context)
    reader = meshcast.WeightReader(
        context.store, {"w": Layout([0, 1], [Shard(1)])}, rank=0, timeout=4 * LIMIT
    )
    newest = reader.pull()
    assert newest > 2 or (FAULT in ("choosing", "slow") and newest == 1)
    assert torch.equal(reader.state["w"], values(newest)[:, :129])
    context.say("read")
    context.wait_for_all("over", living, limit=60.0)
    return dist.destroy_process_group()


CASES = [lost_in_serving]
